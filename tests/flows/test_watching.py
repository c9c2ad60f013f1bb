"""What watch-data and retrain do with another verifier, a worse draft, bad input and runs that fail; who is told."""

import json
import shutil
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any
from uuid import uuid4

import httpx
import pytest
from safetensors.torch import load_file, save_file

from storage import drafts
from storage.store import Store
from tests.operated_site import Site, land, records
from tests.tiny_runs import TinyRun, Values, wait_for

pytestmark = [pytest.mark.slow, pytest.mark.operate]

NAME = "verifier"  # the last part of the tiny verifier's path


@pytest.fixture
def served(tiny: TinyRun, tmp_path: Path, request: pytest.FixtureRequest) -> TinyRun:
    """A store with a draft in service; verifier and data are its own, and a file has landed since."""
    run = tiny.copy(tmp_path)
    shutil.copytree(tiny.values["verifier"]["model"], tmp_path / NAME)
    (tmp_path / "landing").mkdir()
    shutil.copy2(tiny.values["data"]["sources"][0], tmp_path / "landing" / "chats.jsonl")
    own = {
        "verifier": {"model": str(tmp_path / NAME)},
        "data": {"sources": [str(tmp_path / "landing")]},
    }
    land(own, "b.jsonl", range(100, 108))
    return TinyRun(run.values | own, run.store, run.result)


def test_another_revision_of_the_verifier_is_new_and_another_draft_is_not(
    site: Site, values: Values, tmp_path: Path
) -> None:
    assert site.watch(values) == "DataLanded"
    (first,) = site.all_ended(values["name"], 1)
    assert first["state_name"] == "Completed", first["state"]["message"]
    weights = Path(values["verifier"]["model"], "model.safetensors")
    tensors = load_file(weights)
    tensors["model.norm.weight"] = tensors["model.norm.weight"] * 1.25
    save_file(tensors, weights, {"format": "pt"})

    assert "another verifier; the event" in site.watch_here(values, tmp_path, site.api)

    _, second = site.all_ended(values["name"], 2)
    assert second["state_name"] == "Completed", second["state"]["message"]
    old, new = (one["stages"] for one in records(values))
    assert old["load_verifier"]["key"] != new["load_verifier"]["key"]
    assert "nothing new" in site.watch_here(values, tmp_path, site.api)


def test_two_verifiers_under_one_name_do_not_take_each_other_for_new(
    site: Site, values: Values, tmp_path: Path
) -> None:
    other = values | {"verifier": {"model": str(tmp_path / "another")}}
    shutil.copytree(values["verifier"]["model"], tmp_path / "another")
    for one in (values, other):
        assert "was sent" in site.watch_here(one, tmp_path, site.api)
    assert {run["state_name"] for run in site.all_ended(values["name"], 2)} == {"Completed"}

    for one in (values, other):
        assert "nothing new" in site.watch_here(one, tmp_path, site.api)


def test_a_draft_that_is_no_better_is_not_put_in_service_and_its_page_says_why(
    site: Site, served: TinyRun
) -> None:
    still = served.changed(train={"lr": 1e-30})  # what it starts with is what it ends with

    run = site.finish(site.start("retrain", {"settings": still}))

    assert run["state_name"] == "Completed", run["state"]["message"]
    page = site.page_of(child_of(site, run["id"]), "stage-promote")
    assert f"not put in service as {NAME}: " in page
    assert "less than promote.margin 0.02" in page
    record = records(still)[-1]
    assert Path(record["speculator"]).is_dir()
    now = drafts.current(Store(str(served.store)), NAME)
    assert now is not None
    assert now.run == served.result["run"]


