"""A key/value cache of ragged rows: the slot of an entry is the token's place in its own row.

B = rows, Q = new tokens a row, S = slots, Hk = key heads, G = query heads a key head, D = head size

Speculative decoding takes back what was rejected, by a different number of tokens in each row. When
slot and place are one, nothing has to be taken back: a query at place p sees slots <= p only, and
the entries of rejected tokens lie above, where later tokens overwrite them before a query can see
them. No row is shifted, no padding is stored, and rows of any length share a batch.

What a query sees below its own place is the model's affair (all, a window, a chunk): its layers ask
transformers for a mask, and the answer comes from here, with each row's own places.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  the name torch itself uses
from torch import Tensor
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PretrainedConfig
from transformers.cache_utils import DynamicLayer
from transformers.masking_utils import causal_mask_function

ATTENTION = "outrider_slots"
"""Name under which `slot_attention` and `slot_mask` are known to transformers."""

Visibility = Callable[[Any, Any, Any, Any], Any]
"""(row, head, place of the query, place of the key) -> whether it is seen; tensors that broadcast to [B, 1, Q, S]."""

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
        self.places = torch.empty(0, dtype=torch.long)
        self.used = 0

    def write_at(self, places: Tensor) -> None:
        """Set the slots `places` [B, Q] of the next forward pass; it looks at `used` slots.

        Raises:
            ValueError: a place lies beyond the slots there are.
        """
        self.used = int(places.max()) + 1
        if self.used > self.slots:
            raise ValueError(
                f"place {self.used - 1} lies beyond the {self.slots} slots of this cache"
            )
        self.places = places

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        """Write 2 x [B, Hk, Q, D] and return what is there so far, 2 x [B, Hk, used, D]."""
        if layer_idx not in self._buffers:
            self._buffers[layer_idx] = (self._empty(key_states), self._empty(value_states))
        keys, values = self._buffers[layer_idx]
        places = self.places.to(keys.device)  # layers may lie on several devices
        rows = torch.arange(self.rows, device=keys.device)[:, None]
        keys[rows, :, places] = key_states.transpose(1, 2)  # [B, Q, Hk, D]
        values[rows, :, places] = value_states.transpose(1, 2)
        return keys[:, :, : self.used], values[:, :, : self.used]

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


def slot_mask(
    places: Tensor, *, used: int, dtype: torch.dtype, sees: Visibility = causal_mask_function
) -> Tensor:
    """Additive mask [B, 1, Q, used] of queries at `places` [B, Q]; by default a query sees the slots up to its own."""
    device = places.device
    row = torch.arange(len(places), device=device)[:, None, None, None]
    slots = torch.arange(used, device=device)[None, None, None]
    seen = sees(row, torch.zeros_like(row), places[:, None, :, None], slots)
    mask = torch.zeros(seen.shape, dtype=dtype, device=device)
    return mask.masked_fill_(~seen, torch.finfo(dtype).min)


def slot_attention(
    _module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: Tensor | None = None,
    **_options: Any,
) -> tuple[Tensor, None]:
    """Attend from query [B, G * Hk, Q, D] to key and value [B, Hk, S, D]; return [B, Q, G * Hk, D].

    The arithmetic of transformers' sdpa path without its copy of the keys and values for each query
    head: with few queries that copy costs more than the attention (measured: 1.8 ms against 0.5 ms
    for 24 rows, 9 heads on 3, 4 queries, 160 slots on two cores). Scores that are capped (`softcap`)
    or compete with a sink (`s_aux` [G * Hk]: a score of a slot without a value) are computed openly.
    """
    rows, heads, queries, _size = query.shape
    group = heads // key.shape[1]
    if softcap is not None or s_aux is not None:
        key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
        out = _attend_openly(
            query, key, value, attention_mask, scaling=scaling, softcap=softcap, sinks=s_aux
        )
        return out.transpose(1, 2).contiguous(), None
    if group > 1 and queries <= FOLDED_QUERIES:
        query = query.reshape(rows, key.shape[1], group * queries, -1)
        attention_mask = attention_mask.repeat(1, 1, group, 1)  # [B, 1, G * Q, S]
    elif group > 1:
        key, value = (t.repeat_interleave(group, dim=1) for t in (key, value))
    out = F.scaled_dot_product_attention(query, key, value, attn_mask=attention_mask, scale=scaling)
    out = out.reshape(rows, heads, queries, -1)
    return out.transpose(1, 2).contiguous(), None


def _attend_openly(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    mask: Tensor,
    *,
    scaling: float | None,
    softcap: float | None,
    sinks: Tensor | None,
) -> Tensor:
    """[B, heads, Q, D] on [B, heads, S, D]: scale, cap, mask, sink, softmax in fp32 -> [B, heads, Q, D]."""
    scores = query @ key.mT * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores + mask  # [B, heads, Q, S]
    if sinks is not None:
        sink = sinks.to(scores.dtype)[None, :, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat([scores, sink], dim=-1)
    weights = F.softmax(scores, dim=-1, dtype=torch.float32)[..., : key.shape[2]]
    return weights.to(value.dtype) @ value


_PASS: ContextVar[SlotCache] = ContextVar("the cache of the forward pass that runs")


def _mask_of_pass(
    *, mask_function: Visibility, dtype: torch.dtype = torch.float32, **_sizes: Any
) -> Tensor:
    """Answer a layer's request for a mask: its own rule of what is seen, at the places of the pass."""
    cache = _PASS.get()
    return slot_mask(cache.places, used=cache.used, dtype=dtype, sees=mask_function)


AttentionInterface.register(ATTENTION, slot_attention)
AttentionMaskInterface.register(ATTENTION, _mask_of_pass)


@contextmanager
def attend_to_slots(config: PretrainedConfig, cache: SlotCache) -> Iterator[None]:
    """Let a model of this config attend to the slots of `cache`, and give its own choice back afterwards."""
    before = config._attn_implementation
    config._attn_implementation = ATTENTION
    running = _PASS.set(cache)
    try:
        yield
    finally:
        _PASS.reset(running)
        config._attn_implementation = before
