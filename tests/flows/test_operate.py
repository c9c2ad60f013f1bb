"""make up, and what goes on by itself then: landed data is trained on once, the better draft is promoted; make down."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from storage import drafts
from storage.store import Store
from tests.tiny_runs import ROOT, Values, chat, tiny_values, wait_for, write_settings

pytestmark = pytest.mark.slow

NAME = "verifier"  # the last part of the tiny verifier's path
FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
QUICK = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}


@dataclass(frozen=True)
class Site:
    """A state directory and a port of its own for make up."""

    state: Path
    port: int

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def environment(self) -> dict[str, str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        own = {"OUTRIDER_STATE": str(self.state), "PREFECT_SERVER_API_PORT": str(self.port)}
        return {**plain, **QUICK, **own, "HF_HUB_OFFLINE": "1"}

    def operate(self, word: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flows.operate", word]
        return subprocess.run(
            command, cwd=ROOT, env=self.environment, capture_output=True, text=True, check=False
        )

    def get(self, path: str) -> Any:
        return httpx.get(f"{self.api}{path}", timeout=30).raise_for_status().json()

    def post(self, path: str, body: Values) -> Any:
        return httpx.post(f"{self.api}{path}", json=body, timeout=30).raise_for_status().json()

    def patch(self, path: str, body: Values) -> None:
        def patched() -> bool:  # SQLite may be locked for a moment
            return httpx.patch(f"{self.api}{path}", json=body, timeout=30).is_success

        wait_for(patched, seconds=20)

    def start(self, deployment: str, parameters: Values) -> str:
        found = self.get(f"/deployments/name/{deployment}/{deployment}")["id"]
        made = self.post(f"/deployments/{found}/create_flow_run", {"parameters": parameters})
        return str(made["id"])

    def finish(self, run_id: str) -> Values:
        wait_for(lambda: self.get(f"/flow_runs/{run_id}")["state_type"] in FINAL, seconds=150)
        found: Values = self.get(f"/flow_runs/{run_id}")
        return found

    def watch(self, values: Values) -> str:
        """Run watch-data by the worker; returns the name of its final state."""
        return str(self.finish(self.start("watch-data", {"settings": values}))["state_name"])

    def watch_here(self, values: Values, directory: Path, api: str) -> str:
        """Run watch-data in a process without a worker, on the server at `api`; returns its log."""
        file = write_settings(values, directory / "watched.yaml")
        done = subprocess.run(
            [sys.executable, "-m", "flows.watch_data", str(file)],
            cwd=ROOT, env=self.environment | {"PREFECT_API_URL": api}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        return done.stdout + done.stderr

    def retrains(self, name: str) -> list[Values]:
        """The runs of the deployment retrain for settings of this name, in the order of their making."""
        only = {"deployments": {"name": {"any_": ["retrain"]}}}
        found = self.post("/flow_runs/filter", only)
        ours = [run for run in found if run["parameters"]["settings"]["name"] == name]
        return sorted(ours, key=lambda run: str(run["created"]))

    def all_ended(self, name: str, count: int) -> list[Values]:
        """Wait until so many retrains have ended; returns them."""
        wait_for(lambda: len(self.retrains(name)) >= count, seconds=40)
        for run in self.retrains(name):
            self.finish(run["id"])
        return self.retrains(name)

    def pids(self) -> dict[str, int]:
        return {
            name: json.loads((self.state / f"{name}.json").read_text())["pid"]
            for name in ("server", "worker")
        }

    def processes(self) -> list[psutil.Process]:
        """All that was started with this state directory, whoever its parent is by now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("OUTRIDER_STATE") == str(self.state) and (
                    process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    made = Site(tmp_path_factory.mktemp("operate") / "state", free_port())
    done = made.operate("up")
    try:
        assert done.returncode == 0, done.stderr
        assert f"http://127.0.0.1:{made.port}" in done.stdout
        yield made
    finally:
        made.operate("down")
        for process in made.processes():
            process.kill()


@pytest.fixture
def values(tmp_path: Path, request: pytest.FixtureRequest) -> Values:
    """Settings of a tiny run whose sources are a directory in which files can land."""
    made = tiny_values(tmp_path)
    (tmp_path / "landing").mkdir()
    (tmp_path / "chats.jsonl").rename(tmp_path / "landing" / "a.jsonl")
    made["data"] = {"sources": [str(tmp_path / "landing")]}
    made["capture"] = {"gpus": 1, "rows_per_shard": 8}
    made["train"] |= {"epochs": 1, "checkpoint_seconds": 60}
    made["evaluate"] = {"prompts": 2, "max_new_tokens": 6}
    return made | {"name": re.sub(r"\W+", "-", request.node.name)[-40:].strip("-_")}


def land(values: Values, name: str, numbers: range) -> None:
    """Put conversations of the train side into the directory that is watched."""
    text = "".join(json.dumps(chat(n, source="seen")) + "\n" for n in numbers)
    Path(values["data"]["sources"][0], name).write_text(text)


def records(values: Values) -> list[Values]:
    found = sorted(
        Path(values["store"], "run_records").glob("[0-9]*.json")
    )  # none that is being written
    return [json.loads(file.read_text()) for file in found]


def test_landed_data_is_trained_on_once_and_both_drafts_are_judged(
    site: Site, values: Values
) -> None:
    assert site.watch(values) == "DataLanded"
    (first,) = site.all_ended(values["name"], 1)
    assert first["state_name"] == "Completed", first["state"]["message"]
    assert site.watch(values) == "NothingNew"

    land(values, "b.jsonl", range(100, 108))
    assert site.watch(values) == "DataLanded"
    _, second = site.all_ended(values["name"], 2)
    assert second["state_name"] == "Completed", second["state"]["message"]
    assert site.watch(values) == "NothingNew"
    assert len(site.retrains(values["name"])) == 2

    before, after = records(values)
    assert before["promotion"]["promoted"]
    assert after["promotion"]["before"] is not None  # on the same prompts
    serving = drafts.current(Store(values["store"]), NAME)
    assert serving is not None
    assert serving.run == (after if after["promotion"]["promoted"] else before)["run"]
    old = set(before["stages"]["capture"]["parts"])
    assert old < set(after["stages"]["capture"]["parts"])
    assert after["flow_run"] == second["id"]


def test_an_event_that_was_lost_is_sent_again(
    site: Site, values: Values, prefect_api: str, tmp_path: Path
) -> None:
    assert "was sent" in site.watch_here(values, tmp_path, prefect_api)
    assert site.retrains(values["name"]) == []

    assert "was sent" in site.watch_here(values, tmp_path, site.api)
    (run,) = site.all_ended(values["name"], 1)
    assert run["state_name"] == "Completed"
    assert "nothing new" in site.watch_here(values, tmp_path, site.api)


def test_of_two_landings_the_second_run_waits_and_ends_at_once_when_nothing_is_left(
    site: Site, values: Values, tmp_path: Path
) -> None:
    pause(site, paused=True)
    try:
        for number, name in enumerate(("b.jsonl", "c.jsonl"), start=1):
            land(values, name, range(100 * number, 100 * number + 4))
            assert "was sent" in site.watch_here(values, tmp_path, site.api)
            wait_for(lambda: len(site.retrains(values["name"])) == number, seconds=40)  # noqa: B023
            # a retrain that waits for this very data keeps the next watch from a second one
            assert "is to train on it" in site.watch_here(values, tmp_path, site.api)
    finally:
        pause(site, paused=False)
    first, second = site.all_ended(values["name"], 2)

    assert sorted([first["state_name"], second["state_name"]]) == ["Completed", "NothingNew"]
    early, late = sorted((first, second), key=lambda run: str(run["start_time"]))
    assert str(early["end_time"]) <= str(late["start_time"])
    (record,) = records(values)
    assert len(record["stages"]["collect"]["parts"]) == 3


def test_a_failed_run_leaves_a_page_with_stage_cause_and_next_step(
    site: Site, values: Values
) -> None:
    Path(values["data"]["sources"][0], "b.jsonl").write_text("{no json\n")

    run = site.finish(site.start("retrain", {"settings": values}))

    assert run["state_name"] == "Failed"
    page = page_of(site, run["id"])
    assert "**stage** collect" in page
    assert "b.jsonl line 1: not JSON" in page
    assert "Retry" in page


def test_a_run_whose_machine_is_lost_is_crashed_within_two_minutes_and_a_retry_goes_on(
    site: Site, values: Values
) -> None:
    values["train"] |= {"epochs": 10_000}
    run_id = site.start("train-draft", {"settings": values})
    wait_for(lambda: Path(values["store"], "checkpoints").exists(), seconds=90)
    lose_all_but_the_server(site)
    said = wait_for(lambda: crashed(site, run_id), seconds=120)

    assert "gave no sign of life for 90 s" in said
    assert site.operate("up").returncode == 0  # another worker
    scheduled = {"type": "SCHEDULED", "name": "AwaitingRetry"}
    site.post(f"/flow_runs/{run_id}/set_state", {"state": scheduled})
    wait_for(lambda: len(records(values)) == 2, seconds=60)
    wait_for(lambda: "capture" in records(values)[1]["stages"], seconds=60)
    again = records(values)[1]
    assert {one["state"] for one in again["stages"].values()} == {"reused"}
    assert again["flow_run"] == run_id


def test_make_up_again_changes_nothing_and_make_down_leaves_no_process(
    site: Site, values: Values
) -> None:
    watching = "/deployments/name/watch-data/watch-data"
    (schedule,) = site.get(watching)["schedules"]
    assert not schedule["active"]
    deployment = site.get(watching)["id"]
    for path, change in (
        (f"/schedules/{schedule['id']}", {"active": True}),
        ("", {"parameters": {"settings": values}}),
    ):
        site.patch(f"/deployments/{deployment}{path}", change)
    pids, automations = site.pids(), site.post("/automations/filter", {})

    assert site.operate("up").returncode == 0

    assert site.pids() == pids
    assert site.get(watching)["parameters"] == {"settings": values}
    assert [one["active"] for one in site.get(watching)["schedules"]] == [True]
    assert {one["id"] for one in site.post("/automations/filter", {})} == {
        one["id"] for one in automations
    }
    values["train"] |= {"epochs": 10_000}
    site.start("train-draft", {"settings": values})
    wait_for(lambda: Path(values["store"], "checkpoints").exists(), seconds=90)

    done = site.operate("down")

    assert done.returncode == 0, done.stderr
    assert "stopped: worker, server; " in done.stdout
    assert site.processes() == []
    assert records(values)[0]["state"] == "stopped"
    assert list(site.state.rglob("prefect.db"))
    assert site.operate("down").stdout == "nothing runs\n"


def pause(site: Site, *, paused: bool) -> None:
    """Whether the worker takes up runs."""
    site.patch("/work_pools/outrider", {"is_paused": paused})


def page_of(site: Site, run_id: str) -> str:
    only = {"artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"any_": ["run-end"]}}}
    (page,) = site.post("/artifacts/filter", only)
    return str(page["data"])


def crashed(site: Site, run_id: str) -> str | None:
    run = site.get(f"/flow_runs/{run_id}")
    return str(run["state"]["message"]) if run["state_type"] == "CRASHED" else None


def lose_all_but_the_server(site: Site) -> None:
    worker = psutil.Process(site.pids()["worker"])
    for process in [*worker.children(recursive=True), worker]:
        process.send_signal(signal.SIGKILL)