def test_a_retrain_starts_from_the_draft_in_service_when_it_is_told_to(
    site: Site, served: TinyRun
) -> None:
    parameters = {"settings": served.values, "start_from": "draft in service"}

    run = site.finish(site.start("retrain", parameters))

    assert run["state_name"] == "Completed", run["state"]["message"]
    record = records(served.values)[-1]
    first = served.result["stages"]["export"]["parts"][0]
    assert record["settings"]["train"]["init"].startswith(f"{served.store}/{first}")
    assert record["stages"]["warm_start"]["state"] == "computed"
    # an untrained draft has 1.0
    assert record["acceptance"]["before"]["acceptance_length"] > 1.0


@pytest.mark.parametrize(
    ("break_it", "said"),
    [
        (lambda values: values["data"].update(sources=["/nowhere/*.jsonl"]), "no file matches"),
        (lambda values: values["verifier"].update(model="/nowhere/model"), "/nowhere/model"),
        (lambda values: unreadable(values, "{"), "delete it to have everything count as new"),
        (lambda values: unreadable(values, "[]"), "delete it to have everything count as new"),
    ],
    ids=["a missing source", "a missing verifier", "half a file", "another file"],
)
def test_what_cannot_be_compared_fails_with_the_way_out_and_starts_nothing(
    site: Site, values: Values, break_it: Any, said: str
) -> None:
    break_it(values)

    run = site.finish(site.start("watch-data", {"settings": values}))

    assert run["state_name"] == "Failed"
    page = site.page_of(run["id"])
    assert said in page
    assert "**next step** mend the cause" in page
    assert site.retrains(values["name"]) == []


@pytest.mark.parametrize(
    "payload",
    [
        {},
        {"settings": "nonsense", "fingerprint": "x"},
        {"settings": {"name": "x"}, "fingerprint": "x"},
        {"settings": {"name": "x", "store": "s", "no": 1}, "fingerprint": {"a": [1]}},
    ],
    ids=["nothing", "a word", "half the settings", "unknown keys"],
)
def test_an_event_with_a_payload_of_nonsense_starts_no_run(site: Site, payload: Values) -> None:
    before, given_up = retrains(site), failed_actions(site)
    event = {
        "id": str(uuid4()),
        "occurred": datetime.now(UTC).isoformat(),
        "event": "outrider.data.landed",
        "resource": {"prefect.resource.id": "outrider.settings.x"},
        "payload": payload,
    }
    sent = httpx.post(f"{site.api}/events", json=[event], timeout=30)
    assert sent.status_code == 204

    wait_for(lambda: failed_actions(site) > given_up, seconds=40)

    assert retrains(site) == before


def test_data_on_which_three_runs_have_failed_waits_for_a_person(
    site: Site, values: Values, tmp_path: Path
) -> None:
    Path(values["data"]["sources"][0], "b.jsonl").write_text("{no json\n")
    for count in (1, 2, 3):
        assert "was sent" in site.watch_here(values, tmp_path, site.api)
        assert {run["state_name"] for run in site.all_ended(values["name"], count)} == {"Failed"}

    said = site.watch_here(values, tmp_path, site.api)
    assert "3 runs that were to train on it failed: mend the cause, then press Retry" in said

    land(values, "b.jsonl", range(100, 104))  # mended: that is other data
    assert "was sent" in site.watch_here(values, tmp_path, site.api)
    *_, last = site.all_ended(values["name"], 4)
    assert last["state_name"] == "Completed", last["state"]["message"]


def test_a_retrain_that_was_cancelled_is_not_started_again_by_the_next_look(
    site: Site, values: Values, tmp_path: Path
) -> None:
    site.pause(paused=True)
    try:
        assert "was sent" in site.watch_here(values, tmp_path, site.api)
        wait_for(lambda: site.retrains(values["name"]), seconds=40)
        (run,) = site.retrains(values["name"])
        cancelled = {"state": {"type": "CANCELLED", "name": "Cancelled"}}
        site.post(f"/flow_runs/{run['id']}/set_state", cancelled)

        assert "was cancelled: press Retry" in site.watch_here(values, tmp_path, site.api)
    finally:
        site.pause(paused=False)
    assert len(site.retrains(values["name"])) == 1


