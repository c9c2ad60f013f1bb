import pytest

from storage.row_ranges import RowRange, split


def test_a_range_is_half_open_and_prints_as_such() -> None:
    rows = RowRange(0, 1024)
    assert len(rows) == 1024
    assert str(rows) == "rows [0, 1024)"
    assert rows.name == "rows-000000000-000001024"
    assert RowRange.parse(rows.name) == rows
    assert len(RowRange(7, 7)) == 0


def test_split_covers_every_row_once_with_a_shorter_end() -> None:
    assert split(10, 4) == [RowRange(0, 4), RowRange(4, 8), RowRange(8, 10)]
    assert split(8, 4) == [RowRange(0, 4), RowRange(4, 8)]
    assert split(0, 4) == []


@pytest.mark.parametrize(("start", "stop"), [(-1, 2), (3, 2)])
def test_a_range_that_runs_backwards_is_refused(start: int, stop: int) -> None:
    with pytest.raises(ValueError, match=f"start {start} and stop {stop}"):
        RowRange(start, stop)


@pytest.mark.parametrize("name", ["rows-1-2", "rows-000000002-000000001", "shard_3", ""])
def test_other_names_are_no_ranges(name: str) -> None:
    with pytest.raises(ValueError, match="row range"):
        RowRange.parse(name)


def test_a_split_without_rows_per_shard_is_refused() -> None:
    with pytest.raises(ValueError, match="cannot split 10 rows by 0"):
        split(10, 0)
