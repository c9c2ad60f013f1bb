"""What goes from a store and what stays: on disk, in memory and on S3; then two real runs that share states."""

import os
import shutil
import socket
import subprocess
import sys
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from flows.prune import Choice, carry_out, parse_age, plan_prune, render_plan
from flows.run_records import list_records
from storage import artifacts
from storage.artifacts import Identity
from storage.store import Store
from tasks.byte_sizes import parse_bytes
from tests.tiny_runs import computed, manifests, run_flow, write_settings

HERE = {"host": socket.gethostname(), "pid": os.getpid()}
NOW = datetime(2026, 12, 31, tzinfo=UTC)


def make(store: Store, stage: str, name: str, *, size: int = 100) -> str:
    """Publish an artifact with one file of `size` bytes; returns its path."""
    directory = f"states/capture/{name}" if stage == "states" else None
    wanted = Identity(
        stage=stage, version=1, settings={"name": name}, inputs={}, directory=directory
    )
    with artifacts.write(store, wanted) as writer:
        writer.add_bytes("data", bytes(size))
        return writer.publish(rows=1).path


def record(store: Store, run: str, *, day: int = 1, **values: Any) -> None:
    """Write the record of a run; each stage by its paths: capture=[...]."""
    stages = {
        name: {
            "state": "computed",
            "seconds": 1.0,
            "key": "k",
            "rows": 1,
            "parts": values.pop(name),
        }
        for name in ("warm_start", "tokenize_chats", "fit_batch", "capture", "train", "export")
        if name in values
    }
    started_at = f"2026-12-{day:02d}T00:00:00+00:00"
    entry = {"run": run, "name": "n", "state": "completed", "process": HERE, "making": []}
    store.write_json(
        f"run_records/{run}.json", entry | {"started_at": started_at, "stages": stages} | values
    )


def prune(store: Store, **choice: Any) -> set[str]:
    """Prune and return the artifacts that are left."""
    carry_out(store, plan_prune(store, Choice(**choice), now=NOW))
    return left(store)


def left(store: Store) -> set[str]:
    suffix = "/manifest.json"
    return {path.removesuffix(suffix) for path in store.sizes("") if path.endswith(suffix)}


def test_what_no_run_refers_to_goes_and_the_rest_stays(store: Store) -> None:
    paths = {
        stage: [make(store, place, "a")]
        for stage, place in (
            ("tokenize_chats", "samples"),
            ("capture", "states"),
            ("train", "checkpoints"),
            ("export", "speculator"),
        )
    }
    record(store, "run-1", **paths)
    make(store, "capture_plan", "b")
    make(store, "states", "b", size=2_000)
    before = store.sizes("")

    plan = plan_prune(store, Choice())

    assert store.sizes("") == before
    assert {removal.reason for removal in plan.removals} == {"no run refers to it"}
    table = render_plan(plan).splitlines()
    assert table[0].split() == ["stage", "artifacts", "bytes", "reason"]
    assert [line.split()[:2] for line in table[1:]] == [
        ["capture_plan", "1"],
        ["states", "1"],
        ["total", "2"],
    ]
    carry_out(store, plan)
    assert left(store) == {path for (path,) in paths.values()}
    assert sum(store.sizes("").values()) - store.size("run_records/run-1.json") == plan.left_bytes
    assert render_plan(plan_prune(store, Choice())).startswith("nothing to prune")


def test_states_that_two_runs_share_go_with_the_last_of_them(store: Store) -> None:
    shared, own = make(store, "states", "a"), make(store, "states", "b")
    drafts = [make(store, "speculator", name) for name in ("1", "2")]
    record(store, "run-1", capture=[shared, own], export=[drafts[0]])
    record(store, "run-2", capture=[shared], export=[drafts[1]])

    assert prune(store) == {shared, own, *drafts}
    assert prune(store, runs=("run-1",)) == {shared, drafts[1]}
    assert store.files("run_records") == ["run-2.json"]
    with pytest.raises(LookupError, match=r"0 runs of the store .* match 'run-1'; .*: run-2"):
        prune(store, runs=("run-1",))
    assert prune(store, runs=("run",)) == set()
    assert store.sizes("") == {}


