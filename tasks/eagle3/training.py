"""The training loop: order, optimizer, schedule, validation, guard, and a state that resumes bit-equal.

P = trainable parameters of the draft. The loop knows no storage: it hands its complete state to `on_checkpoint` and
takes it back in `resume`.
"""

import math
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Self

import torch
from torch import Tensor

from tasks.eagle3.batch_feed import BatchFeed, ReadyBatch
from tasks.eagle3.batches import PackedBatch, TrainingSample, plan_batches
from tasks.eagle3.draft import Eagle3DraftModel, trainable_parameters
from tasks.eagle3.head_transform import PLAIN, HeadTransform
from tasks.eagle3.step_plan import StepPlan
from tasks.eagle3.training_settings import TrainSettings
from tasks.eagle3.training_step import (
    Precision,
    StepResult,
    expected_acceptance_length,
    frozen_heads,
    plan_batch,
    training_forward,
)

LAG = 2
"""Steps that a GPU may be behind before their figures are waited for."""


class TrainingDivergedError(ValueError):
    """More steps than allowed had a loss or gradient that is no finite number; another try gives the same."""


@dataclass
class Position:
    """Where a training is, besides its tensors; JSON in a checkpoint."""

    step: int = 0
    epoch: int = 0
    batch: int = 0
    """Batches of this epoch that are done."""
    nonfinite_steps: int = 0
    best_epoch: int = -1
    best_score: float | None = None
    finished: bool = False
    tokens: int = 0
    """Tokens trained on so far."""
    history: list[dict[str, float | None]] = field(default_factory=list)
    """One entry for each step and each validation, in order; a value that is no number is None."""


