"""The job of train on a tiny run's artifacts: what it goes on from, what it says, what it leaves behind."""

import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest

from storage import artifacts
from storage.artifacts import Identity, list_manifests
from storage.checkpoints import Checkpoint, CheckpointError, Checkpoints
from storage.layout import DRAFT_FILE, MANIFEST_NAME, METRICS_TABLE
from storage.store import Store
from tasks.eagle3.training_settings import TrainSettings
from tasks.jobs import train
from tests.tiny_runs import ROOT, TinyRun, read_metrics

Request = dict[str, Any]


class Killed(BaseException):
    """Ends a training as a signal would, between two steps."""


@pytest.fixture
def request_of(tiny: TinyRun, tmp_path: Path) -> Callable[..., Request]:
    """The request of the tiny run's training, its store a copy without anything trained."""
    (trained,) = list_manifests(Store(str(tiny.store)), "checkpoints")
    copy = tmp_path / "store"
    shutil.copytree(tiny.store, copy, ignore=shutil.ignore_patterns("checkpoints"))
    store = Store(str(copy))
    (verifier,), (split,), (vocab,) = (
        list_manifests(store, stage) for stage in ("verifier", "split", "vocab_map")
    )
    capture = next(iter(store.directories("states")))
    draft = dict(trained.settings["draft"])
    layer = draft.pop("layer")
    parts = {
        "verifier": verifier.path,
        "directory": tiny.values["verifier"]["model"],
        "vocab_map": vocab.path,
        "layer_ids": trained.settings["layers"],
        "draft": {"settings": draft, "layer": layer},
    }

    def make(**changes: Any) -> Request:
        group = {**trained.settings["train"], "checkpoint_seconds": 1e-9, **changes}
        settings = TrainSettings(**group)
        identity = Identity(
            stage="checkpoints",
            version=trained.version,
            settings={**trained.settings, "train": settings.identity()},
            inputs=trained.inputs,
        )
        return {
            "store": store.url,
            "states": [part.path for part in list_manifests(store, f"states/{capture}")],
            "samples": [part.path for part in list_manifests(store, "samples")],
            "quarantined": [],
            "split": split.path,
            "draft_parts": parts,
            "settings": settings.model_dump(mode="json"),
            "initial": None,
            "identity": asdict(identity),
        }

    return make


def run(request: Request) -> None:
    train.run(request, lambda _: None)


def run_until(request: Request, checkpoint: int) -> None:
    """Train until there are checkpoints and the last of them is of step `checkpoint` or later, then stop."""

    def stop(_: dict[str, Any]) -> None:
        found = steps(request)
        if found and found[-1] >= checkpoint:
            raise Killed

    with pytest.raises(Killed):
        train.run(request, stop)


def directory(request: Request) -> Path:
    return Path(request["store"]) / Identity(**request["identity"]).path


def steps(request: Request) -> list[int]:
    found = directory(request).glob("steps/step-*/manifest.json")
    return sorted(int(path.parent.name.removeprefix("step-")) for path in found)


def published(request: Request) -> tuple[bytes, list[dict[str, Any]]]:
    (draft,) = directory(request).glob(f"attempt-*/{DRAFT_FILE}")
    (metrics,) = directory(request).glob(f"attempt-*/{METRICS_TABLE}")
    return draft.read_bytes(), read_metrics(metrics)


def harm(request: Request, step: int) -> None:
    (file,) = directory(request).glob(f"steps/step-{step:09d}/attempt-*/tensors.safetensors")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)


def test_what_is_published_are_the_best_weights_and_no_checkpoint_stays(request_of) -> None:
    request = request_of(epochs=5, lr=0.3)  # so high that the last epoch is not the best
    run(request)
    manifest = artifacts.peek(Store(request["store"]), Identity(**request["identity"]).path)
    scores = [row["acceptance_length"] for row in published(request)[1] if row["validation"]]
    assert manifest.facts["best_epoch"] == 1 + scores.index(max(scores)) < 5
    left = {path.name for path in directory(request).rglob("*") if path.is_file()}
    assert left == {MANIFEST_NAME, DRAFT_FILE, METRICS_TABLE}


def test_a_checkpoint_that_a_slow_disk_still_writes_at_the_end_is_given_up(
    request_of, caplog, monkeypatch
) -> None:
    save = Checkpoints.save

    def save_slowly(checkpoints: Checkpoints, checkpoint: Checkpoint) -> Any:
        assert checkpoints._abandoned.wait(30), "the training did not end, or said nothing of it"
        return save(checkpoints, checkpoint)

    monkeypatch.setattr(Checkpoints, "save", save_slowly)
    caplog.set_level(logging.INFO)
    run(request_of(epochs=2))
    assert "is not needed any more: the training has come to its end" in caplog.text


