"""From samples to packed training batches.

n = tokens of a sample, T = packed tokens of a batch, A = captured layers, H = hidden size.
"""

import random
from bisect import bisect_left, insort
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

PACKING_WINDOW = 4096
"""Samples packed together: large enough for little padding, small enough to keep the shuffle."""


@dataclass(frozen=True)
class TrainingSample:
    """One captured sample, as stored."""

    input_ids: Tensor  # [n]
    aux: Tensor  # [n, A * H], captured layers in ascending order
    last: Tensor  # [n, H], before the verifier's final norm
    loss_mask: Tensor  # [n] bool, true where the token is supervised


@dataclass(frozen=True)
class PackedBatch:
    """Documents one after the other, no padding, aligned for training.

    Row i of a document pairs the token x[i+1] with the state g[i] that predicted it; `last` and
    `loss_mask` belong to x[i+1] as well: what the verifier says after it is the target.
    """

    input_ids: Tensor  # [T]
    aux: Tensor  # [T, A * H]
    last: Tensor  # [T, H]
    loss_mask: Tensor  # [T] bool
    document_ids: Tensor  # [T], 0, 0, ..., 1, 1, ...
    position_ids: Tensor  # [T], 1..n-1 in each document

    def __len__(self) -> int:
        """Rows of the batch, T."""
        return len(self.input_ids)

    def to(self, device: torch.device | str) -> "PackedBatch":
        """The same batch on another device; copies from pinned memory do not wait."""
        moved = {name: value.to(device, non_blocking=True) for name, value in vars(self).items()}
        return PackedBatch(**moved)


def pack(samples: Sequence[TrainingSample], *, pinned: bool = False) -> PackedBatch:
    """Align each sample and put them one after the other: n tokens become n - 1 rows.

    In pinned memory a GPU can copy the batch behind its work.

    Raises ValueError when a sample's tensors differ in length or it has fewer than two tokens.
    """
    if not samples:
        raise ValueError("a batch of no samples cannot be packed; plan at least one sample")
    for index, sample in enumerate(samples):
        _check_sample(index, sample)
    sizes = torch.tensor([len(sample.input_ids) - 1 for sample in samples])
    return PackedBatch(
        input_ids=_join([sample.input_ids[1:].long() for sample in samples], pinned),
        aux=_join([sample.aux[:-1] for sample in samples], pinned),
        last=_join([sample.last[1:] for sample in samples], pinned),
        loss_mask=_join([sample.loss_mask[1:].bool() for sample in samples], pinned),
        document_ids=_join([torch.repeat_interleave(torch.arange(len(samples)), sizes)], pinned),
        position_ids=_join([torch.arange(1, len(s.input_ids)) for s in samples], pinned),
    )


def _join(parts: list[Tensor], pinned: bool) -> Tensor:
    if not pinned:
        return torch.cat(parts)
    shape = (sum(map(len, parts)), *parts[0].shape[1:])
    return torch.cat(parts, out=torch.empty(shape, dtype=parts[0].dtype, pin_memory=True))


def plan_batches(
    lengths: Sequence[int],
    *,
    tokens_per_batch: int,
    seed: int,
    epoch: int,
    shuffle: bool = True,
) -> list[list[int]]:
    """Sample indices of each batch of one epoch: a function of the arguments and nothing else.

    Shuffled samples are packed best-fit, longest first, in windows of `PACKING_WINDOW`; the order
    of the batches is shuffled too, so that well and badly filled ones are spread evenly.
    Every sample is in exactly one batch. Raises ValueError when a sample exceeds the budget.
    """
    for index, length in enumerate(lengths):
        if length > tokens_per_batch:
            raise ValueError(
                f"sample {index} has {length} tokens, more than tokens_per_batch "
                f"{tokens_per_batch}; raise the budget or truncate when tokenizing"
            )
    # A text seed goes through SHA-512 in CPython, so neighboring seeds and epochs share nothing.
    generator = random.Random(f"{seed}:{epoch}")
    order = list(range(len(lengths)))
    if shuffle:
        generator.shuffle(order)
    batches: list[list[int]] = []
    for start in range(0, len(order), PACKING_WINDOW):
        batches += _best_fit(order[start : start + PACKING_WINDOW], lengths, tokens_per_batch)
    if shuffle:
        generator.shuffle(batches)
    return batches


def _best_fit(window: list[int], lengths: Sequence[int], tokens_per_batch: int) -> list[list[int]]:
    """Longest sample first, each into the fullest batch that still holds it."""
    batches: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, batch), ascending
    for sample in sorted(window, key=lambda index: -lengths[index]):
        slot = bisect_left(room, (lengths[sample], -1))
        if slot < len(room):
            free, batch = room.pop(slot)
        else:
            free, batch = tokens_per_batch, len(batches)
            batches.append([])
        batches[batch].append(sample)
        insort(room, (free - lengths[sample], batch))
    return batches


def _check_sample(index: int, sample: TrainingSample) -> None:
    counts = {name: len(value) for name, value in vars(sample).items()}
    if len(set(counts.values())) != 1:
        raise ValueError(
            f"sample {index} has tensors of different lengths {counts}; capture it anew"
        )
    if counts["input_ids"] < 2:
        raise ValueError(
            f"sample {index} has {counts['input_ids']} token; training needs at least 2 "
            "(a state and the token after it); drop it when tokenizing"
        )
