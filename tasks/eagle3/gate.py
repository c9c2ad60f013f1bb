"""Whether a draft is better than another: acceptance of the same prompts, what chance may have done, and limits.

Prompts are what is drawn at random, so intervals come from drawing them again (paired bootstrap, percentiles), not
from rounds, which are alike within a text.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RESAMPLES = 10_000
SEED = 0


@dataclass(frozen=True, slots=True)
class PromptRounds:
    """What speculative decoding of one prompt took."""

    source: str
    """Where the prompt comes from."""
    rounds: int
    """Verifications."""
    accepted: int
    """Draft tokens accepted in them."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What a draft has to keep to."""

    min_acceptance_length: float
    margin: float
    """Least gain over the draft before."""
    confidence: float
    """Of the gain's interval."""
    max_source_loss: float
    """Largest loss of acceptance length on any one source."""
    min_distinct_bigrams: float


@dataclass(frozen=True, slots=True)
class Verdict:
    """What the gate says, and why; figures are acceptance lengths."""

    passed: bool
    reasons: tuple[str, ...]
    """What stands against it; empty when it passed."""
    acceptance_length: float
    before: float | None
    """Of the draft it is held against; None without one."""
    gain: float | None
    interval: tuple[float, float] | None
    """Of the gain."""
    confidence: float
    sources: dict[str, tuple[float, float | None]]
    """Source -> acceptance length now and before; sources without a round are left out."""


def judge(
    new: Sequence[PromptRounds],
    old: Sequence[PromptRounds] | None,
    *,
    distinct_bigrams: float,
    limits: Limits,
) -> Verdict:
    """Hold a draft against limits and, prompt by prompt, against the draft before.

    `distinct_bigrams` is the share of different pairs of tokens in its texts.
    Raises ValueError when the two were not measured on the same prompts, or without any round.
    """
    if old is not None and [p.source for p in old] != [p.source for p in new]:
        raise ValueError(f"{len(new)} prompts against {len(old)}: decode the same with both drafts")
    length, reasons = _length(new), []
    if length < limits.min_acceptance_length:
        reasons.append(
            f"its acceptance length {length:.3f} is below promote.min_acceptance_length "
            f"{limits.min_acceptance_length:g}"
        )
    if distinct_bigrams < limits.min_distinct_bigrams:
        reasons.append(
            f"the texts repeat themselves: {distinct_bigrams:.2f} of their bigrams are distinct, "
            f"promote.min_distinct_bigrams is {limits.min_distinct_bigrams:g}"
        )
    before = gain = interval = None
    if old is not None:
        before = _length(old)
        gain, interval = length - before, gain_interval(new, old, confidence=limits.confidence)
        if gain < limits.margin:
            reasons.append(
                f"its gain {gain:+.3f} ({before:.3f} before) is less than promote.margin {limits.margin:g}"
            )
        elif interval[0] < min(0.0, limits.margin):
            reasons.append(
                f"its gain {gain:+.3f} may be chance: over the {len(new)} prompts the {limits.confidence:.0%} "
                f"interval is {interval[0]:+.3f} to {interval[1]:+.3f}; evaluate more prompts"
            )
    sources = _by_source(new, old)
    for source, (now, then) in sources.items():
        if then is not None and now < then - limits.max_source_loss:
            reasons.append(
                f"on {source} it loses {then - now:.3f} ({now:.3f}, {then:.3f} before), more than "
                f"promote.max_source_loss {limits.max_source_loss:g}"
            )
    return Verdict(
        not reasons, tuple(reasons), length, before, gain, interval, limits.confidence, sources
    )


def gain_interval(
    new: Sequence[PromptRounds], old: Sequence[PromptRounds], *, confidence: float
) -> tuple[float, float]:
    """Interval of the gain in acceptance length, new - old, when prompts, the same for both, are drawn again."""
    counts = np.array(
        [[n.accepted, n.rounds, o.accepted, o.rounds] for n, o in zip(new, old, strict=True)]
    )  # [prompts, 4]
    random = np.random.default_rng(SEED)
    drawn = random.multinomial(len(counts), np.full(len(counts), 1 / len(counts)), RESAMPLES)
    totals = (drawn @ counts).astype(np.float64)  # [RESAMPLES, 4]
    kept = totals[(totals[:, 1] > 0) & (totals[:, 3] > 0)]
    gains: NDArray[np.float64] = kept[:, 0] / kept[:, 1] - kept[:, 2] / kept[:, 3]
    tail = (1 - confidence) / 2
    low, high = np.quantile(gains, [tail, 1 - tail])
    return float(low), float(high)


def _length(prompts: Sequence[PromptRounds]) -> float:
    rounds = sum(prompt.rounds for prompt in prompts)
    if rounds == 0:
        raise ValueError(f"{len(prompts)} prompts without any verification: nothing to judge by")
    return 1 + sum(prompt.accepted for prompt in prompts) / rounds


def _by_source(
    new: Sequence[PromptRounds], old: Sequence[PromptRounds] | None
) -> dict[str, tuple[float, float | None]]:
    found: dict[str, tuple[float, float | None]] = {}
    for source in sorted({prompt.source for prompt in new if prompt.rounds}):
        now = _length([p for p in new if p.source == source])
        then = [p for p in old or [] if p.source == source]
        found[source] = now, _length(then) if any(p.rounds for p in then) else None
    return found
