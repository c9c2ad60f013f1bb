"""A history for people: epochs and curves, by hand."""

import pytest

from tasks.training_history import Epoch, Quality, curve, epochs_of

Entry = dict[str, float | None]


def step(number: int, epoch: int, *, loss: float | None, seconds: float | None = None) -> Entry:
    return {
        "step": number, "epoch": epoch, "validation": 0, "loss": loss, "lr": 0.1 * number,
        "tokens": 100, "acceptance_length": 1.0 + 0.1 * number, "full_acc_0": 0.1 * number,
        "full_acc_10": 0.5, "full_acc_2": 0.0, "seconds": seconds,
    }  # fmt: skip


def validation(number: int, epoch: int, loss: float) -> Entry:
    return {
        "step": number, "epoch": epoch, "validation": 1, "loss": loss, "lr": None, "tokens": None,
        "acceptance_length": 1.5, "full_acc_0": 0.25, "full_acc_10": 0.125, "full_acc_2": None,
    }  # fmt: skip


HISTORY = [
    step(1, 0, loss=4.0, seconds=2.0), step(2, 0, loss=3.0, seconds=0.5), validation(2, 0, 3.5),
    step(3, 1, loss=None), step(4, 1, loss=2.0, seconds=0.25),
]  # fmt: skip


def test_an_epoch_has_the_means_of_its_steps_and_its_validation() -> None:
    first, second = epochs_of(HISTORY)

    assert first == Epoch(
        number=1,
        last_step=2,
        lr=0.2,
        tokens_per_second=200 / 2.5,
        train=Quality(3.5, pytest.approx(1.15), (pytest.approx(0.15), 0.0, 0.5)),
        validation=Quality(3.5, 1.5, (0.25, None, 0.125)),
    )
    # the step that was not finite has no loss, and the first after a validation no time
    assert (second.train.loss, second.tokens_per_second, second.validation) == (2.0, 400.0, None)


def test_a_history_without_times_has_no_speed() -> None:
    untimed = [{k: v for k, v in row.items() if k != "seconds"} for row in HISTORY]
    assert [epoch.tokens_per_second for epoch in epochs_of(untimed)] == [None, None]


def test_a_curve_is_of_one_side_and_leaves_out_what_is_no_number() -> None:
    assert curve(HISTORY, "loss", validation=False) == [(1, 4.0), (2, 3.0), (4, 2.0)]
    assert curve(HISTORY, "loss", validation=True) == [(2, 3.5)]
    assert curve(HISTORY, "noise", validation=False) == []


def test_a_long_curve_is_thinned_to_means() -> None:
    history = [step(number, 0, loss=number) for number in range(1, 8)]
    # 7 steps at most 3 points: threes, and what is left
    assert curve(history, "loss", validation=False, points=3) == [(3, 2.0), (6, 5.0), (7, 7.0)]
