"""What the steps of a training gave: on its way from the device, and as entries of the history."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from tasks.eagle3.training_step import expected_acceptance_length

Entry = dict[str, float | None]
"""Names and numbers; one that is not finite is None, since a checkpoint's JSON holds no NaN."""


@dataclass(frozen=True)
class Figures:
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


def history_entry(
    metrics: Mapping[str, float], *, validation: int, place: Mapping[str, int]
) -> Entry:
    """Return an entry of the history."""
    finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
    return {**place, "validation": validation, **finite}


def means(sums: dict[str, float]) -> dict[str, float]:
    """Turn summed `<name>_sum` and `<name>_total` metrics into means, with the expected acceptance length."""
    names = {name.removesuffix("_sum") for name in sums if name.endswith("_sum")}
    result = {name: sums[f"{name}_sum"] / max(sums[f"{name}_total"], 1.0) for name in sorted(names)}
    result["acceptance_length"] = expected_acceptance_length(sums)
    return result
