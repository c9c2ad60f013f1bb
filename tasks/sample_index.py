"""Which samples there are and which have their states: columns of all tables together, no object for each sample.

N = rows of all samples tables, one part after the other; M = samples without states; C = captured samples.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from storage import artifacts
from storage.layout import SAMPLES_TABLE, capture_directory
from storage.manifest import Manifest
from storage.plans import PlacedSamples
from storage.shards import read_sample_ids
from storage.store import Store
from storage.tables import read_batches, read_table
from tasks.drop_budget import quarantined_in

BATCH_TOKENS = 8_000_000
"""Tokens that are read at once: 32 MB."""
ROWS_PER_BATCH = 1 << 16
BUCKETS = 31

Rows = npt.NDArray[np.int64]
Lengths = npt.NDArray[np.int32]
Flags = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class CapturedSamples:
    """The samples of all complete shards of a capture key."""

    shards: tuple[Manifest, ...]
    sample_ids: pa.ChunkedArray
    """Shard after shard, [C]."""

    @property
    def shard_of(self) -> Rows:
        """Index of the shard that holds each sample, [C]."""
        return np.repeat(np.arange(len(self.shards)), [shard.rows for shard in self.shards])


class SampleCount(NamedTuple):
    """How many samples, and tokens of all of them."""

    samples: int
    tokens: int


def read_ids(store: Store, parts: Sequence[Manifest]) -> pa.ChunkedArray:
    """Sample ids of all parts, [N]."""
    columns = []
    for part in parts:
        with artifacts.open_file(store, part, SAMPLES_TABLE) as path:
            columns.append(read_table(path, columns=["sample_id"]).column("sample_id"))
    return _joined(columns)


def read_lengths(store: Store, parts: Sequence[Manifest], of: Flags) -> Lengths:
    """Tokens of each sample of all parts, [N]; in a part without any row `of` interest they stay 0.

    Counted in the loss masks, which are as long as the token ids and a fraction of their bytes.
    """
    lengths = np.zeros(len(of), np.int32)
    done = 0
    for part in parts:
        rows = slice(done, done + part.rows)
        done = rows.stop
        if of[rows].any():
            lengths[rows] = _part_lengths(store, part)
    return lengths


def read_placed(
    store: Store, parts: Sequence[Manifest], positions: Rows
) -> Iterator[PlacedSamples]:
    """The token ids of all parts that hold a sample of the plan, piece by piece; `positions` [N] are its rows there."""
    done = 0
    for part in parts:
        mine = positions[done : done + part.rows]
        done += part.rows
        if (mine < 0).all():
            continue
        with artifacts.open_file(store, part, SAMPLES_TABLE) as path:
            at = 0
            for batch in read_batches(path, ["input_ids"], rows_per_batch=_rows_per_batch(part)):
                yield PlacedSamples(mine[at : at + len(batch)], batch.column(0))
                at += len(batch)


def read_captured(store: Store, capture_key: str) -> CapturedSamples:
    """Every complete shard of a capture key, with the ids of its samples."""
    shards = artifacts.list_manifests(store, capture_directory(capture_key))
    columns = artifacts.side_by_side(lambda shard: read_sample_ids(store, shard), shards)
    return CapturedSamples(tuple(shards), _joined(columns))


def read_quarantined(captured: CapturedSamples, ids: pa.ChunkedArray) -> dict[str, str]:
    """Return sample id -> reason of those of `ids` that shards have left out, and none of them holds."""
    left_out = quarantined_in(captured.shards)
    names = column_of(left_out)
    lost = is_in(names, ids) & ~is_in(names, captured.sample_ids)
    return {name: left_out[name] for name in names.filter(pa.array(lost)).to_pylist()}


def forget_quarantined(store: Store, captured: CapturedSamples) -> None:
    """Set shards without any usable sample aside: the new shard of their samples would count as done."""
    for manifest in captured.shards:
        if not manifest.rows:
            artifacts.set_aside(store, manifest.path, problem="capture.retry_quarantined")


def column_of(names: Iterable[str]) -> pa.ChunkedArray:
    """Sample ids as a column."""
    return pa.chunked_array([pa.array(list(names), pa.string())])


def capture_order(ids: pa.ChunkedArray, lengths: Lengths, missing: Flags) -> Rows:
    """Rows of the missing samples, each sample once, in the order in which they are captured, [M].

    That order, by (length, id), makes a plan a function of the set of missing samples: a shard that was lost is
    planned again with the same rows.
    """
    rows = np.flatnonzero(missing)
    prefixes = _prefixes(ids)
    order = rows[np.lexsort((prefixes[rows], lengths[rows]))]
    same = (np.diff(lengths[order]) == 0) & (np.diff(prefixes[order]) == 0)
    return _settle_ties(order, ids, same)


def _prefixes(ids: pa.ChunkedArray) -> npt.NDArray[np.uint64]:
    """The first 8 bytes of each id as a number, which sorts as they do and much faster, [N]."""
    prefixes = [np.zeros(0, np.uint64)]
    for chunk in ids.chunks:
        _, offsets, data = chunk.buffers()
        bounds = np.frombuffer(offsets, np.int32)[chunk.offset :][: len(chunk) + 1]
        letters = np.frombuffer(data or b"", np.uint8)
        prefix = np.zeros(len(chunk), np.uint64)
        for place in range(8):
            at = bounds[:-1] + place
            inside = at < bounds[1:]
            prefix <<= np.uint64(8)
            prefix[inside] |= letters[at[inside]]
        prefixes.append(prefix)
    return np.concatenate(prefixes)


def _settle_ties(order: Rows, ids: pa.ChunkedArray, same: Flags) -> Rows:
    """Sort runs of rows that are the `same` [M - 1] as the next so far by their ids, and keep one row of each id."""
    tied = np.flatnonzero(np.concatenate([same, [False]]) | np.concatenate([[False], same]))
    run = np.concatenate([[0], np.cumsum(~same)])[tied]
    table = pa.table({"run": run, "sample_id": ids.take(pa.array(order[tied]))})
    by_id = pc.sort_indices(table, sort_keys=[("run", "ascending"), ("sample_id", "ascending")])
    sorted_ids = table.column("sample_id").take(by_id)
    order[tied] = order[tied[by_id.to_numpy()]]
    again = pc.equal(sorted_ids.slice(1), sorted_ids.slice(0, max(0, len(tied) - 1)))
    return np.delete(order, tied[1:][_flags(again)])


def is_in(ids: pa.ChunkedArray, others: pa.ChunkedArray) -> Flags:
    """Whether each of `ids` is one of `others`; by buckets, as a hash table of all ids at once is larger than they."""
    found = np.zeros(len(ids), bool)
    for mine, theirs in zip(_buckets(ids), _buckets(others), strict=True):
        if len(mine) and len(theirs):
            wanted, there = ids.take(pa.array(mine)), others.take(pa.array(theirs))
            found[mine] = _flags(pc.is_in(wanted, value_set=there))
    return found


def _buckets(ids: pa.ChunkedArray) -> list[Rows]:
    """Rows of the ids in each bucket; equal ids are in the same."""
    bucket = (_prefixes(ids) % np.uint64(BUCKETS)).astype(np.uint8)
    order = np.argsort(bucket, kind="stable")
    return np.split(order, np.cumsum(np.bincount(bucket, minlength=BUCKETS))[:-1])


def count_distinct(ids: pa.ChunkedArray, counted: Flags) -> int:
    """How many different samples there are among the `counted` [N]."""
    return len(capture_order(ids, np.zeros(len(ids), np.int32), counted))


def count_samples(
    store: Store, parts: Sequence[Manifest], capture_key: str, *, retry_quarantined: bool
) -> tuple[SampleCount, SampleCount, int]:
    """Count the different samples of all parts, those that are to be captured, and those that are quarantined."""
    ids = read_ids(store, parts)
    captured = read_captured(store, capture_key)
    quarantined = {} if retry_quarantined else read_quarantined(captured, ids)
    missing = ~is_in(ids, captured.sample_ids) & ~is_in(ids, column_of(quarantined))
    everything = np.ones(len(ids), bool)
    lengths = read_lengths(store, parts, everything)
    found = []
    for flags in (everything, missing):
        rows = capture_order(ids, lengths, flags)
        found.append(SampleCount(len(rows), int(lengths[rows].sum(dtype=np.int64))))
    return found[0], found[1], len(quarantined)


def _flags(column: pa.ChunkedArray) -> Flags:
    return np.asarray(column.to_numpy(), dtype=bool)


def _part_lengths(store: Store, part: Manifest) -> Lengths:
    with artifacts.open_file(store, part, SAMPLES_TABLE) as path:
        batches = read_batches(path, ["loss_mask"], rows_per_batch=_rows_per_batch(part))
        lengths = [pc.list_value_length(batch.column(0)).to_numpy() for batch in batches]
    return np.concatenate([np.zeros(0, np.int32), *lengths])


def _joined(columns: Sequence[pa.ChunkedArray]) -> pa.ChunkedArray:
    """One column of few chunks: rows are found in it by their number."""
    chunks = [chunk for column in columns for chunk in column.chunks]
    joined = pa.chunked_array(chunks, pa.string()).combine_chunks()
    return joined if isinstance(joined, pa.ChunkedArray) else pa.chunked_array([joined])


def _rows_per_batch(part: Manifest) -> int:
    tokens_per_row = max(1, part.facts["tokens"] // max(1, part.rows))
    return int(max(1, min(ROWS_PER_BATCH, BATCH_TOKENS // tokens_per_row)))
