"""Which samples are still to be captured, and how they are packed into shards.

N = wanted samples, M = missing samples.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class ShardPlan:
    """The missing samples in capture order, and the half-open row ranges of the shards to make of them."""

    sample_ids: tuple[str, ...]
    shards: tuple[tuple[int, int], ...]


def plan_shards(
    wanted: Mapping[str, int],
    captured: Iterable[str],
    *,
    rows_per_shard: int,
    bytes_per_token: int,
    shard_bytes: int,
) -> ShardPlan:
    """Subtract what is captured from what is wanted and pack the rest, sorted by length, into shards.

    Args:
        wanted: sample id -> tokens, of all N samples.
        captured: ids of samples that have their states.
        rows_per_shard: most samples of a shard.
        bytes_per_token: bytes of one token's states.
        shard_bytes: size at which a shard is closed; a single longer sample is a shard of its own.

    Sorting by (length, id) makes the plan a function of the set of missing samples: a shard that was lost is
    planned again with the same rows.
    """
    done = set(captured)
    missing = sorted((tokens, sample) for sample, tokens in wanted.items() if sample not in done)
    shards: list[tuple[int, int]] = []
    start, size = 0, 0
    for row, (tokens, _) in enumerate(missing):
        added = tokens * bytes_per_token
        if row > start and (row - start == rows_per_shard or size + added > shard_bytes):
            shards.append((start, row))
            start, size = row, 0
        size += added
    if missing:
        shards.append((start, len(missing)))
    return ShardPlan(tuple(sample for _, sample in missing), tuple(shards))
