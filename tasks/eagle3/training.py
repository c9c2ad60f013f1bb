"""The training loop: order, optimizer, schedule, validation, guard.

The loop knows no storage: it hands its complete state to `on_checkpoint` and takes it back in `resume`.
"""

import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from tasks.eagle3.batch_feed import BatchFeed, ReadyBatch
from tasks.eagle3.batches import PackedBatch, TrainingSample, plan_batches
from tasks.eagle3.checkpoint_writer import CheckpointWriter, HostCopies
from tasks.eagle3.draft import Eagle3DraftModel, trainable_parameters
from tasks.eagle3.figures import Figures, history_entry, means
from tasks.eagle3.head_transform import PLAIN, HeadTransform
from tasks.eagle3.noise import add_noise
from tasks.eagle3.optimizers import Optimizers
from tasks.eagle3.ranks import ALONE, Ranks
from tasks.eagle3.step_plan import StepPlan
from tasks.eagle3.training_settings import TrainSettings
from tasks.eagle3.training_state import (
    BEST,
    Position,
    TrainingState,
    collect_tensors,
    named,
    restore_tensors,
)
from tasks.eagle3.training_step import (
    Precision,
    StepResult,
    frozen_heads,
    plan_batch,
    training_forward,
)

LAG = 2
"""Steps that a GPU may be behind before their figures are waited for."""
BYTES_BESIDE_WEIGHTS = 1 << 20
"""More than the random states and counters of a checkpoint take."""


OnCheckpoint = Callable[[TrainingState], None]
OnStep = Callable[[int, int, str], None]
OnFinished = Callable[[], None]


def _nothing() -> None:
    """Do nothing."""


