"""Drafts in service: the newest counts, the one before can come back, and what is broken is named."""

from dataclasses import replace
from pathlib import Path

import pytest

from storage import drafts
from storage.drafts import NoDraftError, Promotion
from storage.layout import draft_pointer, promotion_file
from storage.store import Store


def promotion(run: str, previous: str | None = None) -> Promotion:
    return Promotion(
        name=drafts.new_name(),
        draft="tiny",
        run=run,
        speculator=f"speculator/{run}",
        speculator_key=run,
        location=f"/store/speculator/{run}",
        acceptance_length=1.5,
        promoted_at=drafts.time_now(),
        by="gate",
        artifacts=(f"speculator/{run}", "verifier/v"),
        recipe={"parts": {}, "settings": {}, "inputs": {}},
        decision={"promoted": True},
        decided={"stage": "decision"},
        previous=previous,
    )


def test_the_newest_counts_and_a_rollback_goes_back_one_by_one(store: Store) -> None:
    assert drafts.current(store, "tiny") is None
    assert drafts.names(store) == []
    first = promotion("run-1")
    drafts.promote(store, first)
    second = promotion("run-2", first.name)
    drafts.promote(store, second)
    third = promotion("run-3", second.name)
    drafts.promote(store, third)
    assert drafts.current(store, "tiny") == third
    assert drafts.history(store, "tiny") == [first, second, third]
    pointer = store.read_json(draft_pointer("tiny"))
    assert (pointer["speculator"], pointer["run"]) == ("/store/speculator/run-3", "run-3")

    assert drafts.roll_back(store, "tiny") == second
    assert drafts.roll_back(store, "tiny") == first
    assert drafts.current(store, "tiny") == first
    with pytest.raises(NoDraftError, match="from run run-1 was the first"):
        drafts.roll_back(store, "tiny")
    assert drafts.history(store, "tiny") == [first, second, third]


def test_a_promotion_after_a_rollback_goes_back_to_what_counted_then(store: Store) -> None:
    first = promotion("run-1")
    second = promotion("run-2", first.name)
    for one in (first, second):
        drafts.promote(store, one)
    drafts.roll_back(store, "tiny")
    fourth = promotion("run-4", first.name)
    drafts.promote(store, fourth)
    assert drafts.roll_back(store, "tiny") == first


def test_one_killed_before_it_counts_changes_nothing(store: Store) -> None:
    first = promotion("run-1")
    drafts.promote(store, first)
    second = promotion("run-2", first.name)
    store.write_json(
        promotion_file("tiny", second.name), {**vars(second), "artifacts": list(second.artifacts)}
    )
    assert drafts.current(store, "tiny") == first
    assert drafts.history(store, "tiny") == [first, second]


def test_no_draft_of_that_name_is_said_with_those_that_there_are(store: Store) -> None:
    drafts.promote(store, promotion("run-1"))
    with pytest.raises(
        NoDraftError, match=r"no draft .other. is in service in .*; there are: tiny"
    ):
        drafts.roll_back(store, "other")


@pytest.mark.parametrize("damage", ["gone", "cut", "other"])
def test_a_promotion_that_cannot_be_read_is_named_with_the_way_out(
    tmp_path: Path, damage: str
) -> None:
    store = Store(str(tmp_path / "store"))
    first = promotion("run-1")
    drafts.promote(store, first)
    path = tmp_path / "store" / promotion_file("tiny", first.name)
    if damage == "gone":
        path.unlink()
    else:
        path.write_text(path.read_text()[:40] if damage == "cut" else '{"some": "other"}')
    with pytest.raises(ValueError, match=r"promotion .*tiny/promotions/.* cannot be read .*delete"):
        drafts.current(store, "tiny")


def test_two_drafts_do_not_touch_each_other(store: Store) -> None:
    drafts.promote(store, promotion("run-1"))
    drafts.promote(store, replace(promotion("run-2"), draft="other/one"))
    assert sorted(drafts.names(store)) == ["other-one", "tiny"]
    found = drafts.current(store, "tiny")
    assert found is not None
    assert found.run == "run-1"
