"""A key/value cache of ragged rows: the slot of an entry is the token's place in its own row.

B = rows, Q = new tokens a row, S = slots, Hk = key heads, G = query heads a key head, D = head size

Speculative decoding takes back what was rejected, by a different number of tokens in each row. When
slot and place are one, nothing has to be taken back: a query at place p sees slots <= p only, and
the entries of rejected tokens lie above, where later tokens overwrite them before a query can see
them. No row is shifted, no padding is stored, and rows of any length share a batch.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name torch itself uses
from torch import Tensor
from transformers import AttentionInterface, Cache, PretrainedConfig
from transformers.cache_utils import DynamicLayer

ATTENTION = "outrider_slots"
"""Name under which `slot_attention` is known to transformers."""

FOLDED_QUERIES = 32
"""Up to this many new tokens a row, query heads of one key head are folded into the queries."""


class SlotCache(Cache):
    """Keys and values of B rows with S slots each, written where `write_at` points.

    Takes the place of transformers' own cache in a decoder layer. The buffers are zeros at first: a
    masked slot has weight 0, and 0 times an uninitialized NaN would not be 0.
    """

    def __init__(self, rows: int, slots: int) -> None:
        super().__init__(layer_class_to_replicate=DynamicLayer)
        self.rows = rows
        self.slots = slots
        self._buffers: dict[int, tuple[Tensor, Tensor]] = {}  # layer -> 2 x [B, Hk, S, D]
        self._targets = torch.empty(0, dtype=torch.long)
        self._used = 0

    def write_at(self, places: Tensor) -> int:
        """Set the slots `places` [B, Q] of the next forward pass; return the slots it looks at.

        Raises:
            ValueError: a place lies beyond the slots there are.
        """
        self._used = int(places.max()) + 1
        if self._used > self.slots:
            raise ValueError(
                f"place {self._used - 1} lies beyond the {self.slots} slots of this cache"
            )
        self._targets = places
        return self._used

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write 2 x [B, Hk, Q, D] and return what is there so far, 2 x [B, Hk, used, D]."""
        if layer_idx not in self._buffers:
            self._buffers[layer_idx] = (self._empty(key_states), self._empty(value_states))
        keys, values = self._buffers[layer_idx]
        places = self._targets.to(keys.device)  # layers may lie on several devices
        rows = torch.arange(self.rows, device=keys.device)[:, None]
        keys[rows, :, places] = key_states.transpose(1, 2)  # [B, Q, Hk, D]
        values[rows, :, places] = value_states.transpose(1, 2)
        return keys[:, :, : self._used], values[:, :, : self._used]

    def keep(self, order: Sequence[int]) -> None:
        """Keep the rows of `order` (from `survivors`): only rows that fill a gap are copied."""
        for keys, values in self._buffers.values():
            for row, source in enumerate(order):
                if row != source:
                    keys[row] = keys[source]
                    values[row] = values[source]
        self.rows = len(order)
        self._buffers = {
            layer: (keys[: self.rows], values[: self.rows])
            for layer, (keys, values) in self._buffers.items()
        }

    def _empty(self, states: Tensor) -> Tensor:
        return states.new_zeros(self.rows, states.shape[1], self.slots, states.shape[3])


def survivors(live: Sequence[bool]) -> list[int]:
    """Order of rows that drops the finished ones and moves as few others as possible.

    >>> survivors([True, False, True, True])
    [0, 3, 2]
    """
    count = sum(live)
    movers = [row for row in range(count, len(live)) if live[row]]
    return [row if live[row] else movers.pop() for row in range(count)]


def slot_mask(places: Tensor, *, used: int, dtype: torch.dtype) -> Tensor:
    """Additive mask [B, 1, Q, used]: a query at place p sees the slots 0 to p."""
    slots = torch.arange(used, device=places.device)
    hidden = slots[None, None, None, :] > places[:, None, :, None]
    mask = torch.zeros(hidden.shape, dtype=dtype, device=places.device)
    return mask.masked_fill_(hidden, torch.finfo(dtype).min)


def slot_attention(
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend from query [B, G * Hk, Q, D] to key and value [B, Hk, S, D]; return [B, Q, G * Hk, D].

    The arithmetic of transformers' sdpa path without its copy of the keys and values for each query
    head: with few queries that copy costs more than the attention (measured: 1.8 ms against 0.5 ms
    for 24 rows, 9 heads on 3, 4 queries, 160 slots on two cores).
    """
    rows, heads, queries, _size = query.shape
    group = heads // key.shape[1]
    if group > 1 and queries <= FOLDED_QUERIES:
        query = query.reshape(rows, key.shape[1], group * queries, -1)
        attention_mask = attention_mask.repeat(1, 1, group, 1)  # [B, 1, G * Q, S]
    elif group > 1:
        key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    out = out.reshape(rows, heads, queries, -1)
    return out.transpose(1, 2).contiguous(), None


AttentionInterface.register(ATTENTION, slot_attention)


@contextmanager
def attend_to_slots(config: PretrainedConfig) -> Iterator[None]:
    """Let a model of this config use `slot_attention`, and give its own choice back afterwards."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = before
