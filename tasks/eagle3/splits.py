"""Which conversations train the draft, which choose its checkpoint, and which measure it.

Conversations that open alike form a group and stay together. A group's side depends on its own
digest and the seed alone, so more data never moves a conversation from one side to another: what
was once held out stays unseen when the draft is retrained. The price is that the share of groups
on the val side is `val_ratio` on average only.
"""

import hashlib
from collections.abc import Collection, Iterable
from fractions import Fraction
from typing import Literal, NamedTuple

Side = Literal["train", "val", "test"]

SPAN = 2**64
"""A group's digest places it in [0, SPAN)."""


class SplitRow(NamedTuple):
    """A conversation, the digest of what is asked in it, and where it comes from."""

    conversation_id: str
    prompt_digest: str
    source: str


def split_conversations(
    rows: Iterable[SplitRow],
    *,
    val_ratio: float,
    holdout_sources: Collection[str] = (),
    seed: int = 0,
) -> dict[str, Side]:
    """Side of each conversation id.

    Args:
        rows: Conversations; those with one prompt digest form a group.
        val_ratio: Share of the other groups on the val side, at least 0 and below 1.
        holdout_sources: Sources that are the test side, with all that opens like one of theirs.
        seed: Another seed draws another split.

    With two or more groups to draw from and a ratio above 0 neither train nor val is left empty: the
    group nearest to the border changes sides then, and may change back once there are more data.

    Raises:
        ValueError: a ratio out of range, an unknown holdout source, a conversation with two
            prompts, or nothing left to train on.
    """
    if not 0 <= val_ratio < 1:
        raise ValueError(f"val_ratio {val_ratio} must be at least 0 and below 1")
    group_of, test = _groups(rows, set(holdout_sources))
    drawn = set(group_of.values()) - test
    if group_of and not drawn:
        raise ValueError(
            f"holdout sources {', '.join(sorted(holdout_sources))} cover every conversation; "
            "hold out fewer or add data to train on"
        )
    val = _draw(drawn, val_ratio=val_ratio, seed=seed)
    side_of: dict[str, Side] = dict.fromkeys(drawn - val, "train")
    side_of |= dict.fromkeys(val, "val")
    side_of |= dict.fromkeys(test, "test")
    assert len(side_of) == len(drawn) + len(test), "a prompt is on two sides"
    return {conversation: side_of[group] for conversation, group in group_of.items()}


def _groups(rows: Iterable[SplitRow], holdout: set[str]) -> tuple[dict[str, str], set[str]]:
    """Group of each conversation, and the groups that a holdout source has a part in."""
    group_of: dict[str, str] = {}
    held_out: set[str] = set()
    sources: set[str] = set()
    for conversation, group, source in rows:
        known = group_of.setdefault(conversation, group)
        if known != group:
            raise ValueError(
                f"conversation {conversation} has the prompt digests {known} and {group}; "
                "a conversation has one prompt"
            )
        sources.add(source)
        if source in holdout:
            held_out.add(group)
    if unknown := sorted(holdout - sources):
        raise ValueError(
            f"holdout sources {', '.join(unknown)} are not in the data; "
            f"there are: {', '.join(sorted(sources)) or 'none'}"
        )
    return group_of, held_out


def _draw(groups: set[str], *, val_ratio: float, seed: int) -> set[str]:
    """Groups of the val side: those whose place lies below the ratio, compared in integers."""
    ratio = Fraction(str(val_ratio))  # the ratio as written: 0.2 is 1/5
    place_of = {group: _place(group, seed=seed) for group in groups}
    ranked = sorted(groups, key=lambda group: (place_of[group], group))
    border = ratio.numerator * SPAN
    val = {group for group in ranked if place_of[group] * ratio.denominator < border}
    if ratio and ranked and len(val) == len(ranked):
        val.discard(ranked[-1])  # something must be left to train on
    if ratio and len(ranked) > 1 and not val:
        val.add(ranked[0])
    return val


def _place(group: str, *, seed: int) -> int:
    digest = hashlib.sha256(f"{seed}:{group}".encode()).digest()
    return int.from_bytes(digest[:8], "big")