class Training:
    """One training of one draft."""

    def __init__(
        self,
        draft: Eagle3DraftModel,
        train: Sequence[TrainingSample],
        val: Sequence[TrainingSample],
        *,
        settings: TrainSettings,
        precision: Precision,
        train_lengths: Sequence[int],
        val_lengths: Sequence[int],
        transform: HeadTransform = PLAIN,
        ranks: Ranks = ALONE,
    ) -> None:
        self._ranks = ranks
        self.draft, self._settings, self._precision = draft, settings, precision
        self._transform = transform
        self._heads = frozen_heads(draft, precision)
        self._train, self._val = train, val
        self._lengths, self._val_lengths = list(train_lengths), list(val_lengths)
        self.parameters = trainable_parameters(draft)
        self._device = next(iter(self.parameters.values())).device
        self._feed = BatchFeed(train, self._device, self._plan)
        self._unread: deque[Figures] = deque()
        self._optimizer = Optimizers(self.parameters.values(), settings)
        self._initial = {name: _fingerprint(value) for name, value in self.parameters.items()}
        self._best: dict[str, Tensor] = {}
        self._best_copies = HostCopies(
            self._device, expected_bytes=self._checkpoint_bytes(moments=0)
        )
        self._best_copied: Any = None  # event of the copy that may still be under way
        self._stored_best_step: int | None = None
        checkpoints = settings.epoch_checkpoints and settings.epochs > 1
        expected = self._checkpoint_bytes(moments=self._optimizer.moments) if checkpoints else 0
        self._copies = HostCopies(self._device, expected_bytes=expected)
        self._checkpoint_due = 0.0
        self.position = Position()
        self._batches_of_epoch = [len(self._batches(epoch)) for epoch in range(settings.epochs)]
        self._steps_of_epoch = [-(-batches // ranks.count) for batches in self._batches_of_epoch]
        self.total_steps = sum(self._steps_of_epoch)
        ranks.send_gradients(self.parameters.values())

    def run(
        self, *, on_checkpoint: OnCheckpoint, on_step: OnStep, on_finished: OnFinished = _nothing
    ) -> dict[str, Tensor]:
        """Train from the current position to the end; returns the best weights by name.

        `on_checkpoint(state)` is called in a thread every `checkpoint_seconds` and, unless turned off, for each epoch
        but the last, later or left out while the one before is still being written; what it raises ends the training.
        Its tensors are copies of the host that are its own until it returns.
        `on_step(steps done, total steps, note)` is called after every step, `on_finished()` after the last: a
        checkpoint that is still being written is not needed any more, but is waited for.
        Raises TrainingDivergedError past the budget of non-finite steps.
        """
        allowed = self._settings.max_nonfinite_steps

        def write(state: TrainingState) -> None:
            state.settle(max_nonfinite_steps=allowed)
            on_checkpoint(state)

        self._checkpoint_due = time.monotonic() + self._settings.checkpoint_seconds
        with CheckpointWriter(write, self._copies) as writer:
            self._close_epoch_if_done(writer)  # where a checkpoint was made between the two
            # one feed for all epochs: it goes on while an epoch is validated
            with closing(self._feed.batches(self._remaining_batches())) as batches:
                while not self.position.finished:
                    self._step(next(batches))
                    self._read_figures(but=LAG if self._device.type == "cuda" else 0)
                    on_step(self.position.step, self.total_steps, self._note())
                    self._offer_checkpoint(writer)
                    self._close_epoch_if_done(writer)
            on_finished()
        return self._best_weights()

    @property
    def waited_seconds(self) -> float:
        """Time spent waiting for batches so far."""
        return self._feed.waited_seconds

    @property
    def validates(self) -> bool:
        """Whether there is a validation side."""
        return bool(self._val)

    @property
    def fill(self) -> float:
        """Share of tokens_per_batch that the batches of all epochs use."""
        tokens = sum(self._lengths) * self._settings.epochs
        return tokens / (sum(self._batches_of_epoch) * self._settings.batch_tokens)

    def state(self) -> TrainingState:
        """Return all that the training is made of now; the tensors are no copies."""
        position = self.position
        tensors = collect_tensors(self.parameters, self._optimizer.state)
        if position.best_step not in {None, position.step, self._stored_best_step}:
            tensors |= {f"{BEST}{name}": value for name, value in self._best_weights().items()}
        return TrainingState.of(position, tensors, self._unread)

    def resume(self, state: TrainingState) -> None:
        """Go on from a checkpoint; ValueError when it is of another draft."""
        restore_tensors(state.tensors, self.parameters, self._optimizer.state)
        self.position = state.position
        best = named(state.tensors, BEST)
        self._best = {name: value.to("cpu", copy=True) for name, value in best.items()}
        self._stored_best_step = state.position.best_step

    def unmoved(self) -> list[str]:
        """Return the trainable tensors that training has left exactly as they were at the start."""
        return [
            name
            for name, value in self.parameters.items()
            if torch.equal(_fingerprint(value), self._initial[name])
        ]

    @torch.no_grad()
    def validate(self) -> dict[str, float]:
        """Return loss, per-step accuracies and expected acceptance length on the validation side."""
        planned = plan_batches(
            self._val_lengths,
            tokens_per_batch=self._settings.batch_tokens,
            seed=0,
            epoch=0,
            shuffle=False,
        )
        feed = BatchFeed(self._val, self._device, self._plan)
        found = [self._forward(ready).metrics for ready in feed.batches(planned)]
        sums: dict[str, float] = {}
        for metrics in found:
            for name, value in metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value)
        return means(sums)

    def _checkpoint_bytes(self, *, moments: int) -> int:
        """Bytes of the weights, their moments and what else lies with them."""
        weights = sum(value.nbytes for value in self.parameters.values())
        return weights * (1 + moments) + BYTES_BESIDE_WEIGHTS

    def _batches(self, epoch: int) -> list[list[int]]:
        return plan_batches(
            self._lengths,
            tokens_per_batch=self._settings.batch_tokens,
            seed=self._settings.seed,
            epoch=epoch,
        )

    def _remaining_batches(self) -> Iterator[list[int]]:
        done = self.position.batch
        for epoch in range(self.position.epoch, self._settings.epochs):
            yield from self._ranks.mine(self._batches(epoch))[done:]
            done = 0

    def _plan(self, batch: PackedBatch) -> StepPlan:
        steps = self._settings.ttt_steps
        return plan_batch(self.draft, batch, ttt_steps=steps, precision=self._precision)

    def _forward(self, ready: ReadyBatch, counts: list[int] | None = None) -> StepResult:
        return training_forward(
            self.draft,
            ready.batch,
            plan=ready.plan,
            ttt_steps=self._settings.ttt_steps,
            loss=self._settings.loss,
            step_loss_decay=self._settings.ttt_step_decay,
            precision=self._precision,
            transform=self._transform,
            heads=self._heads,
            counts=counts,
        )

    def _noisy(self, ready: ReadyBatch) -> ReadyBatch:
        """The batch as it is trained on."""
        width, place = self._settings.noise, self.position
        if not width:
            return ready
        seed = self._settings.seed
        batch = place.batch * self._ranks.count + self._ranks.rank
        aux = add_noise(ready.batch.aux, width, seed=seed, epoch=place.epoch, batch=batch)
        return replace(ready, batch=replace(ready.batch, aux=aux))

    def _step(self, ready: ReadyBatch) -> None:
        """Take a step; on a GPU nothing here waits for it, and a step that is no number is skipped there."""
        position = self.position
        rate = self._optimizer.set_rates(position.step, self.total_steps)
        repeated = self._ranks.repeats(position.batch, self._batches_of_epoch[position.epoch])
        own = [0 if repeated else n for n in (*ready.plan.supervised, len(ready.batch))]
        *counts, tokens = self._ranks.total(own)
        loss, values = self._forward(self._noisy(ready), counts)
        if repeated:
            loss, values = loss * 0, {name: value * 0 for name, value in values.items()}
        loss.backward()  # type: ignore[no-untyped-call]
        values = self._ranks.sum({"loss": loss.detach(), **values})
        self._ranks.receive_gradients()
        self._copies.before_change()
        self._best_copies.before_change()
        norm = self._optimizer.step(values["loss"])
        self._optimizer.zero_grad()
        position.step += 1
        position.tokens += tokens
        position.batch += 1
        self._unread.append(
            Figures.of(
                {**values, "gradient_norm": norm},
                place={"step": position.step, "epoch": position.epoch},
                known={"lr": rate, "tokens": tokens},
            )
        )

    def _read_figures(self, *, but: int) -> None:
        """Write down what the steps gave, all but the last ones, which a GPU may still be busy with."""
        allowed = self._settings.max_nonfinite_steps
        while len(self._unread) > but:
            self.position.note_step(self._unread.popleft(), max_nonfinite_steps=allowed)

    def _offer_checkpoint(self, writer: CheckpointWriter) -> None:
        """Begin a checkpoint when one is due and the one before is written."""
        idle = writer.is_idle()  # at every step: an error of the writer ends the training here
        if idle and time.monotonic() >= self._checkpoint_due and writer.offer(self.state):
            self._stored_best_step = self.position.best_step
            self._checkpoint_due = time.monotonic() + self._settings.checkpoint_seconds

    def _checkpoint_epoch(self, writer: CheckpointWriter) -> None:
        """Begin the checkpoint of an epoch's end, as soon as may be; a finished training is past needing one."""
        if self._settings.epoch_checkpoints and not self.position.finished:
            self._checkpoint_due = time.monotonic()
            self._offer_checkpoint(writer)

    def _close_epoch_if_done(self, writer: CheckpointWriter) -> None:
        position = self.position
        if not position.finished and position.batch == self._steps_of_epoch[position.epoch]:
            self._read_figures(but=0)
            self._end_epoch()
            self._checkpoint_epoch(writer)

    def _end_epoch(self) -> None:
        position = self.position
        score = float(position.epoch)
        if self._val:
            metrics = self.validate()
            score = self._ranks.first(metrics["acceptance_length"])
            place = {"step": position.step, "epoch": position.epoch}
            position.history.append(history_entry(metrics, validation=1, place=place))
        if position.best_score is None or score > position.best_score:
            position.best_score, position.best_epoch = score, position.epoch
            position.best_step = position.step
            self._keep_best()
        patience = self._settings.early_stop_epochs
        stale = position.epoch - position.best_epoch
        position.epoch += 1
        position.batch = 0
        position.finished = position.epoch == self._settings.epochs or 0 < patience <= stale

    @torch.no_grad()
    def _keep_best(self) -> None:
        """Copy the weights to the host, on a GPU behind the steps that follow."""
        self._best, self._best_copied = self._best_copies.start(self.parameters)

    def _best_weights(self) -> dict[str, Tensor]:
        if self._best_copied is not None:
            self._best_copied.synchronize()
        return self._best

    def _note(self) -> str:
        if not self.position.history:
            return f"epoch {self.position.epoch + 1}"
        last = next(row for row in reversed(self.position.history) if not row["validation"])
        loss, accuracy = last["loss"], last["full_acc_0"]
        if loss is None or accuracy is None:
            return f"epoch {self.position.epoch + 1}, the last step was not finite and not taken"
        return (
            f"epoch {self.position.epoch + 1}, loss {loss:.3f}, first-token accuracy {accuracy:.3f}"
        )


def _fingerprint(tensor: Tensor) -> Tensor:
    """Sum and norm: enough to tell whether training has moved it, without a copy of its size."""
    wide = {"dtype": torch.float64}
    kept = tensor.detach()
    return torch.stack([kept.sum(**wide), torch.linalg.vector_norm(kept, **wide)])
