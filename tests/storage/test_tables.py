from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.tables import (
    SAMPLES_SCHEMA,
    Ragged,
    list_column,
    ragged,
    read_batches,
    read_rows,
    read_table,
    write_table,
)


def sample(name: str, ids: list[int]) -> dict[str, Any]:
    return {
        "sample_id": name,
        "conversation_id": f"c-{name}",
        "source": "chats.jsonl",
        "input_ids": ids,
        "loss_mask": [i % 2 == 0 for i in ids],
        "truncated": False,
    }


ROWS = [sample("a", [1, 2, 3]), sample("b", []), sample("c", [4])]


def test_rows_columns_and_tables_are_written_alike_and_read_back(tmp_path: Path) -> None:
    columns = {name: [row[name] for row in ROWS] for name in ROWS[0]}
    table = pa.Table.from_pylist(ROWS)  # infers int64 ids; the schema decides
    for index, rows in enumerate((ROWS, columns, table)):
        write_table(tmp_path / str(index), rows, schema=SAMPLES_SCHEMA)
    contents = {(tmp_path / str(index)).read_bytes() for index in range(3)}
    assert len(contents) == 1
    read = read_table(tmp_path / "0")
    assert read.schema == SAMPLES_SCHEMA
    assert read.to_pylist() == ROWS
    assert read_table(tmp_path / "0", ["truncated", "sample_id"]).num_columns == 2


def test_no_rows_make_a_table_without_rows(tmp_path: Path) -> None:
    write_table(tmp_path / "t", [], schema=SAMPLES_SCHEMA)
    read = read_table(tmp_path / "t")
    assert read.num_rows == 0
    assert ragged(read["input_ids"]).offsets.tolist() == [0]


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"sample_id": "a"}], r"row 0 .*missing \['conversation_id'"),
        ([{**ROWS[0], "extra": 1}], r"unknown \['extra'\]"),
        ([{**ROWS[0], "input_ids": ["x"]}], "x"),
    ],
)
def test_rows_that_do_not_fit_the_schema_are_refused(
    tmp_path: Path, rows: list[dict[str, Any]], message: str
) -> None:
    with pytest.raises((ValueError, TypeError), match=message):
        write_table(tmp_path / "t", rows, schema=SAMPLES_SCHEMA)


def test_a_cut_table_and_a_missing_column_are_named(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    write_table(path, ROWS, schema=SAMPLES_SCHEMA)
    with pytest.raises(ValueError, match=r"t\.parquet lacks the columns \['nope'\]"):
        read_table(path, ["nope"])
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"t\.parquet is no complete Parquet file"):
        read_table(path)


def test_list_columns_become_ragged_arrays_whatever_their_chunks_and_slices() -> None:
    lists = [[1, 2, 3], [], [4], [5, 6]]
    whole = pa.array(lists, pa.list_(pa.int32()))
    chunked = pa.chunked_array([whole.slice(1, 2), whole.slice(3), whole.slice(0, 1)])
    rows = ragged(chunked)
    assert rows.values.tolist() == [4, 5, 6, 1, 2, 3]
    assert rows.values.dtype == np.int32
    assert rows.offsets.tolist() == [0, 0, 1, 3, 6]
    assert [rows.row(i).tolist() for i in range(4)] == [[], [4], [5, 6], [1, 2, 3]]
    assert rows.lengths.tolist() == [0, 1, 2, 3]
    assert ragged(pa.array([[True], [False, True]])).values.tolist() == [True, False, True]


def test_ragged_arrays_become_list_columns() -> None:
    rows = Ragged(np.array([7, 8, 9], np.int32), np.array([0, 1, 1, 3]))
    assert list_column(rows, pa.int32()).to_pylist() == [[7], [], [8, 9]]


def test_nulls_and_plain_columns_are_not_ragged() -> None:
    with pytest.raises(ValueError, match="nulls"):
        ragged(pa.array([[1], None]))
    with pytest.raises(ValueError, match="nulls"):
        ragged(pa.array([[1, None]]))
    with pytest.raises(ValueError, match="holds lists, not int64"):
        ragged(pa.array([1, 2]))


def test_batches_and_row_ranges_are_parts_of_the_table(tmp_path: Path) -> None:
    path = tmp_path / "table"
    rows = [sample(f"s{i}", list(range(i))) for i in range(10)]
    table = pa.Table.from_pylist(rows, schema=SAMPLES_SCHEMA)
    pq.write_table(table, path, row_group_size=4)

    batches = list(read_batches(path, ["input_ids"], rows_per_batch=3))
    assert [batch.schema.names for batch in batches] == [["input_ids"]] * len(batches)
    assert max(map(len, batches)) <= 3
    assert [ids for batch in batches for ids in batch["input_ids"].to_pylist()] == [
        row["input_ids"] for row in rows
    ]
    for start, stop in ((0, 10), (0, 4), (4, 8), (3, 5), (9, 10), (8, 8)):
        assert read_rows(path, start, stop).to_pylist() == rows[start:stop]
    with pytest.raises(ValueError, match="lacks the columns"):
        list(read_batches(path, ["nothing"], rows_per_batch=3))
