"""How long samples are, in so few numbers that a manifest holds them, and that those of many files add up."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

MOST_BINS = 32


def count_lengths(lengths: Sequence[int]) -> dict[str, Any]:
    """Return how many lengths are in [0, w), [w, 2w), ...: w is the least power of two that gives 32 bins at most."""
    width = 1
    while max(lengths, default=0) // width >= MOST_BINS:
        width *= 2
    samples = [0] * (max(lengths, default=0) // width + 1)
    for length in lengths:
        samples[length // width] += 1
    return {"tokens_per_bin": width, "samples": samples}


def add_up(histograms: Iterable[Mapping[str, Any]]) -> dict[str, Any]:
    """Return one histogram of several, as wide in its bins as the widest of them."""
    found = list(histograms)
    width = max((one["tokens_per_bin"] for one in found), default=1)
    samples: list[int] = []
    for one in found:
        bins_in_one = width // one["tokens_per_bin"]
        for index, count in enumerate(one["samples"]):
            samples += [0] * (index // bins_in_one + 1 - len(samples))
            samples[index // bins_in_one] += count
    return {"tokens_per_bin": width, "samples": samples}
