"""Capture plans in files: which samples each shard will hold, and their token ids where its worker finds them.

M = samples of the plan, T = tokens of all of them.

"shards.parquet" has a row for each shard. "rows-<start>-<stop>.parquet" holds the samples [start, stop) of the
plan, a row group for each shard: a worker reads its rows and no others. Tables of samples are not in the plan's
order and may be larger than memory, so their rows are dealt out to the files first and put in order file by file.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from storage.artifacts import open_file
from storage.layout import SHARDS_TABLE
from storage.manifest import Manifest
from storage.row_ranges import RowRange
from storage.store import Store
from storage.tables import PARQUET, PLAN_SCHEMA, read_rows, read_table, write_table
from storage.writing import Writer

FILE_TOKENS = 16_000_000
"""Tokens at which a file of the plan is closed: 64 MB before compression, the piece that is put in order in memory."""

SHARDS_SCHEMA = pa.schema(
    [("start", pa.int64()), ("stop", pa.int64()), ("tokens", pa.int64()), ("samples", pa.string())]
)

Positions = npt.NDArray[np.int64]


@dataclass(frozen=True)
class PlannedShard:
    """One shard to be captured."""

    rows: RowRange
    """Of the plan."""
    tokens: int
    samples: str
    """Digest of its sample ids, in order."""


class PlacedSamples(NamedTuple):
    """Some rows of a samples table, and where the plan has them."""

    positions: Positions
    """Row of the plan, [n]; below 0 for a sample that is not in it."""
    tokens: pa.Array
    """Token ids, [n] lists."""


def write_plan(
    writer: Writer,
    shards: Sequence[PlannedShard],
    sample_ids: pa.ChunkedArray,
    samples: Iterable[PlacedSamples],
) -> None:
    """Store a plan; publishing the artifact is left to the caller. Memory: some times `FILE_TOKENS`, not T.

    Args:
        writer: of the plan's artifact.
        shards: all shards, in order.
        sample_ids: ids in the order of the plan, [M].
        samples: all samples in any order, each once.

    Raises:
        ValueError: `samples` lack one of the plan's.
    """
    columns = {
        "start": [shard.rows.start for shard in shards],
        "stop": [shard.rows.stop for shard in shards],
        "tokens": [shard.tokens for shard in shards],
        "samples": [shard.samples for shard in shards],
    }
    with writer.file(SHARDS_TABLE) as path:
        write_table(path, columns, schema=SHARDS_SCHEMA)
    files = list(_files(shards))
    with writer.store.scratch(f"{writer.attempt_path}/dealt") as scratch:
        starts = np.array([file[0].rows.start for file in files])
        for batch in samples:
            _deal(batch, starts, scratch)
        for number, file in enumerate(files):
            rows = RowRange(file[0].rows.start, file[-1].rows.stop)
            dealt = scratch / str(number)
            table = _in_order(dealt, rows, sample_ids.slice(rows.start, len(rows)))
            dealt.unlink()
            with writer.file(f"{rows.name}.parquet") as path:
                _write_file(path, table, file)


def read_shards(store: Store, plan: Manifest) -> list[PlannedShard]:
    """The shards of a plan, in order."""
    with open_file(store, plan, SHARDS_TABLE) as path:
        rows = read_table(path).to_pylist()
    return [
        PlannedShard(RowRange(row["start"], row["stop"]), row["tokens"], row["samples"])
        for row in rows
    ]


def read_samples(store: Store, plan: Manifest, rows: RowRange) -> pa.Table:
    """Ids and token ids of the samples in the rows of one shard.

    Raises:
        ValueError: no file of the plan holds these rows.
    """
    for name in plan.files:
        if name == SHARDS_TABLE:
            continue
        held = RowRange.parse(name.removesuffix(".parquet"))
        if held.start <= rows.start and rows.stop <= held.stop:
            with open_file(store, plan, name) as path:
                return read_rows(path, rows.start - held.start, rows.stop - held.start)
    raise ValueError(f"no file of {plan.path} holds the {rows}, only {sorted(plan.files)}")


def _files(shards: Sequence[PlannedShard]) -> Iterator[list[PlannedShard]]:
    """The shards of each file."""
    file: list[PlannedShard] = []
    tokens = 0
    for shard in shards:
        file.append(shard)
        tokens += shard.tokens
        if tokens >= FILE_TOKENS:
            yield file
            file, tokens = [], 0
    if file:
        yield file


def _deal(batch: PlacedSamples, starts: Positions, scratch: Path) -> None:
    """Append each sample to the heap of its file; `starts` are the files' first rows."""
    order = np.argsort(batch.positions, kind="stable")
    order = order[np.searchsorted(batch.positions[order], 0) :]
    positions = batch.positions[order]
    bounds = [*np.searchsorted(positions, starts), len(order)]
    for number, (start, stop) in enumerate(pairwise(bounds)):
        if start == stop:
            continue
        dealt = pa.record_batch(
            {
                "position": positions[start:stop],
                "input_ids": batch.tokens.take(pa.array(order[start:stop])),
            }
        )
        # a stream for each batch, one behind the other: no file has to stay open
        with (
            (scratch / str(number)).open("ab") as file,
            pa.ipc.new_stream(file, dealt.schema) as stream,
        ):
            stream.write_batch(dealt)


def _in_order(dealt: Path, rows: RowRange, sample_ids: pa.ChunkedArray) -> pa.Table:
    """The rows of one file of the plan, from its heap."""
    batches = list(_dealt_batches(dealt)) if dealt.exists() else []
    if sum(map(len, batches)) != len(rows):
        raise ValueError(f"the samples tables do not hold each sample of the plan's {rows} once")
    heap = pa.Table.from_batches(batches).combine_chunks()
    order = pc.sort_indices(heap.column("position"))
    return pa.table({"sample_id": sample_ids, "input_ids": heap.column("input_ids").take(order)})


def _dealt_batches(dealt: Path) -> Iterator[pa.RecordBatch]:
    with dealt.open("rb") as file:
        size = dealt.stat().st_size
        while file.tell() < size:
            with pa.ipc.open_stream(file) as stream:
                yield from stream


def _write_file(path: Path, table: pa.Table, shards: Sequence[PlannedShard]) -> None:
    first = shards[0].rows.start
    with pq.ParquetWriter(path, PLAN_SCHEMA, use_dictionary=False, **PARQUET) as file:
        for shard in shards:
            rows = table.slice(shard.rows.start - first, len(shard.rows))
            file.write_table(rows.cast(PLAN_SCHEMA), row_group_size=max(1, len(rows)))
