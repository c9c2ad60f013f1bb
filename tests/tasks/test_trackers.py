"""Trackers: each entry of a training's history is seen once, whatever becomes of the process or the server."""

import json
import logging
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, TensorBoardTracker
from pydantic import ValidationError

from storage.store import Store
from tasks.eagle3.training_settings import TrainSettings
from tasks.trackers import Tracking, tracker_directory
from tests.event_files import scalars

Entry = dict[str, float | None]
KEY = "0123456789abcdef01234567"


def step(number: int, loss: float | None) -> Entry:
    return {"step": number, "epoch": (number - 1) // 2, "validation": 0, "loss": loss, "lr": 0.5}


def validation(number: int, loss: float) -> Entry:
    return {"step": number, "epoch": (number - 1) // 2, "validation": 1, "loss": loss}


HISTORY = [
    step(1, 4.0), step(2, 3.0), validation(2, 3.5), step(3, None), step(4, 2.0), validation(4, 2.5),
]  # fmt: skip
"""Two epochs of two steps; step 3 was not finite."""
TRAIN_LOSS = [(1, 4.0), (2, 3.0), (4, 2.0)]
VALIDATION_LOSS = [(2, 3.5), (4, 2.5)]


def tracking(
    directory: Path, history: list[Entry] | None = None, *, tracker: str = "tensorboard"
) -> Tracking:
    return Tracking(
        tracker, directory=directory, key=KEY, settings={"lr": 0.5}, history=history or []
    )


def test_every_finite_figure_of_a_history_is_in_the_event_file_at_its_step(tmp_path: Path) -> None:
    sent = tracking(tmp_path)
    sent.send(HISTORY[:3])
    sent.send(HISTORY)
    sent.close()

    found = scalars(tmp_path / KEY)
    assert found["train/loss"] == TRAIN_LOSS
    assert found["validation/loss"] == VALIDATION_LOSS
    assert found["train/lr"] == [(1, 0.5), (2, 0.5), (3, 0.5), (4, 0.5)]
    assert found["train/epoch"] == [(1, 0), (2, 0), (3, 1), (4, 1)]


@pytest.mark.parametrize("rewind", [1, 2, 100])
@pytest.mark.parametrize("checkpoint", range(len(HISTORY) + 1))
def test_a_training_goes_on_in_its_run_with_no_step_twice(
    checkpoint: int, rewind: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What was seen after the checkpoint, a validation of its last step too, comes again and counts once."""
    monkeypatch.setattr("tasks.tracker_runs.REWIND", rewind)
    earlier = tracking(tmp_path)
    earlier.send(HISTORY)
    earlier.close()

    resumed = tracking(tmp_path, HISTORY[:checkpoint])
    for end in range(checkpoint, len(HISTORY) + 1):
        resumed.send(HISTORY[:end])
    resumed.close()

    found = scalars(tmp_path / KEY)
    assert found["train/loss"] == TRAIN_LOSS
    assert found["validation/loss"] == VALIDATION_LOSS


def test_what_a_killed_process_had_not_sent_by_its_checkpoint_is_sent_again(tmp_path: Path) -> None:
    earlier = tracking(tmp_path)
    earlier.send(HISTORY[:2])
    earlier.close()

    resumed = tracking(tmp_path, HISTORY[:5])
    resumed.send(HISTORY)
    resumed.close()

    found = scalars(tmp_path / KEY)
    assert found["train/loss"] == TRAIN_LOSS
    assert found["validation/loss"] == VALIDATION_LOSS


def test_a_training_that_goes_on_in_another_place_shows_its_steps_from_the_first(
    tmp_path: Path,
) -> None:
    sent = tracking(tmp_path, HISTORY[:4])
    sent.send(HISTORY)
    sent.close()

    assert scalars(tmp_path / KEY)["train/loss"] == TRAIN_LOSS


class FailingServer(TensorBoardTracker):  # type: ignore[misc]
    """Goes away at step 2, as a server does."""

    def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
        if step == 2:
            raise ConnectionError("no route\nto host")
        super().log(values, step)


def test_a_tracker_that_fails_in_the_middle_is_one_warning(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", FailingServer)

    sent = tracking(tmp_path)
    sent.send(HISTORY)
    sent.close()

    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert (
        "train.tracker tensorboard is given up: ConnectionError: no route to host (the training"
        in (warning.getMessage())
    )
    assert scalars(tmp_path / KEY)["train/loss"] == TRAIN_LOSS[:1]


def test_a_tracker_that_cannot_start_is_one_warning(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    in_the_way = tmp_path / "tensorboard"
    in_the_way.write_text("a file")

    sent = tracking(in_the_way)
    sent.send(HISTORY)
    sent.close()

    (warning,) = [record for record in caplog.records if record.levelno == logging.WARNING]
    assert "is given up: FileExistsError" in warning.getMessage()


def test_a_slow_tracker_holds_up_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = threading.Event()

    class SlowServer(TensorBoardTracker):  # type: ignore[misc]
        def log(self, values: dict[str, Any], step: int | None = None, **_: Any) -> None:
            if not answers.wait(60):
                raise TimeoutError("the training waits for its tracker")
            super().log(values, step)

    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "tensorboard", SlowServer)

    sent = tracking(tmp_path)
    sent.send(HISTORY)
    answers.set()
    sent.close()

    assert scalars(tmp_path / KEY)["train/loss"] == TRAIN_LOSS


def test_no_tracker_leaves_nothing(tmp_path: Path) -> None:
    sent = tracking(tmp_path / "none", tracker="none")
    sent.send(HISTORY)
    sent.close()

    assert not (tmp_path / "none").exists()


def test_files_lie_in_a_local_store_and_else_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    local, remote = Store(str(tmp_path / "runs")), Store("memory://runs")
    assert tracker_directory(local, "tensorboard") == tmp_path / "runs" / "tensorboard"
    assert tracker_directory(remote, "wandb") == tmp_path / "cache" / "wandb"


def test_the_tracker_is_no_part_of_the_identity() -> None:
    assert TrainSettings(tracker="none").identity() == TrainSettings().identity()


@pytest.mark.parametrize("tracker", ["wandb", "mlflow", "trackio"])
def test_a_tracker_that_is_not_installed_is_refused_with_the_command_that_installs_it(
    tracker: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if find_spec(tracker) is not None:
        pytest.skip(f"{tracker} is installed")
    (tmp_path / tracker).mkdir()  # as wandb leaves it behind: to Python a package without code
    monkeypatch.syspath_prepend(tmp_path)

    with pytest.raises(
        ValidationError, match=rf"{tracker} is not installed.* -m pip install {tracker}"
    ):
        TrainSettings(tracker=tracker)


def killed_and_resumed(directory: Path, tracker: str) -> None:
    """End before the last entry, and go on behind the second, where there was a checkpoint."""
    first = tracking(directory, tracker=tracker)
    first.send(HISTORY[:-1])
    first.close()
    second = tracking(directory, HISTORY[:2], tracker=tracker)
    second.send(HISTORY)
    second.close()


def test_mlflow_has_one_run_with_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    mlflow = pytest.importorskip("mlflow", reason="mlflow is not installed")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")
    monkeypatch.chdir(tmp_path)

    killed_and_resumed(tmp_path / "mlflow", "mlflow")

    assert [r.getMessage() for r in caplog.records if "given up" in r.getMessage()] == []
    (run,) = mlflow.search_runs(experiment_names=["outrider"], output_format="list")
    assert run.data.params == {"lr": "0.5"}
    client = mlflow.MlflowClient()
    for name, expected in (("train/loss", TRAIN_LOSS), ("validation/loss", VALIDATION_LOSS)):
        found = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, name)]
        assert found == expected


def test_trackio_has_one_run_with_every_step_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    from trackio.sqlite_storage import SQLiteStorage

    monkeypatch.setattr("trackio.sqlite_storage.TRACKIO_DIR", tmp_path)

    killed_and_resumed(tmp_path / "trackio", "trackio")

    rows = SQLiteStorage.get_logs("outrider", KEY)
    for name, expected in (("train/loss", TRAIN_LOSS), ("validation/loss", VALIDATION_LOSS)):
        assert [(row["step"], row[name]) for row in rows if name in row] == expected


def wandb_losses(file: Path) -> list[tuple[int, float]]:
    """(step, loss) of a W&B file of one 32 KiB block: a header of 7 bytes, then checksum, length, type and record."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, found = file.read_bytes(), 7, []
    while at < len(data):
        size = int.from_bytes(data[at + 4 : at + 6], "little")
        history = Record.FromString(data[at + 7 : at + 7 + size]).history
        found += [
            (history.step.num, json.loads(item.value_json))
            for item in history.item
            if "train/loss" in {item.key, *item.nested_key}
        ]
        at += 7 + size
    return found


def test_wandb_offline_writes_a_run_of_the_trainings_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")

    killed_and_resumed(tmp_path / "wandb", "wandb")

    assert [r.getMessage() for r in caplog.records if "given up" in r.getMessage()] == []
    first, second = sorted((tmp_path / "wandb").glob(f"offline-run-*-{KEY}/run-{KEY}.wandb"))
    assert wandb_losses(first) == [(1, 4.0), (2, 3.0), (4, 2.0)]
    assert wandb_losses(second) == []
