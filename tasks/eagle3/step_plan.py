"""Which rows each test-time-training step needs, and where the attention has work.

Worked out on the host from the loss mask alone, so that the step itself never waits for a device.

T = packed rows, K = TTT steps, N_k = query rows of step k, M = rows with step-0 keys,
E = rows whose embedding is projected, U = target rows. A step-k row i reads token row i + k and
is scored against target row i + k (speculators' alignment, also across document borders).
"""

from collections import defaultdict
from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

QUERIES_PER_TILE = 128
"""Queries that share one set of keys; smaller tiles waste less on the causal triangle."""

PAIRS_PER_GROUP = 1 << 18
"""Query-key pairs of one group of tiles: 9 heads of fp32 scores then stay near a CPU's cache."""

PADDING_SHARE = 1.25
"""A group may hold this many times the pairs that its tiles need."""

_NO_KEY = torch.iinfo(torch.int64).max


@dataclass(frozen=True)
class _OnDevice:
    """Tensors that move together."""

    def to(self, device: torch.device | str) -> Self:
        """The same plan on another device."""
        return replace(self, **{f.name: _move(getattr(self, f.name), device) for f in fields(self)})


@dataclass(frozen=True)
class TileGroup(_OnDevice):
    """B tiles of n queries and m keys, padded: index N (or M) is a row of zeros."""

    queries: Tensor  # [B, n] index into the step's query rows
    keys: Tensor  # [B, m] index into the key rows
    hidden: Tensor  # [B, n, m] bool, true where the query must not see the key


@dataclass(frozen=True)
class Sequences(_OnDevice):
    """The step's queries as one sequence a document, without gaps and up to its last key: for flash attention."""

    rows: int  # S, those between the queries counted
    places: Tensor  # [N] where each query row lies among them
    query_starts: Tensor  # [documents + 1] int32
    key_starts: Tensor  # [documents + 1] int32
    longest_queries: int
    longest_keys: int


class _Tile(NamedTuple):
    """Half-open ranges of a step's query rows and of the key rows."""

    start: int
    stop: int
    key_start: int
    key_stop: int

    @property
    def queries(self) -> int:
        return self.stop - self.start

    @property
    def keys(self) -> int:
        return self.key_stop - self.key_start


@dataclass(frozen=True)
class StepRows(_OnDevice):
    """Rows of one TTT step."""

    positions: Tensor  # [N_k] packed rows, ascending
    from_previous: Tensor  # [N_k] index into the previous step's rows (step 0: into the key rows)
    query_embeds: Tensor  # [N_k] index into `StepPlan.query_embeds`
    key_embeds: Tensor  # [N_k] index into `StepPlan.key_embeds`
    visible: tuple[TileGroup, ...] | Sequences  # what each query attends to among the key rows


@dataclass(frozen=True)
class StepPlan(_OnDevice):
    """Everything about a batch that does not depend on the model's numbers."""

    rows: int
    key_rows: Tensor  # [M] packed rows that some later query of their document attends to
    key_embeds: Tensor  # [E] packed rows whose token is projected to keys and values
    query_embeds: Tensor  # [.] packed rows whose token is projected to queries
    key_rows_in_embeds: Tensor  # [M] index into key_embeds
    all_rows: StepRows | None  # step 0 of layers below the last: every key row is a query
    steps: tuple[StepRows, ...]
    targets: Tensor  # [U] packed rows that are some step's target
    scored: Tensor  # [U, K] index into the K steps' rows one after the other; their sum = none
    weights: Tensor  # [U, K] 1 where the loss counts, else 0
    supervised: tuple[int, ...]  # targets counted in each step's loss
    embeds: Tensor | None = (
        None  # [E, H] embeddings of key_embeds; none = look them up in the draft
    )


