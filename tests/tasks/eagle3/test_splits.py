"""A conversation's side depends on its own prompt, and equal prompts stay together."""

import hashlib
from collections import Counter

import pytest

from tasks.eagle3.splits import SplitRow, split_conversations


def rows(count: int, *, source: str = "chats", start: int = 0) -> list[SplitRow]:
    return [SplitRow(f"c{i}", f"p{i}", source) for i in range(start, start + count)]


def test_the_side_follows_from_seed_and_prompt_digest() -> None:
    sides = split_conversations(rows(200), val_ratio=0.3, seed=7)
    for i in range(200):
        place = int(hashlib.sha256(f"7:p{i}".encode()).hexdigest()[:16], 16)
        assert sides[f"c{i}"] == ("val" if place * 10 < 3 * 2**64 else "train")
    assert 40 < Counter(sides.values())["val"] < 80
    assert sides != split_conversations(rows(200), val_ratio=0.3, seed=8)


def test_more_data_move_no_conversation() -> None:
    before = split_conversations(rows(50), val_ratio=0.2)
    after = split_conversations(rows(400)[::-1], val_ratio=0.2)
    assert {name: after[name] for name in before} == before


def test_equal_prompts_are_on_one_side() -> None:
    doubled = rows(60) + [SplitRow(f"d{i}", f"p{i}", "copies") for i in range(60)]
    sides = split_conversations(doubled, val_ratio=0.5)
    assert all(sides[f"c{i}"] == sides[f"d{i}"] for i in range(60))
    assert set(sides.values()) == {"train", "val"}


@pytest.mark.parametrize("ratio", [0.0001, 0.5, 0.9999])
@pytest.mark.parametrize("seed", range(5))
def test_two_groups_leave_neither_side_empty(ratio: float, seed: int) -> None:
    sides = split_conversations(rows(2), val_ratio=ratio, seed=seed)
    assert sorted(sides.values()) == ["train", "val"]


@pytest.mark.parametrize("ratio", [0.0, 0.2, 0.9999])
def test_a_single_group_is_trained_on(ratio: float) -> None:
    assert split_conversations(rows(1), val_ratio=ratio) == {"c0": "train"}


def test_a_ratio_of_zero_trains_on_everything() -> None:
    assert set(split_conversations(rows(300), val_ratio=0).values()) == {"train"}


def test_held_out_sources_are_the_test_side_with_all_that_opens_alike() -> None:
    known = rows(40)
    unseen = rows(5, source="topics", start=100)
    copy = SplitRow("c-copy", "p100", "chats")
    sides = split_conversations([*known, copy, *unseen], val_ratio=0.2, holdout_sources=["topics"])
    assert {name for name, side in sides.items() if side == "test"} == {
        *(f"c{i}" for i in range(100, 105)),
        "c-copy",
    }
    alone = split_conversations(known, val_ratio=0.2)
    assert {name: sides[name] for name in alone} == alone


@pytest.mark.parametrize(
    ("table", "ratio", "holdout", "message"),
    [
        (rows(3), 1.0, [], "val_ratio 1.0 must be at least 0 and below 1"),
        (rows(3), -0.1, [], "must be at least 0"),
        (rows(3), 0.2, ["topics"], "topics are not in the data; there are: chats"),
        (rows(3), 0.2, ["chats"], "holdout sources chats cover every conversation"),
        ([*rows(1), SplitRow("c0", "other", "chats")], 0.2, [], "c0 has the prompt digests p0"),
    ],
)
def test_what_cannot_be_split_is_refused(
    table: list[SplitRow], ratio: float, holdout: list[str], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        split_conversations(table, val_ratio=ratio, holdout_sources=holdout)
