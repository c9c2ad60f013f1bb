"""Weights as a step's products read them: norm gains folded in, cast once, gradients summed in one place.

A training step uses each matrix at every TTT step. Its folded copy is made once, and its gradient is summed over the
steps in one buffer, on a GPU in fp32 by the product itself. The way back to weight and gain is gone once, at the end.

O = output width, I = input width, n = rows, g = column groups of a stack of weights, each with a gain of its own.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

ALL = slice(None)


@dataclass(eq=False)
class _Matrix:
    """A folded matrix [O, I] and the sum of its gradients so far; knows no graph, so that graphs may hold it."""

    value: Tensor
    gradient: Tensor | None = None


@dataclass(frozen=True, eq=False)
class Folded:
    """One matrix in the products' dtype; made by `fold`."""

    matrix: _Matrix
    token: Tensor

    def linear(self, rows: Tensor, *, outputs: slice = ALL) -> Tensor:
        """`rows` [n, I] times the transpose of the matrix, or of these of its rows: [n, O]."""
        product: Tensor = _Linear.apply(rows, self.token, self.matrix, outputs)
        return product


def fold(
    weights: Sequence[Tensor], gains: Sequence[Tensor | None], *, dtype: torch.dtype
) -> list[Folded]:
    """Stack `weights` [., g * I] by rows; each of the g column groups becomes a matrix, scaled by its gain [I]."""
    with torch.no_grad():
        matrices = [
            _Matrix(_scaled(columns, gain, dtype))
            for gain, columns in zip(gains, _column_groups(weights, len(gains)), strict=True)
        ]
    token = _Fold.apply(tuple(matrices), *gains, *weights)
    return [Folded(matrix, token) for matrix in matrices]


class _Fold(torch.autograd.Function):
    """The folding as autograd sees it: all products hold its token, so its backward comes after theirs."""

    @staticmethod
    def forward(ctx: Any, matrices: tuple[_Matrix, ...], *tensors: Tensor | None) -> Tensor:
        ctx.matrices = matrices
        ctx.save_for_backward(*tensors)
        return torch.zeros((), device=matrices[0].value.device)

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> tuple[Tensor | None, ...]:
        groups = len(ctx.matrices)
        gains, weights = ctx.saved_tensors[:groups], ctx.saved_tensors[groups:]
        rows = [len(weight) for weight in weights]
        d_stack = _gradient_stack(ctx.matrices, weights)
        d_gains = [
            _unfold(matrix.gradient, columns, gain, d_columns)
            for matrix, gain, columns, d_columns in zip(
                ctx.matrices,
                gains,
                _column_groups(weights, groups),
                d_stack.chunk(groups, dim=1),
                strict=True,
            )
        ]
        for matrix in ctx.matrices:
            matrix.gradient = None
        return None, *d_gains, *torch.split(d_stack, rows)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, _token: Tensor, matrix: _Matrix, outputs: slice) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.matrix, ctx.outputs = matrix, outputs
        return torch.mm(rows, matrix.value[outputs].mT)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (rows,) = ctx.saved_tensors
        value: Tensor = ctx.matrix.value
        d_rows = None
        if ctx.needs_input_grad[0]:
            d_rows = torch.mm(gradients[0], value[ctx.outputs])
        if ctx.needs_input_grad[1]:
            _add_gradient(ctx.matrix, ctx.outputs, gradients[0], rows)
        return d_rows, value.new_zeros((), dtype=torch.float32), None, None


def _column_groups(weights: Sequence[Tensor], groups: int) -> list[list[Tensor]]:
    """[group][weight], views."""
    return [list(group) for group in zip(*(w.chunk(groups, dim=1) for w in weights), strict=True)]


def _scaled(weights: list[Tensor], gain: Tensor | None, dtype: torch.dtype) -> Tensor:
    """The weights [., I] one below the other, times the gain, in one pass on a GPU."""
    if len(weights) == 1 and gain is None:
        return weights[0].to(dtype).contiguous()
    if not weights[0].is_cuda or weights[0].dtype != torch.float32:
        stacked = torch.cat(weights)
        return (stacked if gain is None else stacked * gain).to(dtype)
    value = weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1], dtype=dtype)
    for weight, part in zip(weights, torch.split(value, [len(w) for w in weights]), strict=True):
        if gain is None:
            part.copy_(weight)
        else:
            _kernels().fold(weight, gain, into=part)
    return value


def _add_gradient(matrix: _Matrix, outputs: slice, gradient: Tensor, rows: Tensor) -> None:
    """Add gradient.T @ rows, [n, O] and [n, I], to the matrix's gradient."""
    wide: dict[str, Any] = {}
    if gradient.is_cuda and gradient.dtype == torch.bfloat16:
        wide = {"out_dtype": torch.float32}
    if matrix.gradient is None and outputs == ALL:
        matrix.gradient = torch.mm(gradient.mT, rows, **wide)
        return
    if matrix.gradient is None:
        matrix.gradient = torch.zeros_like(matrix.value, dtype=wide.get("out_dtype", rows.dtype))
    part = matrix.gradient[outputs]
    torch.addmm(part, gradient.mT, rows, **wide, out=part)


def _gradient_stack(matrices: Sequence[_Matrix], weights: Sequence[Tensor]) -> Tensor:
    """Where the gradients of the stacked weights go: of a single matrix the memory of its own gradient."""
    only = matrices[0].gradient
    if len(matrices) == 1 and only is not None and only.dtype == weights[0].dtype:
        return only
    return weights[0].new_empty(sum(map(len, weights)), weights[0].shape[1])


def _unfold(
    d_value: Tensor | None, weights: list[Tensor], gain: Tensor | None, into: Tensor
) -> Tensor | None:
    """From the gradient of weights * gain: that of the weights goes `into`, that of the gain is returned."""
    if d_value is None:  # no product had a gradient
        into.zero_()
        return None if gain is None else torch.zeros_like(gain)
    if gain is None:
        if into.data_ptr() != d_value.data_ptr():
            into.copy_(d_value)
        return None
    if d_value.is_cuda and d_value.dtype == torch.float32:
        d_gain: Tensor = _kernels().unfold(d_value, weights, gain, into=into)
        return d_gain
    wide = d_value.to(gain.dtype)
    d_gain = torch.zeros_like(gain)
    for weight, part in zip(weights, torch.split(wide, [len(w) for w in weights]), strict=True):
        d_gain += (part * weight).sum(0)
    torch.mul(wide, gain, out=into)
    return d_gain


def _kernels() -> ModuleType:
    from tasks.eagle3.kernels import fold as kernels  # noqa: PLC0415 - Triton, which only a GPU needs

    return kernels
