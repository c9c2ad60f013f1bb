"""Attention of a TTT step on a GPU: flash attention over the step-0 keys, the row's own keys merged in.

Softmax over a union of keys is the softmaxes over its parts, weighted by their normalizers. Flash attention gives
output and normalizer for the step-0 keys; a kernel takes the few later-step keys in. Its backward pass, given the
*merged* output and normalizer, gives the exact gradients of the step-0 part, and a second kernel adds the rest.

N = query rows, M = key rows, V = key/value heads, G = query heads a key head, C = head width, J = later-step keys of a
row, S = rows of the sequences (each document's queries without gaps, up to its last key).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from tasks.eagle3.step_plan import Sequences

DTYPE = torch.bfloat16


def can_flash(device: torch.device, dtype: torch.dtype, *, head_width: int) -> bool:
    """Whether flash attention computes this."""
    return device.type == "cuda" and dtype == DTYPE and head_width % 8 == 0 and head_width <= 256


def flash_attention(
    queries: Tensor,
    *,
    keys: Tensor,
    values: Tensor,
    own_keys: Tensor,
    own_values: Tensor,
    sequences: Sequences,
    scale: float,
) -> Tensor:
    """As `ttt_attention`: `queries` [N, V, G, C], `keys`, `values` [M, V, C], own ones [J, N, V, C] -> [N, V, G, C]."""
    inputs = (tensor.to(DTYPE) for tensor in (queries, keys, values, own_keys, own_values))
    mixed: Tensor = _FlashAttention.apply(*inputs, sequences, scale)
    return mixed.to(queries.dtype)


class _FlashAttention(torch.autograd.Function):
    @staticmethod
    def forward(  # noqa: PLR0917 - autograd passes arguments by position
        ctx: Any,
        queries: Tensor,
        keys: Tensor,
        values: Tensor,
        own_keys: Tensor,
        own_values: Tensor,
        sequences: Sequences,
        scale: float,
    ) -> Tensor:
        from tasks.eagle3.kernels import own_keys as kernels  # noqa: PLC0415 - needs a GPU

        queries, own_keys, own_values = (t.contiguous() for t in (queries, own_keys, own_values))
        spread = _spread(queries.flatten(1, 2), sequences)  # [S, V * G, C]
        mixed, normalizer, *random = torch.ops.aten._flash_attention_forward(
            spread,
            keys,
            values,
            sequences.query_starts,
            sequences.key_starts,
            sequences.longest_queries,
            sequences.longest_keys,
            0.0,  # dropout
            True,  # causal, the last query at the last key
            False,
            scale=scale,
        )
        if len(own_keys):
            kernels.merge(
                queries,
                own_keys,
                own_values,
                mixed=mixed,
                normalizer=normalizer,
                places=sequences.places,
                scale=scale,
            )
        ctx.sequences, ctx.scale = sequences, scale
        ctx.save_for_backward(
            queries, keys, values, own_keys, own_values, spread, mixed, normalizer, *random[:2]
        )
        return _pick(mixed, sequences).view_as(queries)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        from tasks.eagle3.kernels import own_keys as kernels  # noqa: PLC0415 - needs a GPU

        queries, keys, values, own_keys, own_values, spread, mixed, normalizer, *random = (
            ctx.saved_tensors
        )
        sequences, scale = ctx.sequences, ctx.scale
        gradient = _spread(gradients[0].contiguous().flatten(1, 2), sequences)  # [S, V * G, C]
        with _same_bits_every_time():
            d_spread, d_keys, d_values = torch.ops.aten._flash_attention_backward(
                gradient,
                spread,
                keys,
                values,
                mixed,
                normalizer,
                sequences.query_starts,
                sequences.key_starts,
                sequences.longest_queries,
                sequences.longest_keys,
                0.0,
                True,
                *random,
                scale=scale,
            )
        d_own_keys = d_own_values = None
        if len(own_keys):
            d_own_keys, d_own_values = kernels.merge_backward(
                queries,
                own_keys,
                own_values,
                mixed=mixed,
                normalizer=normalizer,
                places=sequences.places,
                gradient=gradient,
                d_queries=d_spread,
                scale=scale,
            )
        d_queries = _pick(d_spread, sequences).view_as(queries)
        return d_queries, d_keys, d_values, d_own_keys, d_own_values, None, None


@contextmanager
def _same_bits_every_time() -> Iterator[None]:
    """Let flash attention sum the gradients of its queries in a fixed order, not in that of their arrival."""
    before = torch.are_deterministic_algorithms_enabled()
    deterministic: Any = torch.utils.deterministic
    filled = deterministic.fill_uninitialized_memory
    deterministic.fill_uninitialized_memory = False  # or new memory is filled with NaN first
    torch.use_deterministic_algorithms(mode=True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(mode=before)
        deterministic.fill_uninitialized_memory = filled


def _spread(rows: Tensor, sequences: Sequences) -> Tensor:
    """Query rows [N, ..] at their places in [S, ..], zeros between them: these attend too, and count nowhere."""
    if len(rows) == sequences.rows:
        return rows
    spread = rows.new_zeros((sequences.rows, *rows.shape[1:]))
    return spread.index_copy_(0, sequences.places, rows)


def _pick(rows: Tensor, sequences: Sequences) -> Tensor:
    return (
        rows if len(sequences.places) == sequences.rows else rows.index_select(0, sequences.places)
    )
