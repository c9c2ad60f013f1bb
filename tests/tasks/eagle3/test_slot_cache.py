"""Slots are places: entries above a query's place do not exist for it."""

import math

import pytest
import torch
import torch.nn.functional as F  # noqa: N812  the name torch itself uses
from transformers.masking_utils import (
    chunked_causal_mask_function,
    sliding_window_causal_mask_function,
)

from tasks.eagle3.slot_cache import SlotCache, slot_attention, slot_mask, survivors


def test_entries_land_at_their_places_and_later_ones_write_over_them() -> None:
    cache = SlotCache(rows=2, slots=4)
    first = torch.tensor([[1.0, 2.0], [3.0, 4.0]])[:, None, :, None]  # [B, 1, Q, 1]
    cache.write_at(torch.tensor([[0, 1], [0, 1]]))
    cache.update(first, -first, 0)
    cache.write_at(torch.tensor([[1, 2], [2, 3]]))
    assert cache.used == 4
    second = torch.tensor([[5.0, 6.0], [7.0, 8.0]])[:, None, :, None]
    keys, values = cache.update(second, -second, 0)
    assert keys[:, 0, :, 0].tolist() == [[1, 5, 6, 0], [3, 4, 7, 8]]
    assert torch.equal(values, -keys)


def test_rows_that_stay_keep_their_entries() -> None:
    cache = SlotCache(rows=3, slots=2)
    states = torch.tensor([1.0, 2.0, 3.0])[:, None, None, None]
    cache.write_at(torch.zeros(3, 1, dtype=torch.long))
    cache.update(states, states, 0)
    cache.keep(survivors([False, True, True]))
    cache.write_at(torch.tensor([[1], [1]]))
    keys, _ = cache.update(torch.zeros(2, 1, 1, 1), torch.zeros(2, 1, 1, 1), 0)

    assert keys[:, 0, :, 0].tolist() == [[3, 0], [2, 0]]


@pytest.mark.parametrize(
    ("live", "order"),
    [
        ([True, True], [0, 1]),
        ([False, True, True, False], [2, 1]),
        ([False, False, True], [2]),
        ([False], []),
    ],
)
def test_survivors_fill_the_gaps_from_behind(live: list[bool], order: list[int]) -> None:
    assert survivors(live) == order


def test_a_place_beyond_the_slots_is_an_error() -> None:
    with pytest.raises(ValueError, match="place 4 lies beyond the 4 slots"):
        SlotCache(rows=1, slots=4).write_at(torch.tensor([[3, 4]]))


def test_a_query_sees_the_slots_up_to_its_own_place() -> None:
    mask = slot_mask(torch.tensor([[0, 1], [2, 3]]), used=4, dtype=torch.float32)
    assert (mask[:, 0] == 0).tolist() == [
        [[True, False, False, False], [True, True, False, False]],
        [[True, True, True, False], [True, True, True, True]],
    ]


def test_the_models_own_rule_of_what_is_seen_holds_at_each_rows_places() -> None:
    places = torch.tensor([[1, 2], [3, 4]])
    window = slot_mask(
        places, used=5, dtype=torch.float32, sees=sliding_window_causal_mask_function(2)
    )
    assert (window[:, 0] == 0).int().tolist() == [
        [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0]],
        [[0, 0, 1, 1, 0], [0, 0, 0, 1, 1]],
    ]
    starts = torch.zeros(2, dtype=torch.long)
    chunks = slot_mask(
        places, used=5, dtype=torch.float32, sees=chunked_causal_mask_function(3, starts)
    )
    assert (chunks[:, 0] == 0).int().tolist() == [
        [[1, 1, 0, 0, 0], [1, 1, 1, 0, 0]],
        [[0, 0, 0, 1, 0], [0, 0, 0, 1, 1]],
    ]


def test_capped_scores_and_a_sink_are_computed_as_defined() -> None:
    # one query, scores 3 and 0 before the cap of 2, a sink of score 1, values 1 and 10
    query = torch.tensor([[[[3.0]]]])
    key, value = torch.tensor([[[[1.0], [0.0]]]]), torch.tensor([[[[1.0], [10.0]]]])
    nothing = torch.zeros(1, 1, 1, 2)
    first, second, sink = math.exp(2 * math.tanh(1.5)), 1.0, math.e

    out, _ = slot_attention(
        torch.nn.Identity(), query, key, value, nothing, scaling=1.0, softcap=2.0,
        s_aux=torch.tensor([1.0]),
    )  # fmt: skip

    expected = (first * 1 + second * 10) / (first + second + sink)
    assert out.item() == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("queries", [3, 40])  # folded into the key heads, and not
def test_attention_with_shared_key_heads_equals_one_copy_for_each_query_head(queries: int) -> None:
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 6, queries, 8, generator=generator)
    key, value = torch.randn(2, 2, 2, 50, 8, generator=generator)
    places = torch.arange(queries).expand(2, -1) + torch.tensor([[0], [7]])
    mask = slot_mask(places, used=50, dtype=torch.float32)
    out, _ = slot_attention(torch.nn.Identity(), query, key, value, mask, scaling=0.3)
    copies = [t.repeat_interleave(3, dim=1) for t in (key, value)]
    scores = query @ copies[0].mT * 0.3 + mask
    expected = F.softmax(scores, dim=-1) @ copies[1]  # [B, heads, Q, D]
    torch.testing.assert_close(out, expected.transpose(1, 2), rtol=1e-5, atol=1e-5)
