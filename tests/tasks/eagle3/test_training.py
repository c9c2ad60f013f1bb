"""The training loop on a small draft: exact resume, validation, the guard, the schedule."""

import json
import math
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.eagle3.batches import TrainingSample
from tasks.eagle3.training import Position, Training, TrainingDivergedError
from tasks.eagle3.training_settings import TrainSettings
from tests.tasks.eagle3.draft_cases import HIDDEN, VOCAB, make_draft

LENGTHS = (9, 14, 30, 12, 7, 22, 18, 11)


def make_samples(*, seed: int, lengths: tuple[int, ...] = LENGTHS) -> list[TrainingSample]:
    generator = torch.Generator().manual_seed(seed)
    return [
        TrainingSample(
            input_ids=torch.randint(VOCAB, (n,), generator=generator),
            aux=torch.randn(n, 3 * HIDDEN, generator=generator),
            last=torch.randn(n, HIDDEN, generator=generator),
            loss_mask=torch.arange(n) >= 3,
        )
        for n in lengths
    ]


def make_training(
    *,
    train: list[TrainingSample] | None = None,
    val: list[TrainingSample] | None = None,
    **changes: Any,
) -> Training:
    settings = {"epochs": 3, "lr": 1e-2, "tokens_per_batch": 40, "ttt_steps": 2, **changes}
    train = make_samples(seed=1) if train is None else train
    val = make_samples(seed=2, lengths=(10, 15)) if val is None else val
    return Training(
        make_draft(),
        train,
        val,
        settings=TrainSettings(checkpoint_seconds=1e-9, **settings),
        precision="fp32",
        train_lengths=[len(s.input_ids) for s in train],
        val_lengths=[len(s.input_ids) for s in val],
    )


def run(
    training: Training,
) -> tuple[dict[str, Tensor], list[tuple[dict[str, Any], dict[str, Tensor]]]]:
    """The best weights, and every checkpoint as it would lie on disk."""
    checkpoints: list[tuple[dict[str, Any], dict[str, Tensor]]] = []

    def keep(position: Position, tensors: dict[str, Tensor]) -> None:
        copies = {name: value.clone() for name, value in tensors.items()}
        checkpoints.append((json.loads(json.dumps(asdict(position), allow_nan=False)), copies))

    best = training.run(on_checkpoint=keep, on_step=lambda *_: None)
    return best, checkpoints


@pytest.mark.parametrize(
    "changes", [{}, {"optimizer": "muon"}, {"noise": 0.3}], ids=["adamw", "muon", "noise"]
)
def test_a_training_resumed_from_any_checkpoint_ends_with_the_same_bits(
    changes: dict[str, Any],
) -> None:
    whole = make_training(**changes)
    best, checkpoints = run(whole)
    assert len(checkpoints) == whole.total_steps + 3  # each step, and the end of each epoch
    for position, tensors in checkpoints[:-1]:
        torch.manual_seed(99)  # another process has another random state
        resumed = make_training(**changes)
        resumed.resume(position, tensors)
        best_again, _ = run(resumed)
        assert best_again.keys() == best.keys()
        for name, value in best.items():
            assert torch.equal(value, best_again[name]), f"{name} from step {position['step']}"
        assert asdict(resumed.position) == asdict(whole.position)


def test_validation_changes_nothing() -> None:
    with_val, without = make_training(), make_training(val=[])
    run(with_val)
    run(without)
    for name, value in with_val.parameters.items():
        assert torch.equal(value, without.parameters[name]), name


def test_two_trainings_of_one_seed_are_equal_and_of_two_seeds_are_not() -> None:
    first, _ = run(make_training())
    second, _ = run(make_training())
    third, _ = run(make_training(seed=1))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not all(torch.equal(value, third[name]) for name, value in first.items())


def test_noise_changes_the_training_and_never_the_validation() -> None:
    noisy, plain = make_training(noise=0.3), make_training()
    assert noisy.validate() == plain.validate()
    run(noisy)
    run(plain)
    assert not torch.equal(noisy.parameters["fc.weight"], plain.parameters["fc.weight"])


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_every_trainable_tensor_moves(optimizer: str) -> None:
    training = make_training(optimizer=optimizer)
    run(training)
    assert training.unmoved() == []


def test_fill_is_the_share_of_the_batches_that_holds_tokens() -> None:
    # 30 + 9, 22 + 18, 14 + 12 + 11 and 7: four batches of 40 for 123 tokens, in each epoch
    assert make_training().total_steps == 3 * 4
    assert make_training().fill == pytest.approx(123 / (4 * 40))


def test_the_best_epoch_is_kept_not_the_last() -> None:
    training = make_training(epochs=6, lr=3e-1)  # so high that later epochs get worse
    best, checkpoints = run(training)
    scores = [r["acceptance_length"] for r in training.position.history if r["validation"]]
    at = scores.index(max(scores))  # the first of equal ones
    assert training.position.best_epoch == at
    ends = [tensors for position, tensors in checkpoints if position["batch"] == 0]
    for name, value in best.items():
        assert torch.equal(value, ends[at][f"weights/{name}"]), name


def test_training_stops_early_when_validation_does_not_improve() -> None:
    training = make_training(epochs=50, lr=3e-1, early_stop_epochs=2)
    run(training)
    assert training.position.epoch < 50
    assert training.position.epoch - 1 - training.position.best_epoch == 2


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_a_nonfinite_step_is_counted_and_never_taken(optimizer: str) -> None:
    samples = make_samples(seed=1)
    samples[2].aux[5, 7] = math.nan
    training = make_training(train=samples, epochs=1, max_nonfinite_steps=3, optimizer=optimizer)
    run(training)
    assert training.position.nonfinite_steps == 1
    assert all(torch.isfinite(value).all() for value in training.parameters.values())
    assert [r["loss"] for r in training.position.history].count(None) == 1


def test_too_many_nonfinite_steps_end_the_training_with_the_way_out() -> None:
    samples = make_samples(seed=1)
    for sample in samples:
        sample.aux[:] = math.inf
    with pytest.raises(TrainingDivergedError, match=r"max_nonfinite_steps 1.*train\.lr"):
        run(make_training(train=samples, max_nonfinite_steps=1))


def test_a_checkpoint_of_another_draft_is_refused() -> None:
    training = make_training()
    _, checkpoints = run(training)
    position, tensors = checkpoints[0]
    del tensors["weights/fc.weight"]
    with pytest.raises(ValueError, match="another draft"):
        make_training().resume(position, tensors)
