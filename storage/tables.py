"""Parquet tables: schemas, equal bytes for equal content, ragged columns without Python loops.

N = rows, T = values of all rows together.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

CONVERSATIONS_SCHEMA = pa.schema(
    [
        ("conversation_id", pa.string()),
        ("source", pa.string()),
        ("messages", pa.string()),  # JSON: a list of {"role", "content", ...}
    ]
)

SAMPLES_SCHEMA = pa.schema(
    [
        ("sample_id", pa.string()),
        ("conversation_id", pa.string()),
        ("source", pa.string()),
        ("input_ids", pa.list_(pa.int32())),
        ("loss_mask", pa.list_(pa.bool_())),
        ("truncated", pa.bool_()),
    ]
)

PLAN_SCHEMA = pa.schema([("sample_id", pa.string()), ("input_ids", pa.list_(pa.int32()))])

SPLIT_SCHEMA = pa.schema(
    [("conversation_id", pa.string()), ("source", pa.string()), ("side", pa.string())]
)

EVALUATION_SCHEMA = pa.schema(
    [
        ("source", pa.string()),
        ("prompt_ids", pa.list_(pa.int32())),
        ("token_ids", pa.list_(pa.int32())),
        ("pieces", pa.list_(pa.string())),  # the text of each new token
        ("accepted_per_round", pa.list_(pa.int32())),  # none for the verifier alone
    ]
)

PARQUET: dict[str, Any] = {"compression": "zstd", "version": "2.6"}
"""How all tables are written."""
_BUFFER_BYTES = 1 << 20

Values = npt.NDArray[Any]
Offsets = npt.NDArray[np.int64]


class Ragged(NamedTuple):
    """Rows of different lengths: row i is values[offsets[i]:offsets[i + 1]]."""

    values: Values
    """[T]"""
    offsets: Offsets
    """[N + 1], from 0 to T."""

    @property
    def lengths(self) -> Offsets:
        """Values in each row, [N]."""
        return np.diff(self.offsets)

    def row(self, index: int) -> Values:
        """One row, without a copy."""
        return self.values[self.offsets[index] : self.offsets[index + 1]]


def write_table(
    path: Path,
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Any] | pa.Table,
    *,
    schema: pa.Schema,
) -> None:
    """Write rows (mappings), columns (name -> values) or a table to a Parquet file.

    The same rows give the same bytes with the same pyarrow: nothing of time or place is in the
    file.

    Raises:
        ValueError: a row lacks a column, has one too many, or holds a value of another type.
    """
    pq.write_table(_table(rows, schema), path, **PARQUET)


def write_metrics(path: Path, rows: Sequence[Mapping[str, float | None]]) -> None:
    """Write rows of numbers that need not have the same names; what a row lacks is null.

    Columns are sorted by name: rows that went through a checkpoint's JSON give the same bytes.
    """
    names = sorted({name for row in rows for name in row})
    table = pa.table({name: pa.array([row.get(name) for row in rows]) for name in names})
    pq.write_table(table, path, **PARQUET)


def read_table(path: Path | BinaryIO, columns: Sequence[str] | None = None) -> pa.Table:
    """The rows of a Parquet file, by its path or open; or only some columns of them.

    Raises:
        ValueError: it is no complete Parquet file, or lacks one of the columns.
    """
    with _opened(path, columns or ()) as file:
        return file.read(columns=None if columns is None else list(columns))


def read_batches(
    path: Path, columns: Sequence[str], *, rows_per_batch: int
) -> Iterator[pa.RecordBatch]:
    """Some columns of a Parquet file, piece by piece: for tables larger than memory; errors as in `read_table`."""
    with _opened(path, columns) as file:
        yield from file.iter_batches(rows_per_batch, columns=list(columns))


def read_rows(path: Path, start: int, stop: int) -> pa.Table:
    """The rows [start, stop) of a Parquet file; only the row groups that hold them are read."""
    with _opened(path, ()) as file:
        counts = [file.metadata.row_group(i).num_rows for i in range(file.num_row_groups)]
        bounds = np.cumsum([0, *counts])
        first = int(np.searchsorted(bounds, start, side="right")) - 1
        last = int(np.searchsorted(bounds, stop, side="left"))
        return file.read_row_groups(list(range(first, last))).slice(
            start - int(bounds[first]), stop - start
        )


@contextmanager
def _opened(path: Path | BinaryIO, columns: Sequence[str]) -> Iterator[pq.ParquetFile]:
    with path.open("rb") if isinstance(path, Path) else nullcontext(path) as raw:
        try:
            # a buffer, so that a column is read as it is decoded and not whole beforehand
            file = pq.ParquetFile(raw, buffer_size=_BUFFER_BYTES)
        except pa.ArrowInvalid as error:
            raise ValueError(f"{path} is no complete Parquet file: {error}") from error
        missing = set(columns) - set(file.schema_arrow.names)
        if missing:
            raise ValueError(
                f"{path} lacks the columns {sorted(missing)}; it has {file.schema_arrow.names}"
            )
        yield file


def ragged(column: pa.ChunkedArray | pa.Array) -> Ragged:
    """A list column as numpy arrays, chunk by chunk: a table may hold more than 2^31 values.

    Raises:
        ValueError: the column holds no lists, or a list or value is null.
    """
    if not pa.types.is_list(column.type):
        raise ValueError(f"a ragged column holds lists, not {column.type}")
    chunks = column.chunks if isinstance(column, pa.ChunkedArray) else [column]
    values: list[Values] = [np.empty(0, column.type.value_type.to_pandas_dtype())]
    lengths: list[Offsets] = [np.zeros(1, np.int64)]
    for chunk in chunks:
        flat = chunk.flatten()  # respects the slice that a chunk may be
        if chunk.null_count or flat.null_count:
            raise ValueError("a ragged column may not hold nulls; use empty lists")
        values.append(flat.to_numpy(zero_copy_only=False))
        lengths.append(np.diff(chunk.offsets.to_numpy()).astype(np.int64))
    return Ragged(np.concatenate(values), np.cumsum(np.concatenate(lengths)))


def list_column(rows: Ragged, value_type: pa.DataType) -> pa.Array:
    """A list column of a table from numpy arrays; at most 2^31 - 1 values."""
    return pa.ListArray.from_arrays(
        pa.array(rows.offsets, pa.int32()), pa.array(rows.values, value_type)
    )


def _table(
    rows: Sequence[Mapping[str, Any]] | Mapping[str, Any] | pa.Table, schema: pa.Schema
) -> pa.Table:
    if isinstance(rows, pa.Table):
        return rows.select(schema.names).cast(schema)
    names = set(schema.names)
    if isinstance(rows, Mapping):
        _same_names(set(rows), names, "the columns")
        return pa.table(
            {name: pa.array(rows[name], schema.field(name).type) for name in names}, schema
        )
    for index, row in enumerate(rows):
        _same_names(set(row), names, f"row {index}")
    return pa.Table.from_pylist(list(rows), schema=schema)


def _same_names(given: set[str], wanted: set[str], what: str) -> None:
    if given != wanted:
        raise ValueError(
            f"{what} and the schema differ: missing {sorted(wanted - given)}, "
            f"unknown {sorted(given - wanted)}"
        )