def test_a_live_run_keeps_its_artifacts_and_all_of_the_stages_it_has_yet_to_finish(
    store: Store,
) -> None:
    mine, other = make(store, "samples", "mine"), make(store, "samples", "other")
    ahead = {make(store, "states", "a"), make(store, "checkpoints", "a")}
    record(store, "run-1", state="running", at="capture", tokenize_chats=[mine])
    record(store, "run-2", day=2, tokenize_chats=[other], capture=[])

    assert prune(store, runs=("run-2",)) == {mine, *ahead}
    with pytest.raises(ValueError, match=rf"run-1 is live: process {os.getpid()} on .*in capture"):
        prune(store, runs=("run-1",))
    assert prune(store, older_than=timedelta(0), keep_bytes=0) == {mine, *ahead}

    # where its process cannot be seen it counts as live, and its own artifacts stay once it is in train
    elsewhere = {"host": "elsewhere", "pid": 1}
    record(store, "run-1", state="running", at="train", process=elsewhere, tokenize_chats=[mine])
    assert prune(store) == {mine, *(path for path in ahead if path.startswith("checkpoints"))}


def test_a_killed_run_keeps_what_it_was_making_until_it_is_given_up(store: Store) -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    child.wait()
    process = {"host": HERE["host"], "pid": child.pid}
    partial, other = make(store, "checkpoints", "partial"), make(store, "checkpoints", "other")
    shard, step = make(store, "states", "a"), f"{partial}/steps/step-000000007/manifest.json"
    store.write_bytes(step, b"{}")
    store.delete(f"{partial}/manifest.json")
    making = {"state": "running", "at": "train", "process": process}
    record(store, "run-1", **making, making=[partial, "states/capture"])

    assert prune(store) == {step.removesuffix("/manifest.json"), shard}
    assert prune(store, states_only=True) == {step.removesuffix("/manifest.json"), shard}
    with pytest.raises(ValueError, match="run-1 is killed, and goes on from its states"):
        prune(store, runs=("run-1",), states_only=True)
    assert prune(store, runs=("run-1",)) == set()
    assert other not in left(store)


def test_states_alone_go_of_completed_runs_and_their_drafts_stay(store: Store) -> None:
    states = [make(store, "states", name) for name in "abc"]
    drafts = [make(store, "speculator", name) for name in "abc"]
    plan = make(store, "capture_plan", "a")
    record(store, "run-1", day=1, capture=[states[0]], export=[drafts[0]])
    record(store, "run-2", day=2, capture=[states[1]], export=[drafts[1]])
    record(store, "run-3", day=3, state="failed", capture=states[2:], export=[drafts[2]])

    first = plan_prune(store, Choice(states_only=True, older_than=timedelta(days=29.5)), now=NOW)
    assert [(one.path, one.reason) for one in first.removals] == [
        (states[0], "states of completed run run-1")
    ]
    assert first.runs == ()
    assert prune(store, states_only=True) == {states[2], plan, *drafts}
    assert len(store.files("run_records")) == 3


def test_old_runs_go_by_age_and_by_size_oldest_first_and_the_newest_stays(store: Store) -> None:
    made = [make(store, "states", f"{day}", size=1_000_000) for day in range(1, 6)]
    for day, path in enumerate(made, start=1):
        record(store, f"run-{day}", day=day, capture=[path])

    assert prune(store, older_than=parse_age("29d")) == set(made[1:])  # December 1 of 31
    assert prune(store, keep_bytes=parse_bytes("3.1MB")) == set(made[2:])
    plan = plan_prune(store, Choice(keep_bytes=0))
    assert {removal.path for removal in plan.removals} == set(made[2:4])
    assert 1_000_000 < plan.left_bytes < 1_002_000
    assert [run["run"] for run in plan.runs] == ["run-3", "run-4"]


def test_a_run_with_optional_stages_is_a_run_as_any_other(store: Store) -> None:
    paths = {
        "warm_start": [make(store, "warm_start", "a")],
        "fit_batch": [make(store, "batch_sizes", "a")],
    }
    record(store, "run-1", **paths)
    assert [list(found["stages"]) for found in list_records(store.url)] == [list(paths)]
    assert prune(store) == {path for (path,) in paths.values()}


def test_a_record_that_cannot_be_read_stops_it(store: Store) -> None:
    path = make(store, "states", "a")
    store.write_bytes("run_records/run-1.json", b"{")
    with pytest.raises(ValueError, match=r"run-1.json cannot be read.*mend it, or delete it"):
        prune(store)
    assert left(store) == {path}


def test_a_run_that_has_begun_meanwhile_stops_it(store: Store) -> None:
    path = make(store, "states", "a")
    plan = plan_prune(store, Choice())
    record(store, "run-9", state="running", at="capture")
    with pytest.raises(ValueError, match="the run run-9 has begun meanwhile; prune again"):
        carry_out(store, plan)
    assert left(store) == {path}


