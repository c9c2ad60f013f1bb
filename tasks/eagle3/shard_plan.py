"""How samples that are sorted by length are packed into shards. M = samples."""

import numpy as np
import numpy.typing as npt


def cut_into_shards(
    lengths: npt.NDArray[np.integer],
    *,
    rows_per_shard: int,
    bytes_per_token: int,
    shard_bytes: int,
) -> list[tuple[int, int]]:
    """Return half-open row ranges that cover the samples in order.

    Args:
        lengths: tokens of each sample, [M].
        rows_per_shard: most samples of a shard.
        bytes_per_token: bytes of one token's states.
        shard_bytes: size at which a shard is closed; a single longer sample is a shard of its own.
    """
    ends = (
        np.cumsum(lengths, dtype=np.int64) * bytes_per_token
    )  # [M], bytes up to and with a sample
    shards = []
    start, begun = 0, 0
    while start < len(lengths):
        fitting = int(np.searchsorted(ends, begun + shard_bytes, side="right"))
        stop = max(start + 1, min(start + rows_per_shard, fitting))
        shards.append((start, stop))
        start, begun = stop, int(ends[stop - 1])
    return shards
