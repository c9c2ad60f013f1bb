"""kill -9 at any moment, run again: it goes on where it was, and ends as if nothing had happened."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from flows.cli import main
from storage.layout import DRAFT_FILE, METRICS_TABLE, parse_step
from tests.event_files import scalars
from tests.tiny_runs import (
    ROOT,
    TinyRun,
    computed,
    environment,
    job_of,
    manifests,
    read_metrics,
    run_flow,
    started_by,
    wait_for,
    write_settings,
)

pytestmark = pytest.mark.slow

AFTER_SPLIT = ("capture", "train", "evaluate", "export")


def start(run: TinyRun, directory: Path) -> "subprocess.Popen[str]":
    """Start the command line on a temporary Prefect server of its own."""
    file = write_settings(run.values, directory / "settings.yaml")
    with (directory / "log").open("w") as log:
        return subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", str(file), "--json"],
            cwd=ROOT,
            env=environment(directory / "prefect"),
            text=True,
            stdout=subprocess.PIPE,
            stderr=log,
            start_new_session=True,
        )


def kill_when(run: TinyRun, directory: Path, condition: Callable[[int], object]) -> None:
    """Start a run, kill its process and no other when `condition(pid)` holds; all others must end too."""
    flow = start(run, directory)

    def holds() -> object:
        assert flow.poll() is None, (directory / "log").read_text()
        return condition(flow.pid)

    wait_for(holds, every=0.002)
    processes = started_by(flow.pid)
    commands = [" ".join(process.cmdline()) for process in processes]
    os.kill(flow.pid, signal.SIGKILL)
    flow.communicate()

    assert flow.returncode == -signal.SIGKILL
    assert any("flows.server" in command for command in commands), commands
    assert any("tasks.child" in command for command in commands), commands
    psutil.wait_procs(processes, timeout=10)
    wait_for(lambda: not started_by(flow.pid), seconds=10)


def checkpoints(run: TinyRun) -> list[int]:
    """Steps that have a complete checkpoint."""
    found = run.store.glob("checkpoints/*/steps/step-*/manifest.json")
    return sorted(parse_step(path.parent.name) for path in found)


def published(run: TinyRun, name: str) -> Path:
    """A file of the trained draft; an attempt that was killed while it was published may lie beside it."""
    (manifest,) = run.store.glob("checkpoints/*/manifest.json")
    return manifest.parent / str(json.loads(manifest.read_text())["files"][name]["path"])


def trained(run: TinyRun) -> bytes:
    return published(run, DRAFT_FILE).read_bytes()


def history(run: TinyRun) -> list[dict[str, object]]:
    return read_metrics(published(run, METRICS_TABLE))


def give_up_the_uninterrupted_run(run: TinyRun, directory: Path) -> None:
    """Prune what the run needs that made the store: what is left is what the killed one goes on from."""
    settings = str(directory / "settings.yaml")
    assert main(["prune", settings, "--run", run.result["run"]]) == 0


def one_more_run_completes(run: TinyRun, api: str, uninterrupted: TinyRun) -> list[str]:
    """Run again, compare the end with the uninterrupted run's; returns the stages that were computed."""
    record = run_flow(run.values, api)

    assert trained(run) == trained(uninterrupted)
    assert history(run) == history(uninterrupted)
    assert record["acceptance_length"] == uninterrupted.result["acceptance_length"]
    assert {name: stage["key"] for name, stage in record["stages"].items()} == {
        name: stage["key"] for name, stage in uninterrupted.result["stages"].items()
    }
    return computed(record)


def test_killed_in_capture_it_goes_on_with_the_missing_shards(tiny, tmp_path, prefect_api, run_log):
    run = tiny.copy(tmp_path, without=AFTER_SPLIT)

    kill_when(run, tmp_path, lambda _: list(run.store.glob("states/*/*/manifest.json")))
    before = manifests(run.store, "capture")
    assert 1 <= len(before) <= 3
    give_up_the_uninterrupted_run(run, tmp_path)
    stages = one_more_run_completes(run, prefect_api, tiny)

    assert set(stages) - {"capture"} == {"train", "evaluate", "export"}
    after = manifests(run.store, "capture")
    assert {path: after[path] for path in before} == before
    done = 8 * len(before)
    assert f"capture: {done} of 24 samples done, {24 - done} to do" in run_log.getvalue()


def test_killed_in_the_first_epoch_training_goes_on_at_its_last_checkpoint(
    tiny, tmp_path, prefect_api, run_log
):
    run = killed_in_training(tiny, tmp_path, after=0)
    give_up_the_uninterrupted_run(run, run.store.parent)
    check_resume(run, tiny, prefect_api, run_log)


def test_killed_after_a_validation_training_goes_on_in_the_next_epoch(
    tiny, tmp_path, prefect_api, run_log
):
    (first, _) = [row["step"] for row in history(tiny) if row["validation"]]
    run = killed_in_training(tiny, tmp_path, after=first)
    check_resume(run, tiny, prefect_api, run_log)
    assert resumed_from(run_log.getvalue()) > first


