"""Acceptance is counted as a server counts it, and differences are named, not hidden."""

from pathlib import Path

import pytest
import torch

from tasks.eagle3.acceptance import (
    DecodedPrompt,
    Margin,
    TextDifference,
    compare_texts,
    is_rounding,
    margin_at,
    rounding_margin,
    summarize,
)
from tests.tiny_models import load_model, make_llama


def test_the_acceptance_length_is_one_plus_accepted_by_rounds() -> None:
    decoded = [
        DecodedPrompt([1, 2, 3, 4, 5, 6, 7], [3, 0, 1], ties=1),
        DecodedPrompt([9], [], ties=0),
        DecodedPrompt([5, 5, 5, 5], [2], ties=2),
    ]
    summary = summarize(decoded, draft_tokens=3)
    assert summary.acceptance_length == 1 + 6 / 4
    assert summary.per_position == (3 / 4, 2 / 4, 1 / 4)
    assert summary.acceptance_length == 1 + sum(summary.per_position)
    assert summary.per_prompt == (1 + 4 / 3, None, 3.0)
    assert (summary.rounds, summary.tokens, summary.ties) == (4, 12, 3)


def test_looping_text_shows_in_the_share_of_distinct_bigrams() -> None:
    varied = DecodedPrompt([1, 2, 3, 4], [0], ties=0)  # 3 pairs, all different
    looping = DecodedPrompt([1, 2, 1, 2, 1, 2], [0], ties=0)  # 5 pairs, 2 different
    assert summarize([varied], draft_tokens=1).distinct_bigrams == 1.0
    assert summarize([varied, looping], draft_tokens=1).distinct_bigrams == 5 / 8


def test_what_has_no_round_cannot_be_summarized() -> None:
    with pytest.raises(ValueError, match=r"no verification in 1 prompts.*raise max_new_tokens"):
        summarize([DecodedPrompt([2], [], ties=0)], draft_tokens=3)
    with pytest.raises(ValueError, match="a round accepted 3 tokens of 2 proposed"):
        summarize([DecodedPrompt([2], [3], ties=0)], draft_tokens=2)


def test_the_first_difference_of_each_text_is_found() -> None:
    reference = [[1, 2, 3], [1, 2, 3], [1, 2], [4], []]
    decoded = [[1, 2, 3], [1, 9, 9], [1, 2, 3], [], []]
    assert compare_texts(reference, decoded) == [
        TextDifference(prompt=1, position=1, reference_id=2, decoded_id=9),
        TextDifference(prompt=2, position=2, reference_id=None, decoded_id=3),
        TextDifference(prompt=3, position=0, reference_id=4, decoded_id=None),
    ]
    with pytest.raises(ValueError, match="1 reference texts against 2"):
        compare_texts([[1]], [[1], [1]])


def test_a_difference_counts_as_rounding_only_between_the_two_tied_tokens() -> None:
    tie = Margin(best_id=7, second_id=8, best_logit=20.0, margin=1e-5, is_tie=True)
    clear = Margin(best_id=7, second_id=8, best_logit=20.0, margin=0.5, is_tie=False)
    assert is_rounding(TextDifference(0, 3, 7, 8), tie)
    assert is_rounding(TextDifference(0, 3, 8, 7), tie)
    assert not is_rounding(TextDifference(0, 3, 7, 9), tie)
    assert not is_rounding(TextDifference(0, 3, 7, None), tie)
    assert not is_rounding(TextDifference(0, 3, 7, 8), clear)


def test_the_margin_is_that_of_the_verifiers_own_logits(tmp_path: Path) -> None:
    model = load_model(make_llama(tmp_path))
    ids = [5, 9, 200, 31]
    with torch.no_grad():
        best, second = model(torch.tensor([ids[:3]])).logits[0, -1].sort(descending=True)[0][:2]
    found = margin_at(model, ids, position=3)
    assert found.best_logit == pytest.approx(best.item(), abs=1e-5)
    assert found.margin == pytest.approx((best - second).item(), abs=1e-5)
    assert not found.is_tie
    head = model.get_output_embeddings().weight.data
    head[(found.best_id + 1) % 320] = head[found.best_id]
    twin = margin_at(model, ids, position=3)
    assert twin.is_tie
    assert {twin.best_id, twin.second_id} == {found.best_id, (found.best_id + 1) % 320}
    with pytest.raises(ValueError, match="position 0 is outside 1 to 4"):
        margin_at(model, ids, position=0)


def test_rounding_reaches_further_in_lower_precision() -> None:
    assert rounding_margin(torch.float32) < 1e-4 < rounding_margin(torch.bfloat16) < 0.1
