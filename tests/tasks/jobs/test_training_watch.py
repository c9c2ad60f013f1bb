"""A training that is watched: each step timed and reported."""

from pathlib import Path
from typing import Any

import pytest

from tasks.eagle3.training_state import Position
from tasks.jobs.training_watch import TrainingWatch
from tasks.trackers import Tracking
from tests.tasks.eagle3.test_training import make_training

TIMES = {"seconds", "tokens_per_second"}
KEY = "0123456789abcdef01234567"


def test_steps_are_timed_and_progress_tells_loss_and_validation(tmp_path: Path) -> None:
    training = make_training(epochs=2)
    tracking = Tracking("none", directory=tmp_path, key=KEY, settings={}, history=[])
    messages: list[dict[str, Any]] = []
    watch = TrainingWatch(training, tracking, messages.append)
    training.run(on_checkpoint=lambda *_: None, on_step=watch.on_step)
    watch.look()
    tracking.close()

    steps = training.total_steps
    assert [message["done"] for message in messages] == list(range(steps + 1))
    assert messages[0]["note"] == ""
    history = training.position.history
    (first_validation, _) = [entry for entry in history if entry["validation"]]
    end = int(first_validation["step"] or 0)
    assert "validation" not in messages[end]["note"]
    loss, length = first_validation["loss"], first_validation["acceptance_length"]
    after = messages[end + 1]["note"]
    assert f"epoch 2, loss {history[end + 1]['loss']:.3f}, " in after
    assert after.endswith(f", validation loss {loss:.3f}, acceptance length {length:.2f}")

    for entry in history:
        untimed = entry["validation"] or entry["step"] == end + 1  # a validation lay before it
        assert (entry.keys() & TIMES == set()) == bool(untimed), entry
    timed = history[0]
    seconds, tokens = timed["seconds"], timed["tokens"]
    assert seconds is not None
    assert seconds > 0
    assert timed["tokens_per_second"] == pytest.approx((tokens or 0) / seconds)


def test_a_training_that_goes_on_starts_with_its_last_validation() -> None:
    history: list[dict[str, float | None]] = [
        {"step": 4, "epoch": 0, "validation": 0, "loss": 3.0, "acceptance_length": 1.1},
        {"step": 4, "epoch": 0, "validation": 1, "loss": 3.5, "acceptance_length": 1.25},
        {"step": 5, "epoch": 1, "validation": 0, "loss": 2.0, "acceptance_length": 1.4},
    ]
    training = make_training(epochs=3)
    training.position = Position(step=5, epoch=1, batch=1, history=history)
    tracking = Tracking("none", directory=Path(), key=KEY, settings={}, history=history)
    messages: list[dict[str, Any]] = []

    TrainingWatch(training, tracking, messages.append)
    tracking.close()

    (start,) = messages
    assert (start["done"], start["total"]) == (5, training.total_steps)
    assert start["note"] == "validation loss 3.500, acceptance length 1.25"