def test_a_run_that_fails_or_crashes_is_told_of_with_stage_cause_and_next_step(
    site: Site, values: Values
) -> None:
    with listening() as (url, got):
        for _ in ("first", "again"):
            done = site.operate("up", OUTRIDER_NOTIFY=url)
            assert done.returncode == 0, done.stderr
        assert [message["title"] for message in got] == ["outrider: make up"]
        assert url not in json.dumps(site.post("/block_documents/filter", {}))
        Path(values["data"]["sources"][0], "b.jsonl").write_text("{no json\n")

        run = site.finish(site.start("retrain", {"settings": values}))

        wait_for(lambda: len(got) >= 2, seconds=40)
        _, told = got
        assert told["title"] == f"outrider: retrain {values['name']} failed"
        stage, cause, step, page = told["message"].splitlines()
        assert stage == "stage: collect"
        assert "b.jsonl line 1: not JSON" in cause
        assert (
            step
            == "next step: mend the cause, then press Retry: all that is in the store is reused"
        )
        assert page.endswith(f"/runs/flow-run/{run['id']}")

        Path(values["data"]["sources"][0], "b.jsonl").unlink()
        values["train"] |= {"epochs": 10_000}
        run_id = site.start("train-draft", {"settings": values})
        wait_for(lambda: Path(values["store"], "checkpoints").exists(), seconds=120)
        site.kill("worker")  # and its runs: nobody is left to tell of it but the server
        assert site.operate("up").returncode == 0
        wait_for(lambda: site.crashed(run_id), seconds=150)

        wait_for(lambda: len(got) >= 3, seconds=40)
        told = got[2]
        assert told["title"] == f"outrider: train-draft {values['name']} crashed"
        assert told["message"].startswith("stage: train\ncause: gave no sign of life for 90 s")
        assert "next step: see that a worker runs, then press Retry" in told["message"]
        assert len(got) == 3


def test_somebody_who_cannot_be_told_is_named_when_it_is_set_up(site: Site) -> None:
    for target, said in (
        ("json://127.0.0.1:9/hook", "the first message did not arrive"),
        ("nonsense://x", "the first message did not arrive"),
        ("slack-webhook/ops", "the Prefect server has no block 'slack-webhook/ops'"),
        ("ops", "the Prefect server has no block 'ops'"),
    ):
        done = site.operate("up", OUTRIDER_NOTIFY=target)
        assert done.returncode == 1
        assert said in done.stderr
        assert "all else is up" in done.stderr
        assert "Traceback" not in done.stderr
    assert set(site.pids()) == {"server", "worker"}


def unreadable(values: Values, text: str) -> None:
    file = Path(values["store"], "trained", values["name"], f"{NAME}.json")
    file.parent.mkdir(parents=True)
    file.write_text(text)


def child_of(site: Site, run_id: str) -> str:
    """The run of train-draft within a retrain."""
    only = {"flow_runs": {"parent_flow_run_id": {"any_": [run_id]}}}
    (child,) = site.post("/flow_runs/filter", only)
    return str(child["id"])


def retrains(site: Site) -> set[str]:
    only = {"deployments": {"name": {"any_": ["retrain"]}}}
    return {run["id"] for run in site.post("/flow_runs/filter", only)}


def failed_actions(site: Site) -> int:
    """Actions of automations that the server has given up."""
    only = {"filter": {"event": {"name": ["prefect.automation.action.failed"]}}}
    return int(site.post("/events/filter", only)["total"])


@contextmanager
def listening() -> Iterator[tuple[str, list[Values]]]:
    """An endpoint on this machine that takes messages; gives its Apprise URL and what has come."""
    got: list[Values] = []

    class Endpoint(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            got.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            """Say nothing."""

    with HTTPServer(("127.0.0.1", 0), Endpoint) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"json://127.0.0.1:{server.server_port}/hook", got
        server.shutdown()
