"""All that a training is made of between two steps, and how it is taken apart and put together again.

Tensors have flat names: `weights/<parameter>`, `optimizer/<moment>/<parameter>`, `rng/<device>`, and `best/<parameter>`
only where the best weights are neither the current ones nor known to whoever stores the state.
"""

import math
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import torch
from torch import Tensor

from tasks.eagle3.figures import Entry, Figures, history_entry, means

WEIGHTS, BEST, MOMENTS, RNG = "weights/", "best/", "optimizer/", "rng/"

Moments = MutableMapping[Tensor, dict[str, Any]]
"""Parameter -> its moments by name: an optimizer's `state`."""


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
    best_step: int | None = None
    """Steps that the best weights have taken; None before the first validation."""
    finished: bool = False
    tokens: int = 0
    """Tokens trained on so far."""
    history: list[Entry] = field(default_factory=list)
    """One entry for each step and each validation, in order."""

    def note_step(self, figures: Figures, *, max_nonfinite_steps: int) -> None:
        """Write down what a step gave, once it has arrived; TrainingDivergedError past the budget."""
        values = figures.read()
        loss, gradient = values.pop("loss"), values.pop("gradient_norm")
        if not (math.isfinite(loss) and math.isfinite(gradient)):
            self._count_nonfinite(figures.place["step"], loss, gradient, max_nonfinite_steps)
        entry = {**figures.known, "gradient_norm": gradient, **means(values), "loss": loss}
        self.history.append(history_entry(entry, validation=0, place=figures.place))

    def _count_nonfinite(self, step: int, loss: float, gradient: float, allowed: int) -> None:
        """A step that is no number is never taken: it is counted, and too many end the training."""
        self.nonfinite_steps += 1
        if self.nonfinite_steps > allowed:
            raise TrainingDivergedError(
                f"step {step}: loss {loss}, gradient norm {gradient}; "
                f"{self.nonfinite_steps} such steps, more than train.max_nonfinite_steps {allowed}; "
                "lower train.lr or look at the captured states"
            )


@dataclass(frozen=True)
class TrainingState:
    """A training between two steps."""

    position: Position
    tensors: dict[str, Tensor]
    unread: tuple[Figures, ...] = ()
    """Of steps whose figures are not in the position's history yet."""

    @classmethod
    def of(cls, position: Position, tensors: dict[str, Tensor], unread: Iterable[Figures]) -> Self:
        """Return the state now: the position goes on without changing it, the tensors do not."""
        return cls(replace(position, history=position.history.copy()), tensors, tuple(unread))

    def settle(self, *, max_nonfinite_steps: int) -> None:
        """Complete the history; waits for the figures. TrainingDivergedError past the budget."""
        for figures in self.unread:
            self.position.note_step(figures, max_nonfinite_steps=max_nonfinite_steps)

    def parts(self) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Return the tensors of this step alone, and the best weights by parameter, empty when not held.

        Weights that are the best ones are in the second only.
        """
        best = named(self.tensors, BEST)
        own = {name: t for name, t in self.tensors.items() if not name.startswith(BEST)}
        if self.position.best_step == self.position.step:
            best = named(own, WEIGHTS)
            own = {name: t for name, t in own.items() if not name.startswith(WEIGHTS)}
        return own, best

    @classmethod
    def from_parts(
        cls, position: Position, own: Mapping[str, Tensor], best: Mapping[str, Tensor]
    ) -> Self:
        """Put together what `parts` took apart; the best weights are all there."""
        tensors = {**own, **{f"{BEST}{name}": value for name, value in best.items()}}
        if position.best_step == position.step:
            tensors |= {f"{WEIGHTS}{name}": value for name, value in best.items()}
        return cls(position, tensors)

    def facts(self) -> dict[str, Any]:
        """Return the position without its history, as plain JSON types."""
        found = asdict(replace(self.position, history=[]))
        del found["history"]
        return found


def named(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, without it."""
    return {
        name.removeprefix(prefix): value
        for name, value in tensors.items()
        if name.startswith(prefix)
    }


def collect_tensors(
    parameters: Mapping[str, Tensor], moments: Mapping[Tensor, dict[str, Any]]
) -> dict[str, Tensor]:
    """Return weights, moments and random states by their flat names; weights and moments are no copies."""
    tensors = {f"{RNG}cpu": torch.get_rng_state()}
    for name, value in parameters.items():
        tensors[f"{WEIGHTS}{name}"] = value.detach()
        for moment, content in moments.get(value, {}).items():
            tensors[f"{MOMENTS}{moment}/{name}"] = torch.as_tensor(content)
    device = next(iter(parameters.values())).device
    if device.type == "cuda":
        tensors[f"{RNG}cuda"] = torch.cuda.get_rng_state(device)
    return tensors


def restore_tensors(
    tensors: Mapping[str, Tensor], parameters: Mapping[str, Tensor], moments: Moments
) -> None:
    """Set weights, moments and random states; ValueError when the weights are of another draft."""
    weights = named(tensors, WEIGHTS)
    differing = sorted(
        name
        for name in weights.keys() | parameters.keys()
        if name not in weights
        or name not in parameters
        or weights[name].shape != parameters[name].shape
    )
    if differing:
        raise ValueError(
            f"the checkpoint holds other weights than the draft: {differing[:4]}; "
            "it belongs to another draft"
        )
    torch.set_rng_state(tensors[f"{RNG}cpu"])
    device = next(iter(parameters.values())).device
    if device.type == "cuda" and f"{RNG}cuda" in tensors:
        torch.cuda.set_rng_state(tensors[f"{RNG}cuda"], device)
    with torch.no_grad():
        for name, value in parameters.items():
            value.copy_(weights[name])
    for flat, content in named(tensors, MOMENTS).items():
        moment, name = flat.split("/", 1)
        state = moments.setdefault(parameters[name], {})
        state[moment] = content.to(device, copy=True)
