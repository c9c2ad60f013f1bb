"""Progress: speed and time to go come from the work of this process alone."""

import logging

import pytest

from tasks.progress import Progress
from tasks.stage import _progress_to_log


def last(caplog: pytest.LogCaptureFixture) -> Progress:
    found: Progress = caplog.records[-1].__dict__["progress"]
    return found


def test_a_training_that_goes_on_does_not_count_earlier_steps_as_its_speed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    now = 100.0
    monkeypatch.setattr("tasks.progress.time.monotonic", lambda: now)
    show = _progress_to_log()
    message = {"stage": "train", "total": 1000, "unit": "steps", "note": "epoch 3"}

    with caplog.at_level(logging.INFO, "tasks.progress"):
        show(message | {"done": 900})
        now = 120.0
        show(message | {"done": 940})

    assert last(caplog).per_second == pytest.approx(2.0)  # 40 steps in 20 s
    assert last(caplog).eta_seconds == pytest.approx(30.0)
    logged = [record.getMessage() for record in caplog.records if record.name == "tasks.progress"]
    assert logged == ["train: 940 of 1,000 steps (94 %), 2.0 steps/s, 30 s to go (epoch 3)"]


def test_there_is_no_speed_before_anything_is_done() -> None:
    begun = Progress(stage="train", done=4, total=10, unit="steps", per_second=0.0)

    assert str(begun) == "train: 4 of 10 steps (40 %)"
    assert (begun.speed, begun.eta_seconds) == ("", None)
