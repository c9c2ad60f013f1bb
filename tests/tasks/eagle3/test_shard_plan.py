import numpy as np
import pytest

from tasks.eagle3.shard_plan import cut_into_shards


def one_by_one(lengths: list[int], rows: int, token_bytes: int, shard_bytes: int):
    """The same, a sample at a time."""
    shards: list[list[int]] = []
    for row, length in enumerate(lengths):
        size = sum(lengths[i] for i in shards[-1]) * token_bytes if shards else 0
        if not shards or len(shards[-1]) == rows or size + length * token_bytes > shard_bytes:
            shards.append([])
        shards[-1].append(row)
    return [(shard[0], shard[-1] + 1) for shard in shards]


@pytest.mark.parametrize(
    ("rows", "shard_bytes"), [(4, 10**9), (100, 300), (7, 500), (1, 1), (3, 100)]
)
def test_a_shard_is_closed_by_its_rows_or_its_bytes(rows: int, shard_bytes: int) -> None:
    random = np.random.default_rng(rows)
    for _ in range(20):
        lengths = np.sort(random.integers(0, 60, 50)).astype(np.int32)
        cut = cut_into_shards(
            lengths, rows_per_shard=rows, bytes_per_token=6, shard_bytes=shard_bytes
        )
        assert cut == one_by_one(lengths.tolist(), rows, 6, shard_bytes)


def test_no_samples_make_no_shard() -> None:
    nothing = np.zeros(0, np.int32)
    assert cut_into_shards(nothing, rows_per_shard=2, bytes_per_token=2, shard_bytes=9) == []


def test_bytes_of_a_huge_corpus_do_not_overflow() -> None:
    lengths = np.full(200_000, 200_000, np.int32)
    cut = cut_into_shards(
        lengths, rows_per_shard=10**6, bytes_per_token=57_344, shard_bytes=5 * 200_000 * 57_344
    )
    assert len(cut) == 40_000
    assert {stop - start for start, stop in cut} == {5}
