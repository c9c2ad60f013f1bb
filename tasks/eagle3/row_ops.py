"""Differentiable operations on rows, each with a backward that touches memory once.

N = rows, H = width, h = heads, C = head width, R = rotated part of it, I = MLP width.
"""

from collections.abc import Iterator
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ROWS_PER_PASS_CPU = 128
"""Rows whose elementwise work is done together: they stay in the cache of a core."""


def normalize(rows: Tensor, *, eps: float, dtype: torch.dtype) -> Tensor:
    """Root-mean-square norm without a gain over the last dimension, computed in fp32 or wider."""
    normed: Tensor = _Normalize.apply(rows, eps, dtype)
    return normed


def select_rows(rows: Tensor, index: Tensor) -> Tensor:
    """rows[index] for an index without repeats: the backward is a copy, not an addition."""
    if len(index) == len(rows):  # ascending and without repeats: every row
        return rows
    selected: Tensor = _SelectRows.apply(rows, index)
    return selected


def rotate(rows: Tensor, *, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotary position embedding of `rows` [N, h, C] with `cos`, `sin` [N, R], halves swapped.

    The result has the dtype of the tables, on a GPU that of the rows. R < C leaves the rest of each head as it is.
    """
    rotated: Tensor = _Rotate.apply(rows, cos, sin)
    return rotated


def silu_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `gate_up` [N, 2 * I] = gate and up side by side: [N, I]."""
    gated: Tensor = _SiluGate.apply(gate_up)
    return gated


class _Normalize(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, eps: float, dtype: torch.dtype) -> Any:
        ctx.rows_dtype = rows.dtype
        if _has_kernels(rows):
            normed, inverse = _kernels().normalize(rows, eps=eps, dtype=dtype)
            ctx.save_for_backward(normed, inverse)
            return normed
        wide = rows.to(torch.promote_types(rows.dtype, torch.float32))
        # x.x by a norm: one pass and no [N, H] of squares.
        square = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).square_()
        inverse = square.div_(rows.shape[-1]).add_(eps).rsqrt_()  # [N, 1]
        normed = (wide * inverse).to(dtype)
        ctx.save_for_backward(normed, inverse)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, None, None]:
        normed, inverse = ctx.saved_tensors
        if _has_kernels(normed):
            d_rows = _kernels().normalize_backward(
                gradients[0], normed, inverse, dtype=ctx.rows_dtype
            )
            return d_rows, None, None
        wide = normed.to(inverse.dtype)
        gradient = gradients[0].to(inverse.dtype)
        share = torch.linalg.vecdot(gradient, wide)[..., None] / normed.shape[-1]  # [N, 1]
        d_rows = torch.addcmul(gradient, wide, share, value=-1).mul_(inverse)
        return d_rows.to(ctx.rows_dtype), None, None


class _SelectRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, index: Tensor) -> Any:
        ctx.save_for_backward(index)
        ctx.count = len(rows)
        return rows.index_select(0, index)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (index,) = ctx.saved_tensors
        gradient = gradients[0]
        d_rows = gradient.new_zeros((ctx.count, *gradient.shape[1:]))
        d_rows.index_copy_(0, index, gradient)
        return d_rows, None


class _Rotate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.rows_dtype = rows.dtype
        if _has_kernels(rows):
            return _kernels().rotate(rows, cos=cos, sin=sin)
        return _turn(rows.to(cos.dtype), cos, sin)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Any, None, None]:
        # Both halves of the tables are equal, so the transpose is the turn back.
        cos, sin = ctx.saved_tensors
        if _has_kernels(gradients[0]):
            d_rows = _kernels().rotate(gradients[0].contiguous(), cos=cos, sin=sin, backward=True)
            return d_rows.to(ctx.rows_dtype), None, None
        return _turn(gradients[0], cos, -sin).to(ctx.rows_dtype), None, None


class _SiluGate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate_up: Tensor) -> Any:
        ctx.save_for_backward(gate_up)
        if _has_kernels(gate_up):
            return _kernels().silu_gate(gate_up)
        gated = gate_up.new_empty(len(gate_up), gate_up.shape[1] // 2)
        for part in _passes(gate_up):
            gate, up = _wide(gate_up[part]).chunk(2, dim=-1)
            gated[part] = torch.nn.functional.silu(gate).mul_(up)
        return gated

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (gate_up,) = ctx.saved_tensors
        if _has_kernels(gate_up):
            return _kernels().silu_gate_backward(gradients[0], gate_up)
        d_gate_up = torch.empty_like(gate_up)
        for part in _passes(gate_up):
            gate, up = _wide(gate_up[part]).chunk(2, dim=-1)
            d_gate, d_up = d_gate_up[part].chunk(2, dim=-1)
            gradient = _wide(gradients[0][part])
            sigmoid = torch.sigmoid(gate)
            silu = gate * sigmoid
            d_up.copy_(gradient * silu)
            # d silu = sigmoid + silu * (1 - sigmoid)
            slope = torch.addcmul(sigmoid, silu, 1 - sigmoid)
            d_gate.copy_(slope.mul_(gradient).mul_(up))
        return d_gate_up


def _has_kernels(rows: Tensor) -> bool:
    return rows.is_cuda and rows.dtype in {torch.float32, torch.bfloat16}


def _kernels() -> ModuleType:
    from tasks.eagle3.kernels import rows  # noqa: PLC0415 - Triton, which only a GPU needs

    return rows


def _turn(rows: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    half, turned = cos.shape[-1] // 2, torch.empty_like(rows)
    first, second, rest = rows.tensor_split([half, 2 * half], dim=-1)
    cos, sin = cos[:, None, :half], sin[:, None, :half]  # [N, 1, R / 2]
    torch.mul(first, cos, out=turned[..., :half]).addcmul_(second, sin, value=-1)
    torch.mul(second, cos, out=turned[..., half : 2 * half]).addcmul_(first, sin)
    turned[..., 2 * half :] = rest
    return turned


def _wide(rows: Tensor) -> Tensor:
    return rows.to(torch.promote_types(rows.dtype, torch.float32))


def _passes(rows: Tensor) -> Iterator[slice]:
    step = ROWS_PER_PASS_CPU if rows.device.type == "cpu" else max(len(rows), 1)
    return (slice(start, start + step) for start in range(0, len(rows), step))
