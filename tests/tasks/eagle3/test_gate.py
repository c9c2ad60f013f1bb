"""When a draft is better: gain, chance, single sources, repetition; and what cannot be compared."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest

from tasks.eagle3.gate import Limits, PromptRounds, gain_interval, judge

LIMITS = Limits(
    min_acceptance_length=1.0,
    margin=0.02,
    confidence=0.9,
    max_source_loss=0.1,
    min_distinct_bigrams=0.3,
)


def prompts(
    accepted: Sequence[int], *, rounds: int = 40, source: str = "chat"
) -> list[PromptRounds]:
    return [PromptRounds(source, rounds, count) for count in accepted]


def test_a_clearly_better_draft_passes_and_its_figures_are_told() -> None:
    verdict = judge(
        prompts([24, 26] * 12), prompts([16, 18] * 12), distinct_bigrams=0.9, limits=LIMITS
    )
    assert verdict.passed
    assert verdict.reasons == ()
    assert verdict.acceptance_length == pytest.approx(1.625)
    assert verdict.before == pytest.approx(1.425)
    assert verdict.gain == pytest.approx(0.2)
    assert verdict.interval is not None
    assert verdict.interval[0] <= 0.2 <= verdict.interval[1]
    assert verdict.sources == {"chat": (pytest.approx(1.625), pytest.approx(1.425))}


def test_without_a_draft_before_it_only_has_to_keep_the_limits() -> None:
    verdict = judge(prompts([0, 0]), None, distinct_bigrams=0.9, limits=LIMITS)
    assert verdict.passed
    assert (verdict.before, verdict.gain, verdict.interval) == (None, None, None)
    limits = replace(LIMITS, min_acceptance_length=1.3)
    (reason,) = judge(prompts([4]), None, distinct_bigrams=0.9, limits=limits).reasons
    assert reason == "its acceptance length 1.100 is below promote.min_acceptance_length 1.3"


@pytest.mark.parametrize(
    ("new", "margin", "passed", "said"),
    [
        ([20] * 24, 0.02, False, "less than promote.margin 0.02"),  # the same
        ([19] * 24, 0.02, False, "its gain -0.025"),  # worse
        ([19] * 23 + [80], 0.01, False, "may be chance"),  # better on one prompt alone
        ([21] * 24, 0.02, True, ""),
        ([19] * 24, -0.05, True, ""),  # a loss that is allowed
        ([17] * 24, -0.05, False, "less than promote.margin -0.05"),
        ([20] * 12 + [16] * 12, -0.06, False, "may be chance"),  # -0.05, but it may well be more
    ],
)
def test_the_gain_needs_the_margin_and_must_not_be_chance(
    new: list[int], margin: float, passed: bool, said: str
) -> None:
    limits = replace(LIMITS, margin=margin)
    verdict = judge(prompts(new), prompts([20] * 24), distinct_bigrams=0.9, limits=limits)
    assert verdict.passed is passed
    assert said in "; ".join(verdict.reasons)


def test_a_loss_on_one_source_counts_although_the_whole_gains() -> None:
    old = prompts([16] * 20) + prompts([20] * 4, source="code")
    new = prompts([24] * 20) + prompts([10] * 4, source="code")
    verdict = judge(new, old, distinct_bigrams=0.9, limits=LIMITS)
    assert verdict.gain is not None
    assert verdict.gain > 0.1
    assert verdict.reasons == (
        "on code it loses 0.250 (1.250, 1.500 before), more than promote.max_source_loss 0.1",
    )


def test_texts_that_repeat_themselves_do_not_pass() -> None:
    verdict = judge(prompts([100] * 24), prompts([1] * 24), distinct_bigrams=0.1, limits=LIMITS)
    assert not verdict.passed
    assert "repeat themselves: 0.10" in verdict.reasons[0]


def test_prompts_without_a_round_count_for_nothing() -> None:
    with_silent = [*prompts([20] * 6), PromptRounds("silent", 0, 0)]
    verdict = judge(with_silent, with_silent, distinct_bigrams=0.9, limits=LIMITS)
    assert verdict.gain == 0
    assert set(verdict.sources) == {"chat"}
    with pytest.raises(ValueError, match="1 prompts without any verification"):
        judge([PromptRounds("silent", 0, 0)], None, distinct_bigrams=1, limits=LIMITS)


def test_other_prompts_are_not_compared() -> None:
    with pytest.raises(ValueError, match="2 prompts against 3"):
        judge(prompts([1, 2]), prompts([1, 2, 3]), distinct_bigrams=1, limits=LIMITS)


def test_the_interval_covers_the_true_gain_as_often_as_it_says() -> None:
    random = np.random.default_rng(1)
    covered = 0
    for _ in range(200):
        ease = random.uniform(0.2, 0.9, size=24)  # prompts differ more than drafts do
        old = prompts(random.binomial(40, ease).tolist())
        new = prompts(random.binomial(40, np.minimum(ease + 0.05, 1)).tolist())
        low, high = gain_interval(new, old, confidence=0.9)
        covered += low <= 0.05 <= high
    assert 0.82 <= covered / 200 <= 0.96