def test_what_killed_attempts_left_beside_artifacts_that_stay_goes(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    path, half = make(store, "states", "a"), "states/capture/half"
    record(store, "run-1", capture=[path])
    record(store, "run-2", state="failed", making=["states/capture"])
    attempt = "attempt-20260101T000000000000-0123abcd"
    store.write_bytes(f"{path}/{attempt}/states.safetensors", bytes(500))
    hidden = tmp_path / half / attempt / ".tmp-1234" / "states.safetensors"
    hidden.parent.mkdir(parents=True)
    hidden.write_bytes(bytes(500))

    record(store, "run-3", state="running", at="capture")
    assert plan_prune(store, Choice()).removals == ()
    store.delete("run_records/run-3.json")
    plan = plan_prune(store, Choice())

    assert [(one.path, one.bytes) for one in plan.removals] == [
        (f"{path}/{attempt}", 500),
        (f"{half}/{attempt}", 0),
    ]
    carry_out(store, plan)
    assert not hidden.exists()
    assert left(store) == {path}
    assert artifacts.verify(store, artifacts.require(store, path), deep=True) == []


def test_checkpoints_that_a_completed_training_has_left_go(store: Store) -> None:
    done, going_on = make(store, "checkpoints", "done"), make(store, "checkpoints", "more")
    record(store, "a", train=[done])
    record(store, "b", day=2, state="failed", making=[going_on])
    store.delete(going_on)
    for path in (done, going_on):
        for place in ("steps", "best"):
            store.write_bytes(f"{path}/{place}/step-000000001/manifest.json", b"{}")

    plan = plan_prune(store, Choice(), now=NOW)
    assert sorted(one.path for one in plan.removals) == [f"{done}/best", f"{done}/steps"]
    carry_out(store, plan)
    assert left(store) == {
        done,
        *(f"{going_on}/{place}/step-000000001" for place in ("steps", "best")),
    }


@pytest.mark.parametrize("text", ["", "30", "d", "-1d", "1 year"])
def test_what_is_no_age_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="is no age; write it as 12h, 30d or 8w"):
        parse_age(text)


def test_amounts_of_bytes_are_powers_of_1000() -> None:
    assert [parse_bytes(text) for text in ("7", "50GB", "1.5 tb")] == [7, 50 * 10**9, 15 * 10**11]
    with pytest.raises(ValueError, match="'50 GiB' is no amount of bytes; write it as"):
        parse_bytes("50 GiB")


@pytest.mark.parametrize(
    ("option", "hint"),
    [("--older-than", "'soon' is no age"), ("--keep-bytes", "'soon' is no amount of bytes")],
)
def test_the_command_refuses_them_with_status_2(
    option: str, hint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prune", "settings.yaml", option, "soon"])
    assert ended.value.code == 2
    assert hint in capsys.readouterr().err


def test_of_two_real_runs_on_the_same_states_one_is_given_up_and_the_other_reuses_all(
    tiny, tmp_path, prefect_api, capsys
):
    copy = tiny.copy(tmp_path)
    other = copy.changed(train={"lr": 2e-3})
    second = run_flow(other, prefect_api)
    assert computed(second) == ["train", "evaluate", "export", "promote"]
    shutil.rmtree(copy.store / "drafts")  # so that the first run's draft is served no more
    second = run_flow(other, prefect_api)
    assert computed(second) == ["promote"]
    file = str(write_settings(copy.values, tmp_path / "settings.yaml"))
    before = manifests(copy.store)
    first_run = tiny.result["run"]

    assert main(["prune", file, "--run", first_run, "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert f"only of run {first_run}" in out
    assert out.endswith("nothing was removed (--dry-run)\n")
    assert manifests(copy.store) == before

    assert main(["prune", file, "--run", first_run]) == 0
    assert not (copy.store / tiny.result["stages"]["train"]["parts"][0]).exists()
    assert not Path(tiny.result["speculator"].replace(str(tiny.store), str(copy.store))).exists()
    assert len(manifests(copy.store, "capture")) == 3
    assert main(["verify", file, "--deep"]) == 0
    assert computed(run_flow(other, prefect_api)) == []

    capsys.readouterr()
    assert main(["prune", file, "--states"]) == 0
    assert main(["verify", file]) == 0  # they are not missed
    assert manifests(copy.store, "capture") == {}
    assert (Path(second["speculator"]) / "model.safetensors").is_file()
    record = run_flow(other, prefect_api)
    # the same bytes come out again, and what was trained on them stays valid
    assert computed(record) == ["capture"]
