"""A weight times a gain in another dtype, and the way back from its gradient to those of both, in one pass each.

O = output width, I = input width.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

ROWS = 32
COLUMNS = 128
ROWS_PER_PROGRAM = 512


def fold(weight: Tensor, gain: Tensor, *, into: Tensor) -> None:
    """Put `weight` [O, I] times `gain` [I] into `into` [O, I], in its dtype."""
    rows, width = weight.shape
    _fold[(triton.cdiv(width, COLUMNS), triton.cdiv(rows, ROWS))](
        weight,
        gain,
        into,
        rows,
        width,
        weight.stride(0),
        into.stride(0),
        ROWS=ROWS,
        COLUMNS=COLUMNS,
    )


def unfold(d_value: Tensor, weights: list[Tensor], gain: Tensor, *, into: Tensor) -> Tensor:
    """`d_value` [O, I] fp32, `weights` stacked [O, I], `gain` [I]: d weight goes `into` [O, I]; returns d gain [I]."""
    sums = []
    width = d_value.shape[1]
    start = 0
    for weight in weights:
        part = slice(start, start + len(weight))
        start += len(weight)
        programs = triton.cdiv(len(weight), ROWS_PER_PROGRAM)
        partial = torch.empty(programs, width, dtype=torch.float32, device=gain.device)
        _unfold[(triton.cdiv(width, COLUMNS), programs)](
            d_value[part],
            weight,
            gain,
            into[part],
            partial,
            len(weight),
            width,
            d_value.stride(0),
            weight.stride(0),
            into.stride(0),
            ROWS=ROWS,
            COLUMNS=COLUMNS,
            ROWS_PER_PROGRAM=ROWS_PER_PROGRAM,
        )
        sums.append(partial)
    return torch.cat(sums).sum(0).to(gain.dtype)


@triton.jit
def _fold(
    weight,
    gain,
    into,
    rows,
    width,
    weight_stride,
    into_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    row = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    inside = (row < rows)[:, None] & (column < width)[None, :]
    scale = tl.load(gain + column, mask=column < width, other=0.0).to(tl.float32)
    w = tl.load(weight + row[:, None] * weight_stride + column[None, :], mask=inside, other=0.0)
    scaled = w.to(tl.float32) * scale[None, :]
    target = into + row[:, None] * into_stride + column[None, :]
    tl.store(target, scaled.to(into.dtype.element_ty), mask=inside)


@triton.jit
def _unfold(
    d_value,
    weight,
    gain,
    into,
    partial,
    rows,
    width,
    value_stride,
    weight_stride,
    into_stride,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS_PER_PROGRAM: tl.constexpr,
):
    column = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_in = column < width
    scale = tl.load(gain + column, mask=column_in, other=0.0).to(tl.float32)
    total = tl.zeros((COLUMNS,), tl.float32)
    for step in range(0, ROWS_PER_PROGRAM, ROWS):
        row = (tl.program_id(1) * ROWS_PER_PROGRAM + step + tl.arange(0, ROWS)).to(tl.int64)
        inside = (row < rows)[:, None] & column_in[None, :]
        d = tl.load(d_value + row[:, None] * value_stride + column[None, :], mask=inside, other=0.0)
        w = tl.load(weight + row[:, None] * weight_stride + column[None, :], mask=inside, other=0.0)
        total += tl.sum(d * w.to(tl.float32), 0)
        target = into + row[:, None] * into_stride + column[None, :]
        tl.store(target, (d * scale[None, :]).to(into.dtype.element_ty), mask=inside)
    tl.store(partial + tl.program_id(1) * width + column, total, mask=column_in)