def plan_steps(
    loss_mask: Tensor,
    document_ids: Tensor,
    *,
    ttt_steps: int,
    num_layers: int = 1,
    sequences: bool = False,
) -> StepPlan:
    """Plan a batch from `loss_mask` [T] bool and `document_ids` [T], its attention in tiles or as sequences.

    Raises ValueError when nothing is supervised or documents are not contiguous.
    """
    mask, documents = loss_mask.cpu().bool(), document_ids.cpu()
    if ttt_steps < 1:
        raise ValueError(f"ttt_steps {ttt_steps} is less than 1; train at least one step")
    if not mask.any():
        raise ValueError(
            f"none of the batch's {len(mask)} rows is supervised; drop such samples when tokenizing"
        )
    if (documents.diff() < 0).any() or documents[0] < 0:
        raise ValueError("document_ids must ascend from 0; pack documents one after the other")
    needed = _needed_rows(mask, ttt_steps)
    positions = [rows.nonzero()[:, 0] for rows in needed]
    key_rows = _keys_of(needed[0], documents).nonzero()[:, 0]
    query_embeds = [rows + k for k, rows in enumerate(positions)]
    if num_layers > 1:
        query_embeds.append(key_rows)
    queried = _union(len(mask), query_embeds)
    keyed = _union(len(mask), [key_rows, queried])
    in_queried, in_keyed = _ranks(queried, len(mask)), _ranks(keyed, len(mask))

    def rows_of(k: int, rows: Tensor, previous: Tensor) -> StepRows:
        return StepRows(
            positions=rows,
            from_previous=_ranks(previous, len(mask))[rows],
            query_embeds=in_queried[rows + k],
            key_embeds=in_keyed[rows + k],
            visible=(_sequences if sequences else _tile)(rows, key_rows, documents),
        )

    previous = [key_rows, *positions]
    targets, scored, weights = _scores(mask, positions)
    return StepPlan(
        rows=len(mask),
        key_rows=key_rows,
        key_embeds=keyed,
        query_embeds=queried,
        key_rows_in_embeds=in_keyed[key_rows],
        all_rows=rows_of(0, key_rows, key_rows) if num_layers > 1 else None,
        steps=tuple(rows_of(k, rows, previous[k]) for k, rows in enumerate(positions)),
        targets=targets,
        scored=scored,
        weights=weights,
        supervised=tuple(int(mask[k:].sum()) for k in range(ttt_steps)),
    )


def _needed_rows(mask: Tensor, ttt_steps: int) -> list[Tensor]:
    """Per step the rows on which a loss of this or a later step, or an accuracy, depends: [T] bool.

    Accuracy is conditional on all earlier steps of a supervised row, whatever their targets' mask,
    so a supervised row is followed up to the last but one step.
    """
    needed = [torch.zeros_like(mask) for _ in range(ttt_steps)]
    rows = len(mask)
    for k in range(ttt_steps):
        for j in range(k, ttt_steps):
            needed[k][: max(rows - j, 0)] |= mask[j:]
        if k < ttt_steps - 1:
            needed[k][: max(rows - k, 0)] |= mask[: max(rows - k, 0)]
    return needed


def _keys_of(queries: Tensor, documents: Tensor) -> Tensor:
    """Rows with a query at or after them in their own document: [T] bool."""
    last_query = torch.full((int(documents[-1]) + 1,), -1)
    rows = torch.arange(len(documents))
    last_query.scatter_reduce_(0, documents[queries], rows[queries], "amax")
    return rows <= last_query[documents]


