"""Attention to a row's own later-step keys, merged into what flash attention gave for the step-0 keys.

N = query rows, V = key/value heads, G = query heads a key head, C = head width, J = later-step keys of each row,
S = rows of the sequences that flash attention ran on (`places` says where each query row lies among them).
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 16


def merge(
    queries: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    *,
    mixed: Tensor,
    normalizer: Tensor,
    places: Tensor,
    scale: float,
) -> None:
    """Take the own keys into `mixed` [S, V * G, C] and `normalizer` [V * G, S], in place.

    `queries` [N, V, G, C], `own_keys` and `own_values` [J, N, V, C].
    """
    count, kv_heads, groups, width = queries.shape
    _merge[(triton.cdiv(count, ROWS), kv_heads)](
        queries,
        own_keys,
        own_values,
        mixed,
        normalizer,
        places,
        count,
        normalizer.shape[1],
        kv_heads,
        groups,
        width,
        scale,
        JOBS=len(own_keys),
        ROWS=ROWS,
        GROUPS=triton.next_power_of_2(groups),
        WIDTH=triton.next_power_of_2(width),
    )


def merge_backward(
    queries: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    *,
    mixed: Tensor,
    normalizer: Tensor,
    places: Tensor,
    gradient: Tensor,
    d_queries: Tensor,
    scale: float,
) -> tuple[Tensor, Tensor]:
    """Add the own keys' share to `d_queries` [S, V * G, C] in place; returns the gradients of own keys and values.

    `gradient` [S, V * G, C] is that of `mixed`.
    """
    count, kv_heads, groups, width = queries.shape
    d_keys, d_values = torch.empty_like(own_keys), torch.empty_like(own_values)
    _merge_backward[(triton.cdiv(count, ROWS), kv_heads)](
        queries,
        own_keys,
        own_values,
        mixed,
        normalizer,
        places,
        gradient,
        d_queries,
        d_keys,
        d_values,
        count,
        normalizer.shape[1],
        kv_heads,
        groups,
        width,
        scale,
        JOBS=len(own_keys),
        ROWS=ROWS,
        GROUPS=triton.next_power_of_2(groups),
        WIDTH=triton.next_power_of_2(width),
    )
    return d_keys, d_values


@triton.jit
def _merge(
    queries,
    own_keys,
    own_values,
    mixed,
    normalizer,
    places,
    count,
    slots,
    kv_heads,
    groups,
    width,
    scale,
    JOBS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    kv_head = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # places in memory pass 2^31
    group = tl.arange(0, GROUPS)
    at = tl.arange(0, WIDTH)
    row_in, group_in, at_in = row < count, group < groups, at < width
    place = tl.load(places + row, mask=row_in, other=0)
    heads = kv_head * groups + group  # [G]
    head_in = row_in[:, None] & group_in[None, :]
    tile_in = head_in[:, :, None] & at_in[None, None, :]
    of_query = ((row[:, None] * kv_heads * groups + heads[None, :]) * width)[:, :, None] + at
    of_mixed = ((place[:, None] * kv_heads * groups + heads[None, :]) * width)[:, :, None] + at
    of_normalizer = heads[None, :] * slots + place[:, None]
    query = tl.load(queries + of_query, mask=tile_in, other=0.0).to(tl.float32)
    old = tl.load(normalizer + of_normalizer, mask=head_in, other=0.0)
    key_in = row_in[:, None] & at_in[None, :]
    top, weight = old, tl.full((ROWS, GROUPS), 1.0, tl.float32)
    value_sum = tl.load(mixed + of_mixed, mask=tile_in, other=0.0).to(tl.float32)
    for j in tl.static_range(JOBS):
        of_key = ((j * count + row)[:, None] * kv_heads + kv_head) * width + at[None, :]
        key = tl.load(own_keys + of_key, mask=key_in, other=0.0).to(tl.float32)
        value = tl.load(own_values + of_key, mask=key_in, other=0.0).to(tl.float32)
        score = tl.sum(query * key[:, None, :], 2) * scale  # [ROWS, G]
        new_top = tl.maximum(top, score)
        shrink, share = tl.exp(top - new_top), tl.exp(score - new_top)
        weight = weight * shrink + share
        value_sum = value_sum * shrink[:, :, None] + share[:, :, None] * value[:, None, :]
        top = new_top
    tl.store(
        mixed + of_mixed, (value_sum / weight[:, :, None]).to(mixed.dtype.element_ty), mask=tile_in
    )
    tl.store(normalizer + of_normalizer, top + tl.log(weight), mask=head_in)


@triton.jit
def _merge_backward(
    queries,
    own_keys,
    own_values,
    mixed,
    normalizer,
    places,
    gradient,
    d_queries,
    d_keys,
    d_values,
    count,
    slots,
    kv_heads,
    groups,
    width,
    scale,
    JOBS: tl.constexpr,
    ROWS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
):
    kv_head = tl.program_id(1)
    row = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)  # places in memory pass 2^31
    group = tl.arange(0, GROUPS)
    at = tl.arange(0, WIDTH)
    row_in, group_in, at_in = row < count, group < groups, at < width
    place = tl.load(places + row, mask=row_in, other=0)
    heads = kv_head * groups + group
    head_in = row_in[:, None] & group_in[None, :]
    tile_in = head_in[:, :, None] & at_in[None, None, :]
    of_query = ((row[:, None] * kv_heads * groups + heads[None, :]) * width)[:, :, None] + at
    of_mixed = ((place[:, None] * kv_heads * groups + heads[None, :]) * width)[:, :, None] + at
    query = tl.load(queries + of_query, mask=tile_in, other=0.0).to(tl.float32)
    out = tl.load(mixed + of_mixed, mask=tile_in, other=0.0).to(tl.float32)
    dout = tl.load(gradient + of_mixed, mask=tile_in, other=0.0).to(tl.float32)
    norm = tl.load(normalizer + heads[None, :] * slots + place[:, None], mask=head_in, other=0.0)
    balance = tl.sum(out * dout, 2)  # [ROWS, G]
    d_query = tl.load(d_queries + of_mixed, mask=tile_in, other=0.0).to(tl.float32)
    key_in = row_in[:, None] & at_in[None, :]
    for j in tl.static_range(JOBS):
        of_key = ((j * count + row)[:, None] * kv_heads + kv_head) * width + at[None, :]
        key = tl.load(own_keys + of_key, mask=key_in, other=0.0).to(tl.float32)
        value = tl.load(own_values + of_key, mask=key_in, other=0.0).to(tl.float32)
        score = tl.sum(query * key[:, None, :], 2) * scale
        weight = tl.where(head_in, tl.exp(score - norm), 0.0)
        d_weight = tl.sum(dout * value[:, None, :], 2)
        d_score = weight * (d_weight - balance) * scale
        d_query += d_score[:, :, None] * key[:, None, :]
        kind = d_keys.dtype.element_ty
        tl.store(d_keys + of_key, tl.sum(d_score[:, :, None] * query, 1).to(kind), mask=key_in)
        tl.store(d_values + of_key, tl.sum(weight[:, :, None] * dout, 1).to(kind), mask=key_in)
    tl.store(d_queries + of_mixed, d_query.to(d_queries.dtype.element_ty), mask=tile_in)
