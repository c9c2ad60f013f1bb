"""Attention of a TTT step: causal over the document's step-0 keys, plus one key per later step.

Exact and blockwise: scores are made tile by tile, backward makes them again from the saved
normalizers, so memory grows with the tile and not with the square of a document.

N = query rows, M = key rows, Q = query heads, V = key/value heads, G = Q / V, C = head width,
J = later-step keys of each row, B x n x m = tiles, their queries, their keys.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tasks.eagle3.flash_attention import flash_attention
from tasks.eagle3.step_plan import Sequences, TileGroup


def ttt_attention(
    queries: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    visible: Sequence[TileGroup] | Sequences,
    scale: float,
) -> Tensor:
    """Softmax over the visible step-0 keys and the row's own later keys together.

    `queries` [N, Q, C], `keys` and `values` [M, V, C], `own_keys` and `own_values` [J, N, V, C]
    (J may be 0). Query heads h of group h // G share a key head. Returns [N, Q * C].
    """
    kv_heads = keys.shape[1]
    groups = queries.shape[1] // kv_heads
    grouped = queries.view(len(queries), kv_heads, groups, keys.shape[2])  # [N, V, G, C]
    if isinstance(visible, Sequences):
        return flash_attention(
            grouped,
            keys=keys,
            values=values,
            own_keys=own_keys,
            own_values=own_values,
            sequences=visible,
            scale=scale,
        ).flatten(1)
    mixed: Tensor = _Attention.apply(
        grouped, keys, values, own_keys, own_values, tuple(visible), scale
    )
    return mixed.flatten(1)


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        tiles: tuple[TileGroup, ...],
        scale: float,
    ) -> Tensor:
        dtype = _score_dtype(queries)
        scaled = _padded(queries.to(dtype) * scale)  # [N + 1, V, G, C]
        padded_keys, padded_values = _padded(keys.to(dtype)), _padded(values.to(dtype))
        mixed = torch.zeros_like(scaled)
        top = scaled.new_zeros(scaled.shape[:-1])  # [N + 1, V, G], largest score
        total = scaled.new_zeros(scaled.shape[:-1])  # sum of exp(score - top)
        for group in tiles:
            scores = _scores(scaled, padded_keys, group)  # [B, V, n, G, m]
            tile_top = scores.amax(-1)
            weights = scores.sub_(tile_top[..., None]).exp_()
            _scatter(top, group, tile_top)
            _scatter(total, group, weights.sum(-1))
            _scatter(mixed, group, _mix(weights, padded_values, group))
        mixed, top, total = mixed[:-1], top[:-1], total[:-1]
        if len(own_keys):
            own_scores = _own_scores(scaled[:-1], own_keys.to(dtype))  # [J, N, V, G]
            new_top = torch.maximum(top, own_scores.amax(0))
            shrink = (top - new_top).exp_()
            own_weights = (own_scores - new_top).exp_()
            total = total * shrink + own_weights.sum(0)
            mixed = mixed * shrink[..., None] + _own_mix(own_weights, own_values.to(dtype))
            top = new_top
        mixed = mixed / total[..., None]
        ctx.tiles, ctx.scale = tiles, scale
        ctx.save_for_backward(queries, keys, values, own_keys, own_values, mixed, top + total.log())
        return mixed.to(queries.dtype)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        queries, keys, values, own_keys, own_values, mixed, normalizer = ctx.saved_tensors
        dtype = mixed.dtype
        gradient = gradients[0].to(dtype)  # [N, V, G, C]
        scaled = queries.to(dtype) * ctx.scale
        # Softmax backward: d score = weight * (d weight - sum of weight * d weight), and that sum
        # is gradient . output.
        balance = (gradient * mixed).sum(-1)  # [N, V, G]
        d_scaled = torch.zeros_like(_padded(scaled))
        d_keys = keys.new_zeros((len(keys) + 1, *keys.shape[1:]), dtype=dtype)
        d_values = torch.zeros_like(d_keys)
        rows = tuple(_padded(t) for t in (scaled, gradient, balance, normalizer))
        padded_keys, padded_values = _padded(keys.to(dtype)), _padded(values.to(dtype))
        for group in ctx.tiles:
            _tile_backward(
                group,
                rows=rows,
                keys=padded_keys,
                values=padded_values,
                d_scaled=d_scaled,
                d_keys=d_keys,
                d_values=d_values,
            )
        d_scaled = d_scaled[:-1]
        d_own_keys = d_own_values = None
        if len(own_keys):
            cast_keys, cast_values = own_keys.to(dtype), own_values.to(dtype)
            weights = (_own_scores(scaled, cast_keys) - normalizer).exp_()  # [J, N, V, G]
            d_scores = (_own_scores(gradient, cast_values) - balance).mul_(weights)
            d_scaled += _own_mix(d_scores, cast_keys)
            d_own_keys = torch.einsum("jnvg,nvgc->jnvc", d_scores, scaled).to(own_keys.dtype)
            d_own_values = torch.einsum("jnvg,nvgc->jnvc", weights, gradient).to(own_keys.dtype)
        return (
            d_scaled.mul_(ctx.scale).to(queries.dtype),
            d_keys[:-1].to(keys.dtype),
            d_values[:-1].to(values.dtype),
            d_own_keys,
            d_own_values,
            None,
            None,
        )


def _tile_backward(
    group: TileGroup,
    *,
    rows: tuple[Tensor, ...],
    keys: Tensor,
    values: Tensor,
    d_scaled: Tensor,
    d_keys: Tensor,
    d_values: Tensor,
) -> None:
    """Add one group's share to the three gradients."""
    scaled, gradient, balance, normalizer = rows
    tiles, count = group.queries.shape
    weights = _scores(scaled, keys, group)  # [B, V, n, G, m]
    weights.sub_(_gather(normalizer, group)[..., None]).exp_()
    tile_gradient = _flat(_gather(gradient, group))  # [B * V, n * G, C]
    tile_keys, tile_values = _tile_keys(keys, group), _tile_keys(values, group)  # [B * V, m, C]
    d_scores = torch.bmm(tile_gradient, tile_values.mT).view_as(weights)
    d_scores.sub_(_gather(balance, group)[..., None]).mul_(weights)
    flat_weights, flat_scores = _flat(weights), _flat(d_scores)  # [B * V, n * G, m]
    d_tile = torch.bmm(flat_scores, tile_keys)
    _scatter(d_scaled, group, d_tile.view(tiles, -1, count, *scaled.shape[2:]))
    _add_keys(d_keys, group, torch.bmm(flat_scores.mT, _flat(_gather(scaled, group))))
    _add_keys(d_values, group, torch.bmm(flat_weights.mT, tile_gradient))


