"""Norm, rotation and gate on rows, forward and backward.

N = rows, H = width, h = heads, C = head width, R = rotated part of it, I = MLP width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

GATE_BLOCK = 1024
HEADS_PER_PROGRAM = 8


def normalize(rows: Tensor, *, eps: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """`rows` [.., H] over their root mean square in `dtype`, and one over that root [.., 1] in fp32."""
    rows = rows.contiguous()
    width = rows.shape[-1]
    normed = torch.empty_like(rows, dtype=dtype)
    inverse = torch.empty(*rows.shape[:-1], 1, dtype=torch.float32, device=rows.device)
    _normalize[(inverse.numel(),)](
        rows,
        normed,
        inverse,
        width,
        eps,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_warps(width),
    )
    return normed, inverse


def normalize_backward(
    gradient: Tensor, normed: Tensor, inverse: Tensor, *, dtype: torch.dtype
) -> Tensor:
    """Gradient with respect to the rows, in `dtype`."""
    gradient = gradient.contiguous()
    width = normed.shape[-1]
    d_rows = torch.empty_like(normed, dtype=dtype)
    _normalize_backward[(inverse.numel(),)](
        gradient,
        normed,
        inverse,
        d_rows,
        width,
        BLOCK=triton.next_power_of_2(width),
        num_warps=_warps(width),
    )
    return d_rows


def rotate(rows: Tensor, *, cos: Tensor, sin: Tensor, backward: bool = False) -> Tensor:
    """Rotary embedding of `rows` [N, h, C] by tables [N, R], or its transpose; in the rows' dtype."""
    count, heads, width = rows.shape
    turned = torch.empty(rows.shape, dtype=rows.dtype, device=rows.device)
    half = cos.shape[-1] // 2
    if 2 * half < width:
        turned[..., 2 * half :] = rows[..., 2 * half :]
    _rotate[(count, triton.cdiv(heads, HEADS_PER_PROGRAM))](
        rows,
        turned,
        cos,
        sin,
        heads,
        half,
        width,
        rows.stride(0),
        rows.stride(1),
        cos.stride(0),
        -1.0 if backward else 1.0,
        HEADS=HEADS_PER_PROGRAM,
        BLOCK=triton.next_power_of_2(half),
    )
    return turned


def silu_gate(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of `gate_up` [N, 2 * I]: [N, I]."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    gated = gate_up.new_empty(count, width)
    _silu_gate[(count, triton.cdiv(width, GATE_BLOCK))](gate_up, gated, width, BLOCK=GATE_BLOCK)
    return gated


def silu_gate_backward(gradient: Tensor, gate_up: Tensor) -> Tensor:
    """Gradient with respect to `gate_up`."""
    count, width = gate_up.shape[0], gate_up.shape[1] // 2
    d_gate_up = torch.empty_like(gate_up)
    _silu_gate_backward[(count, triton.cdiv(width, GATE_BLOCK))](
        gradient.contiguous(), gate_up, d_gate_up, width, BLOCK=GATE_BLOCK
    )
    return d_gate_up


def _warps(width: int) -> int:
    return 4 if width <= 2048 else 8 if width <= 8192 else 16


@triton.jit
def _normalize(rows, normed, inverse, width, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    x = tl.load(rows + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = tl.rsqrt(tl.sum(x * x, 0) / width + eps)
    tl.store(normed + row * width + at, (x * scale).to(normed.dtype.element_ty), mask=inside)
    tl.store(inverse + row, scale)


@triton.jit
def _normalize_backward(gradient, normed, inverse, d_rows, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, BLOCK)
    inside = at < width
    dy = tl.load(gradient + row * width + at, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(normed + row * width + at, mask=inside, other=0.0).to(tl.float32)
    share = tl.sum(dy * y, 0) / width
    dx = (dy - y * share) * tl.load(inverse + row)
    tl.store(d_rows + row * width + at, dx.to(d_rows.dtype.element_ty), mask=inside)


@triton.jit
def _rotate(
    rows,
    turned,
    cos,
    sin,
    heads,
    half,
    width,
    row_stride,
    head_stride,
    table_stride,
    sign,
    HEADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)
    at = tl.arange(0, BLOCK)
    inside = (head < heads)[:, None] & (at < half)[None, :]
    c = tl.load(cos + row * table_stride + at, mask=at < half, other=0.0).to(tl.float32)[None, :]
    s = (
        tl.load(sin + row * table_stride + at, mask=at < half, other=0.0).to(tl.float32)[None, :]
        * sign
    )
    source = rows + row * row_stride + head[:, None] * head_stride + at[None, :]
    first = tl.load(source, mask=inside, other=0.0).to(tl.float32)
    second = tl.load(source + half, mask=inside, other=0.0).to(tl.float32)
    target = turned + (row * heads + head[:, None]) * width + at[None, :]
    kind = turned.dtype.element_ty
    tl.store(target, (first * c - second * s).to(kind), mask=inside)
    tl.store(target + half, (second * c + first * s).to(kind), mask=inside)


@triton.jit
def _silu_gate(gate_up, gated, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(
        gated + row * width + at,
        (gate * tl.sigmoid(gate) * up).to(gated.dtype.element_ty),
        mask=inside,
    )


@triton.jit
def _silu_gate_backward(gradient, gate_up, d_gate_up, width, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    at = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = at < width
    gate = tl.load(gate_up + row * 2 * width + at, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * 2 * width + width + at, mask=inside, other=0.0).to(tl.float32)
    dy = tl.load(gradient + row * width + at, mask=inside, other=0.0).to(tl.float32)
    sigmoid = tl.sigmoid(gate)
    silu = gate * sigmoid
    slope = sigmoid + silu * (1 - sigmoid)  # d silu / d gate
    kind = d_gate_up.dtype.element_ty
    tl.store(d_gate_up + row * 2 * width + at, (dy * up * slope).to(kind), mask=inside)
    tl.store(d_gate_up + row * 2 * width + width + at, (dy * silu).to(kind), mask=inside)