def killed_in_training(tiny: TinyRun, directory: Path, *, after: int) -> TinyRun:
    """A run killed once it has a checkpoint of a later step; on a busy machine the end may come before the kill."""
    for attempt in range(5):
        own = directory / str(attempt)
        own.mkdir()
        run = tiny.copy(own, without=("train", "evaluate", "export"))
        kill_when(run, own, lambda _, run=run: [s for s in checkpoints(run) if s > after])  # type: ignore[misc]
        if checkpoints(run)[-1] < history(tiny)[-1]["step"]:
            return run
    raise AssertionError("five times the training had ended before it was killed")


def check_resume(run: TinyRun, tiny: TinyRun, api: str, log: io.StringIO) -> None:
    steps = checkpoints(run)
    assert 0 < steps[-1] < len([row for row in history(tiny) if not row["validation"]])

    assert one_more_run_completes(run, api, tiny) == ["train", "evaluate", "export"]
    assert resumed_from(log.getvalue()) == steps[-1]
    (events,) = run.store.glob("tensorboard/*")
    seen = scalars(events)
    for side, validation in (("train", 0), ("validation", 1)):
        losses = [(r["step"], r["loss"]) for r in history(run) if r["validation"] == validation]
        assert [step for step, _ in seen[f"{side}/loss"]] == [step for step, _ in losses]
        assert [loss for _, loss in seen[f"{side}/loss"]] == pytest.approx([x for _, x in losses])


def resumed_from(log: str) -> int:
    return int(log.split("going on after step ")[1].split(maxsplit=1)[0])


def test_killed_in_evaluate_it_keeps_the_reference_texts(tiny, tmp_path, prefect_api):
    run = tiny.copy(tmp_path, without=("evaluate", "export"))

    kill_when(run, tmp_path, lambda _: list(run.store.glob("reference/*/manifest.json")))
    (reference,) = run.store.glob("reference/*/manifest.json")
    before = reference.stat().st_mtime_ns

    assert set(one_more_run_completes(run, prefect_api, tiny)) <= {"evaluate", "export"}
    assert reference.stat().st_mtime_ns == before


def test_killed_in_export_it_exports_again(tiny, tmp_path, prefect_api):
    run = tiny.copy(tmp_path, without=("export",))

    kill_when(run, tmp_path, lambda pid: job_of(pid, "tasks.jobs.export"))
    assert not (run.store / "speculator").exists() or not manifests(run.store, "export")

    assert one_more_run_completes(run, prefect_api, tiny) == ["export"]


def test_a_capture_worker_that_dies_is_replaced_and_the_run_completes(tiny, tmp_path):
    run = tiny.copy(tmp_path, without=("capture",))
    flow = start(run, tmp_path)

    worker = wait_for(lambda: job_of(flow.pid, "tasks.jobs.capture"))
    worker.kill()
    stdout, _ = flow.communicate(timeout=300)

    log = (tmp_path / "log").read_text()
    assert flow.returncode == 0, log
    result = json.loads(stdout.splitlines()[-1])
    assert [name for name, stage in result["stages"].items() if stage["state"] == "computed"] == [
        "capture"
    ]
    assert result["stages"]["capture"]["rows"] == 24
    assert started_by(flow.pid) == []


def test_a_temporary_server_that_dies_ends_the_run_at_once_with_one_line(tiny, tmp_path, capsys):
    run = tiny.copy(tmp_path, without=("train", "evaluate", "export"))
    flow = start(run, tmp_path)
    wait_for(lambda: job_of(flow.pid, "tasks.jobs.train"))
    (server,) = [p for p in started_by(flow.pid) if "flows.server" in p.cmdline()]

    server.kill()
    stdout, _ = flow.communicate(timeout=20)

    log = (tmp_path / "log").read_text()
    assert (flow.returncode, stdout) == (1, "")
    assert log.splitlines()[-1] == (
        "outrider: the temporary Prefect server ended; run the same command again to go on"
    )
    assert "Traceback" not in log
    wait_for(lambda: not started_by(flow.pid), seconds=10)
    assert main(["status", "latest", "--store", str(run.store)]) == 0
    assert "killed in train: run it again to go on there" in capsys.readouterr().out


def test_a_terminated_run_says_where_it_stopped_and_leaves_no_process(tiny, tmp_path):
    run = tiny.copy(tmp_path, without=("train", "evaluate", "export"))
    flow = start(run, tmp_path)
    wait_for(lambda: job_of(flow.pid, "tasks.jobs.train"))

    flow.terminate()
    flow.communicate(timeout=30)

    log = (tmp_path / "log").read_text()
    assert flow.returncode != 0
    assert "stopped in train; run the same again to go on there" in log
    assert "Traceback" not in log
    wait_for(lambda: not started_by(flow.pid), seconds=10)
