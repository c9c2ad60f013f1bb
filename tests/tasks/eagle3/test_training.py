"""The training loop on a small draft: exact resume, validation, the guard, the schedule."""

import json
import math
import time
from dataclasses import asdict
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.eagle3.batches import TrainingSample
from tasks.eagle3.ranks import ALONE, Ranks
from tasks.eagle3.training import Training
from tasks.eagle3.training_settings import TrainSettings
from tasks.eagle3.training_state import Position, TrainingDivergedError, TrainingState
from tasks.eagle3.training_step import Precision
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
    device: str = "cpu",
    precision: Precision = "fp32",
    ranks: Ranks = ALONE,
    **changes: Any,
) -> Training:
    settings = {"epochs": 3, "lr": 1e-2, "tokens_per_batch": 40, "ttt_steps": 2, **changes}
    train = make_samples(seed=1) if train is None else train
    val = make_samples(seed=2, lengths=(10, 15)) if val is None else val
    return Training(
        make_draft().to(device),
        train,
        val,
        settings=TrainSettings(**settings),
        precision=precision,
        train_lengths=[len(s.input_ids) for s in train],
        val_lengths=[len(s.input_ids) for s in val],
        ranks=ranks,
    )


class Recorder:
    """Every state of a training: after each step, and as it is checkpointed after each epoch.

    Keeps them as a store would: JSON, copies, and best weights once, by their step.
    """

    def __init__(self, training: Training) -> None:
        self.training = training
        self.states: list[tuple[str, dict[str, Tensor]]] = []
        self.bests: dict[int, dict[str, Tensor]] = {}
        self.first_epoch, self.written = training.position.epoch, 0

    def keep(self, state: TrainingState) -> None:
        own, best = ({n: t.clone() for n, t in part.items()} for part in state.parts())
        if state.position.best_step is not None and best:
            self.bests.setdefault(state.position.best_step, best)
        position = {**state.facts(), "history": state.position.history}
        self.states.append((json.dumps(position, allow_nan=False), own))

    def write(self, state: TrainingState) -> None:
        self.keep(state)
        self.written += 1

    def on_step(self, *_: Any) -> None:
        epochs = self.training.position.epoch - self.first_epoch
        while self.written < epochs:  # the epoch's checkpoint comes before the next step's state
            time.sleep(1e-3)
        state = self.training.state()
        state.settle(max_nonfinite_steps=0)  # a GPU's figures come later
        self.keep(state)

    def run(self) -> dict[str, Tensor]:
        return self.training.run(on_checkpoint=self.write, on_step=self.on_step)

    def read(self, index: int) -> TrainingState:
        text, own = self.states[index]
        position = Position(**json.loads(text))
        best = self.bests[position.best_step] if position.best_step is not None else {}
        return TrainingState.from_parts(position, own, best)


def run(training: Training) -> dict[str, Tensor]:
    """Train to the end; the best weights."""
    return training.run(on_checkpoint=lambda _: None, on_step=lambda *_: None)


@pytest.mark.parametrize(
    "changes", [{}, {"optimizer": "muon"}, {"noise": 0.3}], ids=["adamw", "muon", "noise"]
)
def test_a_training_resumed_from_any_state_ends_with_the_same_bits(changes: dict[str, Any]) -> None:
    check_resumed(**changes)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_so_it_does_on_a_gpu(optimizer: str, precision: Precision) -> None:
    check_resumed(device="cuda", precision=precision, optimizer=optimizer)


def check_resumed(**changes: Any) -> None:
    whole = make_training(**changes)
    recorder = Recorder(whole)
    best = recorder.run()
    # each step, and the end of each epoch but the last
    assert len(recorder.states) == whole.total_steps + 2
    for index in range(len(recorder.states) - 1):
        torch.manual_seed(99)  # another process has another random state
        resumed = make_training(**changes)
        resumed.resume(recorder.read(index))
        step = resumed.position.step
        best_again = Recorder(resumed).run()
        assert best_again.keys() == best.keys()
        for name, value in best.items():
            assert torch.equal(value, best_again[name]), f"{name} from step {step}"
        assert asdict(resumed.position) == asdict(whole.position)


def test_a_checkpoint_holds_weights_and_moments_and_the_best_weights_only_once() -> None:
    training = make_training()
    trainable = sum(value.numel() for value in training.parameters.values())
    recorder = Recorder(training)
    recorder.run()
    each, at_best = [], 0
    for text, own in recorder.states:
        position = json.loads(text)
        values = {
            name: t for name, t in own.items() if t.numel() > 1 and not name.startswith("rng/")
        }
        is_best = position["best_step"] == position["step"]
        at_best += is_best
        assert all(t.dtype == torch.float32 for t in values.values())
        held = 2 + (
            not is_best
        )  # Adam's two moments, and the weights unless they are the best ones
        assert sum(t.numel() for t in values.values()) == held * trainable
        each.append(position["best_step"])
    assert at_best == len(recorder.bests)
    assert set(recorder.bests) == set(each) - {None}


def test_validation_changes_nothing() -> None:
    with_val, without = make_training(), make_training(val=[])
    run(with_val)
    run(without)
    for name, value in with_val.parameters.items():
        assert torch.equal(value, without.parameters[name]), name


def test_two_trainings_of_one_seed_are_equal_and_of_two_seeds_are_not() -> None:
    first = run(make_training())
    second = run(make_training())
    third = run(make_training(seed=1))
    assert all(torch.equal(value, second[name]) for name, value in first.items())
    assert not all(torch.equal(value, third[name]) for name, value in first.items())


class NotedSamples(list[TrainingSample]):
    """Samples that note the order in which they are read."""

    def __init__(self, samples: list[TrainingSample]) -> None:
        super().__init__(samples)
        self.order: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.order.append(index)
        return super().__getitem__(index)


def test_each_epoch_reads_every_sample_once_in_an_order_of_its_own() -> None:
    samples = NotedSamples(make_samples(seed=1))
    run(make_training(train=samples, epochs=3))

    count = len(samples)
    epochs = [tuple(samples.order[start : start + count]) for start in (0, count, 2 * count)]
    assert [sorted(order) for order in epochs] == 3 * [list(range(count))]
    assert len(samples.order) == 3 * count
    assert len(set(epochs)) == 3


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
    recorder = Recorder(training)
    best = recorder.run()
    scores = [r["acceptance_length"] for r in training.position.history if r["validation"]]
    at = scores.index(max(scores))  # the first of equal ones
    assert training.position.best_epoch == at
    losses = [r["loss"] for r in training.position.history if r["validation"]]
    assert losses.index(min(losses)) != at  # the expected acceptance length counts, not the loss
    ends = [i for i, (text, _) in enumerate(recorder.states) if json.loads(text)["batch"] == 0]
    for name, value in recorder.read(ends[at]).tensors.items():
        if name.startswith("weights/"):
            assert torch.equal(value, best[name.removeprefix("weights/")]), name


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
    recorder = Recorder(make_training(epochs=1))
    recorder.run()
    for change in ("missing", "of another shape"):
        state = recorder.read(0)
        weight = state.tensors.pop("weights/fc.weight")
        if change == "of another shape":
            state.tensors["weights/fc.weight"] = weight[:, 1:]
        with pytest.raises(ValueError, match=r"'fc\.weight'.*another draft"):
            make_training().resume(state)
