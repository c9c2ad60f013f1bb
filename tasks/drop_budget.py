"""What a run may leave out as unusable before it stops: conversations, and samples without usable states.

The latter are quarantined: left out of their shard, named with the reason in its manifest, and not tried again.
"""

from collections import Counter
from collections.abc import Iterable, Mapping

from storage.manifest import Manifest

SHOWN = 3


class DroppedTooManyError(ValueError):
    """More rows were unusable than the settings allow."""


def check_dropped(dropped: Counter[str], total: int, *, max_dropped: float, where: str) -> None:
    """Raise DroppedTooManyError when more than the allowed share of `total` conversations was dropped."""
    count = sum(dropped.values())
    if count > max_dropped * total:
        raise DroppedTooManyError(
            f"{where}: {count} of {total} conversations are unusable ({_counts(dropped)}), more than "
            f"data.max_dropped {max_dropped:.2%} allows; mend the source or raise data.max_dropped"
        )


def check_quarantined(quarantined: Mapping[str, str], samples: int, *, max_dropped: float) -> None:
    """Raise DroppedTooManyError when more than the allowed share of the samples is quarantined.

    `quarantined` holds the reason of each by its id.
    """
    if len(quarantined) > max_dropped * samples:
        first = ", ".join(sorted(quarantined)[:SHOWN])
        raise DroppedTooManyError(
            f"capture: {len(quarantined)} of {samples} samples are quarantined "
            f"({_counts(Counter(quarantined.values()))}; the first: {first}), more than data.max_dropped "
            f"{max_dropped:.2%} allows; leave these conversations out, capture in another capture.dtype or by "
            "capture.retry_quarantined, or raise data.max_dropped"
        )


def quarantined_in(shards: Iterable[Manifest]) -> dict[str, str]:
    """Return sample id -> reason of the samples that these shards have left out."""
    return {
        entry["sample_id"]: entry["reason"]
        for shard in shards
        for entry in shard.facts.get("quarantined", [])
    }


def _counts(reasons: Counter[str]) -> str:
    return ", ".join(f"{reason}: {count}" for reason, count in reasons.most_common())