OnCheckpoint = Callable[[Position, dict[str, Tensor]], None]
OnStep = Callable[[int, int, str], None]


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
    ) -> None:
        self.draft, self._settings, self._precision = draft, settings, precision
        self._transform = transform
        self._heads = frozen_heads(draft, precision)
        self._train, self._val = train, val
        self._lengths, self._val_lengths = list(train_lengths), list(val_lengths)
        self.parameters = trainable_parameters(draft)
        self._device = next(iter(self.parameters.values())).device
        self._feed = BatchFeed(train, self._device, self._plan)
        self._unread: deque[_Figures] = deque()
        self._optimizer = self._make_optimizer()
        self._initial = {name: _fingerprint(value) for name, value in self.parameters.items()}
        self._best = {name: value.detach().clone() for name, value in self.parameters.items()}
        self.position = Position()
        self._steps_of_epoch = [len(self._batches(epoch)) for epoch in range(settings.epochs)]
        self.total_steps = sum(self._steps_of_epoch)

    def run(self, *, on_checkpoint: OnCheckpoint, on_step: OnStep) -> dict[str, Tensor]:
        """Train from the current position to the end; returns the best weights by name.

        `on_checkpoint(position, tensors)` is called every `checkpoint_seconds` and, unless turned off, each epoch;
        `on_step(steps done, total steps, note)` after every step.
        Raises TrainingDivergedError past the budget of non-finite steps.
        """
        saved = time.monotonic()
        while not self.position.finished:
            for ready in self._feed.batches(self._remaining_batches()):
                self._step(ready)
                self._read_figures(but=LAG if self._device.type == "cuda" else 0)
                on_step(self.position.step, self.total_steps, self._note())
                if time.monotonic() - saved >= self._settings.checkpoint_seconds:
                    self._read_figures(but=0)
                    on_checkpoint(self.position, self.state())
                    saved = time.monotonic()
            self._read_figures(but=0)
            self._end_epoch()
            if self._settings.epoch_checkpoints:
                on_checkpoint(self.position, self.state())
                saved = time.monotonic()
        return self._best

    @property
    def waited_seconds(self) -> float:
        """Time spent waiting for batches so far."""
        return self._feed.waited_seconds

    def state(self) -> dict[str, Tensor]:
        """Return all tensors that the training is made of: weights, best weights, moments, RNG state."""
        tensors = {"rng": torch.get_rng_state()}
        for name, value in self.parameters.items():
            tensors[f"weights/{name}"] = value.detach()
            tensors[f"best/{name}"] = self._best[name]
            moments = self._optimizer.state.get(value, {})
            for key, moment in moments.items():
                tensors[f"optimizer/{key}/{name}"] = torch.as_tensor(moment)
        return tensors

    def resume(self, position: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        """Go on from a checkpoint; ValueError when it is of another draft."""
        wanted = {f"weights/{name}" for name in self.parameters}
        present = {name for name in tensors if name.startswith("weights/")}
        if wanted != present:
            raise ValueError(
                f"the checkpoint holds other weights than the draft: {sorted(wanted ^ present)[:4]}; "
                "it belongs to another draft"
            )
        self.position = Position(**position)
        torch.set_rng_state(tensors["rng"])
        with torch.no_grad():
            for name, value in self.parameters.items():
                value.copy_(tensors[f"weights/{name}"])
                self._best[name] = tensors[f"best/{name}"].to(self._device).clone()
                prefix = "optimizer/"
                moments = {
                    key.removeprefix(prefix).split("/", 1)[0]: moment
                    for key, moment in tensors.items()
                    if key.startswith(prefix) and key.split("/", 2)[2] == name
                }
                if moments:
                    self._optimizer.state[value] = {
                        key: moment.to(self._device).clone() for key, moment in moments.items()
                    }

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
            tokens_per_batch=self._settings.tokens_per_batch,
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

    def _make_optimizer(self) -> torch.optim.AdamW:
        matrices = [value for value in self.parameters.values() if value.dim() > 1]
        vectors = [value for value in self.parameters.values() if value.dim() <= 1]
        return torch.optim.AdamW(
            [
                {"params": matrices, "weight_decay": self._settings.weight_decay},
                {"params": vectors, "weight_decay": 0.0},
            ],
            lr=self._settings.lr,
            betas=(0.9, self._settings.beta2),
            fused=True,
        )

    def _batches(self, epoch: int) -> list[list[int]]:
        return plan_batches(
            self._lengths,
            tokens_per_batch=self._settings.tokens_per_batch,
            seed=self._settings.seed,
            epoch=epoch,
        )

    def _remaining_batches(self) -> Iterator[list[int]]:
        yield from self._batches(self.position.epoch)[self.position.batch :]

    def _plan(self, batch: PackedBatch) -> StepPlan:
        steps = self._settings.ttt_steps
        return plan_batch(self.draft, batch, ttt_steps=steps, precision=self._precision)

    def _forward(self, ready: ReadyBatch) -> StepResult:
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
        )

    def _step(self, ready: ReadyBatch) -> None:
        """Take a step; on a GPU nothing here waits for it, and a step that is no number is skipped there."""
        position = self.position
        rate = learning_rate(position.step, self.total_steps, self._settings)
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        result = self._forward(ready)
        result.loss.backward()  # type: ignore[no-untyped-call]
        loss = result.loss.detach()
        norm = self._update(loss)
        self._optimizer.zero_grad(set_to_none=True)
        position.step += 1
        position.tokens += len(ready.batch)
        position.batch += 1
        self._unread.append(
            _Figures.of(
                {"loss": loss, "gradient_norm": norm, **result.metrics},
                place={"step": position.step, "epoch": position.epoch},
                known={"lr": rate, "tokens": len(ready.batch)},
            )
        )

    def _update(self, loss: Tensor) -> Tensor:
        """Clip and step, unless loss or gradient is no number; returns the gradient's norm."""
        gradients = [value.grad for value in self.parameters.values() if value.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        clip = (self._settings.max_grad_norm / (norm + 1e-6)).clamp(max=1.0)
        bad = ~(torch.isfinite(loss) & torch.isfinite(norm))
        if self._device.type != "cuda":
            if not bad:
                torch._foreach_mul_(gradients, clip)
                self._optimizer.step()
            return norm
        # What a gradient scaler tells a fused optimizer: it divides the gradients and skips the step by itself.
        amp: Any = self._optimizer
        amp.grad_scale, amp.found_inf = 1.0 / clip, bad.float()
        self._optimizer.step()
        del amp.grad_scale, amp.found_inf
        return norm

    def _read_figures(self, *, but: int) -> None:
        """Write down what the steps gave, all but the last ones, which a GPU may still be busy with."""
        while len(self._unread) > but:
            figures = self._unread.popleft()
            values = figures.read()
            loss, gradient = values.pop("loss"), values.pop("gradient_norm")
            if not (math.isfinite(loss) and math.isfinite(gradient)):
                self._count_nonfinite(figures.place["step"], loss, gradient)
            entry = {**figures.known, "gradient_norm": gradient, **means(values), "loss": loss}
            self._note_down(entry, validation=0, place=figures.place)

    def _note_down(
        self, entry: dict[str, float], *, validation: int, place: dict[str, int]
    ) -> None:
        """Add an entry to the history; a checkpoint's JSON holds no NaN."""
        finite = {name: v if math.isfinite(v) else None for name, v in entry.items()}
        self.position.history.append({**place, "validation": validation, **finite})

    def _count_nonfinite(self, step: int, loss: float, gradient: float) -> None:
        """A step that is no number is never taken: it is counted, and too many end the training."""
        self.position.nonfinite_steps += 1
        allowed = self._settings.max_nonfinite_steps
        if self.position.nonfinite_steps > allowed:
            raise TrainingDivergedError(
                f"step {step}: loss {loss}, gradient norm {gradient}; "
                f"{self.position.nonfinite_steps} such steps, more than train.max_nonfinite_steps {allowed}; "
                "lower train.lr or look at the captured states"
            )

    def _end_epoch(self) -> None:
        position = self.position
        score = float(position.epoch)
        if self._val:
            metrics = self.validate()
            score = metrics["acceptance_length"]
            place = {"step": position.step, "epoch": position.epoch}
            self._note_down(metrics, validation=1, place=place)
        if position.best_score is None or score > position.best_score:
            position.best_score, position.best_epoch = score, position.epoch
            self._best = {name: value.detach().clone() for name, value in self.parameters.items()}
        patience = self._settings.early_stop_epochs
        stale = position.epoch - position.best_epoch
        position.epoch += 1
        position.batch = 0
        position.finished = position.epoch == self._settings.epochs or 0 < patience <= stale

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


@dataclass(frozen=True)
class _Figures:
    """What one step gave, on its way from the device."""

    names: tuple[str, ...]
    values: Tensor
    arrived: Any
    place: dict[str, int]
    known: dict[str, float]

    @classmethod
    def of(
        cls, values: dict[str, Tensor], *, place: dict[str, int], known: dict[str, float]
    ) -> Self:
        """Start the copy to the host."""
        stacked = torch.stack([value.detach().double() for value in values.values()])
        copied, arrived = stacked, None
        if stacked.is_cuda:
            copied = torch.empty(stacked.shape, dtype=stacked.dtype, pin_memory=True)
            copied.copy_(stacked, non_blocking=True)
            arrived = torch.cuda.current_stream(stacked.device).record_event()
        return cls(tuple(values), copied, arrived, place, known)

    def read(self) -> dict[str, float]:
        """Wait for the copy, if there is one."""
        if self.arrived is not None:
            self.arrived.synchronize()
        return dict(zip(self.names, self.values.tolist(), strict=True))


def means(sums: dict[str, float]) -> dict[str, float]:
    """Turn summed `<name>_sum` and `<name>_total` metrics into means, with the expected acceptance length."""
    names = {name.removesuffix("_sum") for name in sums if name.endswith("_sum")}
    result = {name: sums[f"{name}_sum"] / max(sums[f"{name}_total"], 1.0) for name in sorted(names)}
    result["acceptance_length"] = expected_acceptance_length(sums)
    return result


def learning_rate(step: int, total_steps: int, settings: TrainSettings) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up, then the schedule down to zero."""
    warmup = math.ceil(settings.warmup_ratio * total_steps)
    if step < warmup:
        return settings.lr * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    if settings.schedule == "constant":
        return settings.lr
    if settings.schedule == "linear":
        return settings.lr * (1 - done)
    return settings.lr * 0.5 * (1 + math.cos(math.pi * done))