def test_a_stopped_training_goes_on_to_the_same_bits_and_keeps_what_it_is_told_to(
    request_of, caplog
) -> None:
    request = request_of(epochs=4, keep_checkpoints=3)
    run_until(request, checkpoint=7)
    assert 1 <= len(steps(request)) <= 3
    before = steps(request)[-1]
    with caplog.at_level(logging.INFO):
        run(request)
    assert f"going on after step {before}" in caplog.text
    resumed = published(request)
    shutil.rmtree(directory(request))
    run(request)
    assert published(request) == resumed


def unfinished(request: Request) -> int | None:
    """The step of a checkpoint that has files and no manifest yet, later than all complete ones."""
    complete = steps(request)
    for path in directory(request).glob("steps/step-*/attempt-*"):
        step = int(path.parent.name.removeprefix("step-"))
        if complete and step > complete[-1] and not (path.parent / "manifest.json").exists():
            return step
    return None


def kill_while_writing(request: Request, file: Path) -> None:
    """Train in a process of its own and kill it in the middle of writing a checkpoint."""
    file.write_text(json.dumps(request))
    code = "import json, sys; from tasks.jobs import train; train.run(json.load(sys.stdin), lambda _: None)"
    with file.open() as stdin:
        process = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stdin=stdin)
    until = time.monotonic() + 300
    while True:
        assert process.poll() is None, "the training ended before it was killed"
        assert time.monotonic() < until
        if unfinished(request) is None:
            continue
        process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        if unfinished(request) is not None:
            break  # still so, and now it cannot be completed any more
        process.send_signal(signal.SIGCONT)
    process.kill()
    process.wait()


@pytest.mark.slow
def test_a_kill_while_a_checkpoint_is_written_loses_that_one_and_nothing_else(
    request_of, tmp_path, caplog
) -> None:
    request = request_of(epochs=30)
    for _ in range(2):
        kill_while_writing(request, tmp_path / "request.json")
        assert unfinished(request) is not None
    last = steps(request)[-1]
    with caplog.at_level(logging.INFO):
        run(request)
    assert f"going on after step {last}" in caplog.text
    resumed = published(request)
    shutil.rmtree(directory(request))
    run(request)
    assert published(request) == resumed


def test_a_bad_checkpoint_stops_the_training_unless_an_older_one_is_allowed(
    request_of, caplog
) -> None:
    request = request_of(epochs=4, keep_checkpoints=9)
    run_until(request, checkpoint=4)
    assert len(steps(request)) > 1
    older, newest = steps(request)[-2:]
    harm(request, newest)
    for _ in range(2):
        with pytest.raises(CheckpointError, match=rf"step-{newest:09d} .*on_bad_checkpoint"):
            run(request)
    allowed = request_of(epochs=4, keep_checkpoints=9, on_bad_checkpoint="older")
    assert allowed["identity"] == request["identity"]
    with caplog.at_level(logging.INFO):
        run(allowed)
    assert f"step-{newest:09d} is set aside" in caplog.text
    assert f"going on after step {older}" in caplog.text
    resumed = published(request)
    shutil.rmtree(directory(request))
    run(request)
    assert published(request) == resumed


def test_a_changed_setting_starts_anew_and_says_why_in_one_line(request_of, caplog) -> None:
    first = request_of()
    run_until(first, checkpoint=2)
    last = steps(first)[-1]
    with caplog.at_level(logging.INFO):
        run(request_of(lr=5e-3, epochs=1))
    (line,) = [record.message for record in caplog.records if "anew" in record.message]
    assert line == (
        f"training starts anew: it differs from the one in {directory(first).relative_to(first['store'])} "
        f"(step {last}) in train.epochs 1 (there 2), train.lr 0.005 (there 0.001); that one stays"
    )
    assert steps(first)[-1] == last


def test_a_training_without_relatives_says_nothing_of_them(request_of, caplog) -> None:
    run_until(request_of(), checkpoint=1)
    other = request_of(epochs=1)
    other["identity"] = asdict(
        replace(
            Identity(**other["identity"]), inputs={**other["identity"]["inputs"], "states": "0"}
        )
    )
    with caplog.at_level(logging.INFO):
        run(other)
    assert "anew" not in caplog.text
    assert json.loads((directory(other) / "manifest.json").read_text())["inputs"]["states"] == "0"