def _score_dtype(tensor: Tensor) -> torch.dtype:
    """bf16 products lose nothing on a GPU's matrix units; a CPU's small bf16 products are slow."""
    wide = torch.promote_types(tensor.dtype, torch.float32)
    return wide if tensor.device.type == "cpu" else tensor.dtype


def _padded(tensor: Tensor) -> Tensor:
    """One more row, of zeros: where the padding of the tiles points."""
    return torch.cat([tensor, tensor.new_zeros((1, *tensor.shape[1:]))])


def _gather(rows: Tensor, group: TileGroup) -> Tensor:
    """[N + 1, V, ...] -> [B, V, n, ...]."""
    tiles, count = group.queries.shape
    picked = rows.index_select(0, group.queries.flatten())
    return picked.view(tiles, count, *rows.shape[1:]).transpose(1, 2)


def _scatter(rows: Tensor, group: TileGroup, tile: Tensor) -> None:
    """Put [B, V, n, ...] back into [N + 1, V, ...]; only the padding row is written twice."""
    rows.index_copy_(0, group.queries.flatten(), tile.transpose(1, 2).flatten(0, 1))


def _tile_keys(rows: Tensor, group: TileGroup) -> Tensor:
    """[M + 1, V, C] -> [B * V, m, C]."""
    tiles, count = group.keys.shape
    picked = rows.index_select(0, group.keys.flatten()).view(tiles, count, *rows.shape[1:])
    return picked.transpose(1, 2).flatten(0, 1)


def _add_keys(rows: Tensor, group: TileGroup, tile: Tensor) -> None:
    """Add [B * V, m, C] to [M + 1, V, C]; only the padding row is in a group twice."""
    shaped = tile.view(len(group.keys), -1, *tile.shape[1:]).transpose(1, 2)  # [B, m, V, C]
    index = group.keys.flatten()
    rows.index_copy_(0, index, shaped.flatten(0, 1) + rows.index_select(0, index))


def _flat(tile: Tensor) -> Tensor:
    """[B, V, n, G, x] -> [B * V, n * G, x]."""
    return tile.flatten(2, 3).flatten(0, 1)


def _scores(scaled: Tensor, keys: Tensor, group: TileGroup) -> Tensor:
    tiles, count = group.queries.shape
    flat = torch.bmm(_flat(_gather(scaled, group)), _tile_keys(keys, group).mT)
    scores = flat.view(tiles, -1, count, scaled.shape[2], flat.shape[-1])  # [B, V, n, G, m]
    return scores.masked_fill_(group.hidden[:, None, :, None, :], float("-inf"))


def _mix(weights: Tensor, values: Tensor, group: TileGroup) -> Tensor:
    mixed = torch.bmm(_flat(weights), _tile_keys(values, group))
    return mixed.view(*weights.shape[:-1], mixed.shape[-1])


def _own_scores(rows: Tensor, own: Tensor) -> Tensor:
    """[N, V, G, C] and [J, N, V, C] -> [J, N, V, G]."""
    return torch.einsum("nvgc,jnvc->jnvg", rows, own)


def _own_mix(weights: Tensor, own: Tensor) -> Tensor:
    """[J, N, V, G] and [J, N, V, C] -> [N, V, G, C]."""
    return torch.einsum("jnvg,jnvc->nvgc", weights, own)