def _scores(mask: Tensor, positions: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Target rows, and per target and step the row that is scored against it."""
    rows, steps = len(mask), len(positions)
    none = sum(len(at) for at in positions)
    scored = torch.full((rows, steps), none)
    weights = torch.zeros(rows, steps)
    offset = 0
    for k, at in enumerate(positions):
        ranks = torch.arange(offset, offset + len(at))
        offset += len(at)
        counted = mask[at + k] | (mask[at] if k < steps - 1 else False)
        scored[(at + k)[counted], k] = ranks[counted]
        weights[k:, k] = mask[k:].float()
    targets = (scored != none).any(dim=1).nonzero()[:, 0]
    return targets, scored[targets], weights[targets]


def _sequences(queries: Tensor, keys: Tensor, documents: Tensor) -> Sequences:
    """Each document's rows from its first query to its last key; without a query, its last key alone.

    A sequence without queries would leave its keys' gradients unwritten.
    """
    present, of_key = torch.unique_consecutive(documents[keys], return_inverse=True)
    counts = torch.bincount(of_key)  # keys of each document: its first rows, without gaps
    last = keys[counts.cumsum(0) - 1]
    of_query = torch.searchsorted(present, documents[queries])
    first = last.clone().scatter_reduce_(0, of_query, queries, "amin")
    lengths = last - first + 1
    starts = _starts(lengths)
    return Sequences(
        rows=int(starts[-1]),
        places=starts[of_query].long() + queries - first[of_query],
        query_starts=starts,
        key_starts=_starts(counts),
        longest_queries=int(lengths.max()),
        longest_keys=int(counts.max()),
    )


def _starts(lengths: Tensor) -> Tensor:
    return torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(torch.int32)


def _tile(queries: Tensor, keys: Tensor, documents: Tensor) -> tuple[TileGroup, ...]:
    """Cut each document's queries into tiles and put tiles of like size into groups."""
    borders = torch.arange(int(documents[-1]) + 2)
    query_ends = torch.searchsorted(documents[queries], borders).tolist()
    key_starts = torch.searchsorted(documents[keys], borders).tolist()
    visible = torch.searchsorted(keys, queries, right=True).tolist()  # keys up to the query
    by_ordinal: dict[int, list[_Tile]] = defaultdict(list)
    for document, (first, end) in enumerate(pairwise(query_ends)):
        for ordinal, start in enumerate(range(first, end, QUERIES_PER_TILE)):
            stop = min(start + QUERIES_PER_TILE, end)
            by_ordinal[ordinal].append(_Tile(start, stop, key_starts[document], visible[stop - 1]))
    # Tiles of a group are of different documents: no key is in a group twice, so gradients are
    # added by plain copies, which is exact and the same at every run.
    return tuple(
        _pad(group, queries, keys) for tiles in by_ordinal.values() for group in _group(tiles)
    )


def _group(tiles: list[_Tile]) -> list[list[_Tile]]:
    """Tiles sorted by size, in groups within `PAIRS_PER_GROUP` and `PADDING_SHARE`."""
    groups: list[list[_Tile]] = []
    widest, longest, pairs = 0, 0, 0
    for tile in sorted(tiles, key=lambda t: (t.keys, t.queries), reverse=True):
        widest, pairs = max(widest, tile.queries), pairs + tile.queries * tile.keys
        padded = (len(groups[-1]) + 1) * widest * longest if groups else 0
        if not groups or padded > min(PAIRS_PER_GROUP, PADDING_SHARE * pairs):
            groups.append([])
            widest, longest, pairs = tile.queries, tile.keys, tile.queries * tile.keys
        groups[-1].append(tile)
    return groups


def _pad(tiles: list[_Tile], queries: Tensor, keys: Tensor) -> TileGroup:
    bounds = torch.tensor(tiles)  # [B, 4]
    query_index = _ranges(bounds[:, 0], bounds[:, 1], fill=len(queries))  # [B, n]
    key_index = _ranges(bounds[:, 2], bounds[:, 3], fill=len(keys))  # [B, m]
    # A padding query sees every real key (a softmax of nothing is NaN), a padding key is seen
    # by no query.
    query_rows = torch.cat([queries, torch.tensor([_NO_KEY - 1])])[query_index]
    key_rows = torch.cat([keys, torch.tensor([_NO_KEY])])[key_index]
    hidden = query_rows[:, :, None] < key_rows[:, None, :]  # [B, n, m]
    return TileGroup(queries=query_index, keys=key_index, hidden=hidden)


def _ranges(starts: Tensor, stops: Tensor, *, fill: int) -> Tensor:
    index = starts[:, None] + torch.arange(int((stops - starts).max()))
    return index.where(index < stops[:, None], fill)


def _union(rows: int, indices: list[Tensor]) -> Tensor:
    present = torch.zeros(rows, dtype=torch.bool)
    for index in indices:
        present[index] = True
    return present.nonzero()[:, 0]


def _ranks(index: Tensor, rows: int) -> Tensor:
    """Inverse of an ascending index: [rows], meaningless where a row is not in it."""
    ranks = torch.zeros(rows, dtype=torch.long)
    ranks[index] = torch.arange(len(index))
    return ranks


def _move(value: Any, device: torch.device | str) -> Any:
    if isinstance(value, Tensor):
        return value.to(device, non_blocking=True)
    if isinstance(value, tuple):
        return tuple(_move(item, device) for item in value)
    return value.to(device) if isinstance(value, _OnDevice) else value
