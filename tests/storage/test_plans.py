"""A plan of 10 samples in 4 shards; the samples come in another order than the plan's."""

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage import artifacts, plans
from storage.artifacts import Identity
from storage.manifest import Manifest
from storage.plans import PlacedSamples, PlannedShard, read_samples, read_shards, write_plan
from storage.row_ranges import RowRange
from storage.store import Store

IDENTITY = Identity(stage="capture_plan", version=2, settings={}, inputs={})
TOKENS = [[i] * i for i in range(10)]
IDS = [f"s{i}" for i in range(10)]
SHARDS = [
    PlannedShard(RowRange(start, stop), sum(range(start, stop)), f"digest {start}")
    for start, stop in ((0, 4), (4, 7), (7, 8), (8, 10))
]
FILES = ["rows-000000000-000000007.parquet", "rows-000000007-000000010.parquet"]


def placed(positions: list[int]) -> PlacedSamples:
    tokens = pa.array([TOKENS[i] if i >= 0 else [77] for i in positions], pa.list_(pa.int32()))
    return PlacedSamples(np.array(positions), tokens)


def make(store: Store, batches: list[list[int]]) -> Manifest:
    with artifacts.write(store, IDENTITY) as writer:
        write_plan(writer, SHARDS, pa.chunked_array([IDS]), map(placed, batches))
        return writer.publish(rows=10)


@pytest.fixture(autouse=True)
def _small_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plans, "FILE_TOKENS", 20)  # two shards a file


def test_each_shard_finds_its_samples_in_the_order_of_the_plan(store: Store) -> None:
    plan = make(store, [[9, -1, 0, 5], [], [3, 8, 2], [-1], [7, 1, 6, 4]])

    assert read_shards(store, plan) == SHARDS
    assert sorted(plan.files) == [*FILES, "shards.parquet"]
    for shard in SHARDS:
        rows = slice(shard.rows.start, shard.rows.stop)
        found = read_samples(store, plan, shard.rows)
        assert found["sample_id"].to_pylist() == IDS[rows]
        assert found["input_ids"].to_pylist() == TOKENS[rows]


def test_a_file_has_a_row_group_for_each_shard(store: Store) -> None:
    plan = make(store, [list(range(10))])
    with artifacts.open_file(store, plan, FILES[1]) as path:
        groups = pq.ParquetFile(path).metadata
        assert [groups.row_group(i).num_rows for i in range(groups.num_row_groups)] == [1, 2]


def test_the_order_of_the_samples_tables_does_not_change_a_byte(store: Store) -> None:
    first = make(store, [list(range(10))])
    second = make(store, [[4, 2], [9, 8, 7, 6, 5, 3, 1, 0]])
    assert first.content == second.content


@pytest.mark.parametrize("batches", [[[0, 1, 2, 3, 4, 5, 6, 7, 8]], [[*range(10)], [3]], []])
def test_a_sample_that_is_lacking_or_twice_there_is_refused(
    store: Store, batches: list[list[int]]
) -> None:
    with pytest.raises(ValueError, match=r"do not hold each sample of the plan's rows \[\d, \d+\)"):
        make(store, batches)
    assert store.directories(IDENTITY.path) == []


def test_rows_of_no_file_are_refused(store: Store) -> None:
    plan = make(store, [list(range(10))])
    with pytest.raises(ValueError, match=r"no file of capture_plan/\w+ holds the rows \[6, 8\)"):
        read_samples(store, plan, RowRange(6, 8))
