"""The draft's vocabulary: the frequent tokens, the specials, and two arrays that agree."""

import dataclasses
from typing import Any

import numpy as np
import pytest

from tasks.eagle3.vocab_map import VocabMap, build_vocab_map

#         id   0  1  2  3  4  5  6  7
COUNTS = [5, 0, 7, 5, 0, 9, 0, 1]


def test_the_most_frequent_tokens_are_chosen_and_ties_go_to_the_lower_id() -> None:
    made = build_vocab_map(COUNTS, draft_size=3)
    assert made.target_ids.tolist() == [0, 2, 5]  # 9, 7, and 5 of id 0 before 5 of id 3
    assert made.d2t.tolist() == [0, 1, 3]
    assert np.flatnonzero(made.t2d).tolist() == [0, 2, 5]
    assert made.draft_size == 3


def test_forced_tokens_are_in_however_rare() -> None:
    made = build_vocab_map(COUNTS, draft_size=3, forced=[6, 6, 5])
    assert made.target_ids.tolist() == [2, 5, 6]


def test_tokens_never_seen_fill_up_by_lowest_id() -> None:
    made = build_vocab_map(COUNTS, draft_size=7)
    assert made.target_ids.tolist() == [0, 1, 2, 3, 4, 5, 7]


def test_the_full_vocabulary_maps_each_token_to_itself() -> None:
    made = build_vocab_map(COUNTS, draft_size=8, forced=[1])
    assert made.d2t.tolist() == [0] * 8
    assert made.t2d.all()


def test_coverage_is_the_share_of_tokens_the_draft_can_propose() -> None:
    made = build_vocab_map(COUNTS, draft_size=3)
    assert made.coverage(COUNTS) == 21 / 27
    assert made.coverage([0, 3, 1, 0, 0, 0, 0, 0]) == 0.25
    assert made.coverage([0] * 8) == 1.0
    with pytest.raises(ValueError, match=r"counts of shape \(2,\) against a vocabulary of 8"):
        made.coverage([1, 2])


def test_a_map_survives_its_arrays() -> None:
    made = build_vocab_map(COUNTS, draft_size=4, forced=[7])
    again = VocabMap.from_arrays(made.to_arrays())
    for name, array in made.to_arrays().items():
        assert np.array_equal(again.to_arrays()[name], array)
    with pytest.raises(ValueError, match=r"missing: \['counts', 't2d'\]"):
        VocabMap.from_arrays({"d2t": made.d2t})


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("d2t", np.array([0, 2, 5]), "first 3, are not marked in t2d; d2t holds offsets, not ids"),
        ("d2t", np.array([0, 1, 2]), "1 target ids, the first 4, are not marked in t2d"),
        ("d2t", np.array([0, 1]), "t2d marks 3 tokens and d2t has 2"),
        ("d2t", np.array([2, 1, 3]), "do not ascend"),
        ("d2t", np.array([0, 1, 9]), "do not ascend within 0 to 7"),
        ("t2d", np.ones(8, dtype=np.int64), "bool and int64"),
        ("t2d", np.ones(9, dtype=np.bool_), "do not belong together"),
    ],
)
def test_arrays_that_contradict_each_other_are_refused(
    field: str, value: Any, message: str
) -> None:
    made = build_vocab_map(COUNTS, draft_size=3)
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(made, **{field: value}).validate()


@pytest.mark.parametrize(
    ("counts", "draft_size", "forced", "message"),
    [
        (COUNTS, 9, [], "draft_size 9 exceeds the verifier's vocabulary 8; lower it"),
        (COUNTS, 0, [], "at least 1; raise it"),
        (COUNTS, 1, [2, 3], "fewer tokens than the 2 forced ones"),
        (COUNTS, 3, [8], "forced ids 8 to 8 are not within the vocabulary of 8"),
        (COUNTS, 3, [-1], "forced ids -1 to -1"),
        ([0, 0], 1, [], "no supervised token was counted"),
        ([1, -1], 1, [], "non-negative"),
        ([[1]], 1, [], r"counts of shape \(1, 1\)"),
    ],
)
def test_sizes_and_ids_that_do_not_fit_are_refused(
    counts: Any, draft_size: int, forced: list[int], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build_vocab_map(counts, draft_size=draft_size, forced=forced)
