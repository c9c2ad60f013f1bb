"""The loss of all TTT steps and its gradient in one pass, a few targets at a time.

Teacher forcing makes every step's hidden states known before any logits are: so a chunk of targets
meets all steps at once, its probabilities are made once, and no [T, D] tensor ever exists. The
heads are frozen, hence the gradient with respect to the hidden states is all that is kept.

T = packed rows, U = target rows, K = TTT steps, R = rows of all steps one after the other,
c = targets of a chunk, D = draft vocabulary, H = hidden size.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.eagle3.head import softcapped_
from tasks.eagle3.head_transform import HeadTransform

CHUNK_BYTES_CPU = 8 << 20
"""Bytes of one chunk's logits: the elementwise work then stays in a CPU's last-level cache."""

CHUNK_BYTES_GPU = 512 << 20

# speculators adds this to the count of supervised rows (losses/utils.py, 0.9.0).
REDUCTION_EPS = 1e-5


@dataclass(frozen=True)
class LossInputs:
    """What the loss needs besides the draft's hidden states; none of it has a gradient."""

    head: Tensor  # [D, H], the draft's frozen head, in the dtype of the products
    target_head: Tensor  # [D, H], the verifier's head at the draft's tokens, same dtype
    target_states: Tensor  # [U, H], the verifier's normed last states, same dtype
    scored: Tensor  # [U, K] index into the R rows; R where there is none
    factors: Tensor  # [U, K] what a score counts: decay ** k / (supervised rows + 1e-5), or 0
    transform: HeadTransform  # of the verifier; its scale is in both heads already
    loss_function: Callable[[Tensor, Tensor], Tensor] | None  # None = KL(target || draft), fused


def ttt_loss(hidden: Tensor, *, inputs: LossInputs) -> tuple[Tensor, Tensor, Tensor]:
    """Loss of all steps from `hidden` [R, H], the rows that the head reads.

    Returns the total (a scalar with gradient), the steps' losses [K] (without), and whether draft
    and verifier have the same most likely token [U, K] bool.
    """
    wants_gradient = hidden.requires_grad and torch.is_grad_enabled()
    result: tuple[Tensor, Tensor, Tensor] = _Loss.apply(hidden, inputs, wants_gradient)
    return result


@dataclass(frozen=True)
class _Chunk:
    """Some targets and all that is scored against them."""

    hidden: Tensor  # [c * K, H]
    target_states: Tensor  # [c, H]
    factors: Tensor  # [c, K]


_Scores = tuple[Tensor, Tensor, Tensor]
"""Of one chunk, factors counted in: losses [c, K], gradients [c * K, H]; between them the matches [c, K]."""


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, inputs: LossInputs, wants_gradient: bool
    ) -> tuple[Tensor, Tensor, Tensor]:
        dtype = torch.promote_types(hidden.dtype, torch.float32)
        # One more row for the scores that do not exist: read as zeros, written and dropped.
        padded = torch.cat([hidden, hidden.new_zeros(1, hidden.shape[1])]).to(inputs.head.dtype)
        buffers = _Buffers(inputs, dtype)
        gradient = torch.zeros_like(padded, dtype=padded.dtype if buffers.fused else dtype)
        losses = torch.empty_like(inputs.factors, dtype=dtype)
        matches = torch.empty_like(inputs.factors, dtype=torch.bool)
        for start in range(0, len(losses), buffers.targets):
            part = slice(start, start + buffers.targets)
            rows = inputs.scored[part].flatten()  # [c * K]
            chunk = _Chunk(padded[rows], inputs.target_states[part], inputs.factors[part].to(dtype))
            score = _fused_scores if buffers.fused else _scores
            losses[part], matches[part], d_rows = score(chunk, inputs, buffers, wants_gradient)
            if wants_gradient:
                gradient[rows] = d_rows
        step_losses = losses.sum(0)  # [K]
        ctx.save_for_backward(gradient[:-1])
        ctx.mark_non_differentiable(step_losses, matches)
        ctx.hidden_dtype = hidden.dtype
        return step_losses.sum(), step_losses.clone(), matches

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None, None]:
        (gradient,) = ctx.saved_tensors
        return (gradient * gradients[0]).to(ctx.hidden_dtype), None, None


class _Buffers:
    """Memory that all chunks share: fresh pages would cost more than the arithmetic."""

    def __init__(self, inputs: LossInputs, dtype: torch.dtype) -> None:
        device, narrow = inputs.head.device, inputs.head.dtype
        vocabulary, steps = len(inputs.head), inputs.scored.shape[1]
        budget = CHUNK_BYTES_CPU if device.type == "cpu" else CHUNK_BYTES_GPU
        self.targets = max(1, min(budget // (steps * vocabulary * 4), len(inputs.scored)))
        rows = self.targets * steps
        # One kernel does it all in the products' own memory: what is below is not needed.
        self.fused = device.type == "cuda" and inputs.loss_function is None
        if self.fused:
            self.logits = torch.empty(rows, vocabulary, dtype=narrow, device=device)
            self.target_logits = torch.empty_like(self.logits[: self.targets])
            return
        self.logits = torch.empty(rows, vocabulary, dtype=dtype, device=device)
        self.work = torch.empty_like(self.logits)
        self.target_logits = torch.empty_like(self.logits[: self.targets])
        self.probabilities = torch.empty_like(self.target_logits)
        self.narrow = torch.empty_like(self.logits, dtype=narrow) if narrow != dtype else None


def _scores(chunk: _Chunk, inputs: LossInputs, buffers: _Buffers, gradient: bool) -> _Scores:
    narrow = buffers.narrow
    target_logits = buffers.target_logits
    targets = _logits(chunk.target_states, inputs.target_head, target_logits, narrow)  # [c, D]
    softcapped_(targets, inputs.transform)
    logits = _logits(chunk.hidden, inputs.head, buffers.logits, narrow)  # [c * K, D]
    if inputs.loss_function is None:
        loss, matches, d_logits = _kl_loss(logits, targets, buffers)
    else:
        loss, matches, d_logits = _autograd_loss(logits, targets, inputs.loss_function, gradient)
    # A score that counts nowhere may be anything; 0 * inf would not vanish.
    loss = loss.masked_fill_(chunk.factors == 0, 0.0).mul_(chunk.factors)
    if not gradient:
        return loss, matches, chunk.hidden
    if narrow is not None:
        d_logits = narrow[: len(d_logits)].copy_(d_logits)
    d_rows = (d_logits @ inputs.head).to(chunk.factors.dtype)
    return loss, matches, d_rows.mul_(chunk.factors.view(-1, 1))


def _fused_scores(chunk: _Chunk, inputs: LossInputs, buffers: _Buffers, gradient: bool) -> _Scores:
    """The same on a GPU: logits in the products' dtype, their gradient in their own place."""
    from tasks.eagle3.kernels.loss import kl_loss  # noqa: PLC0415 - Triton, which only a GPU needs

    target_logits = buffers.target_logits[: len(chunk.target_states)]
    targets = torch.mm(chunk.target_states, inputs.target_head.mT, out=target_logits)
    logits = torch.mm(chunk.hidden, inputs.head.mT, out=buffers.logits[: len(chunk.hidden)])
    cap = inputs.transform.logit_softcap
    loss, matches = kl_loss(logits, targets, chunk.factors, softcap=cap, gradient=gradient)
    return loss, matches, logits @ inputs.head if gradient else chunk.hidden


def _kl_loss(logits: Tensor, targets: Tensor, buffers: _Buffers) -> tuple[Tensor, Tensor, Tensor]:
    """KL(p || q) = p . (log p - log q), whose gradient is q - p; in the buffers' memory."""
    count = len(targets)
    by_step = logits.view(count, -1, logits.shape[-1])  # [c, K, D]
    work = buffers.work[: len(logits)]
    probabilities = torch.softmax(targets, -1, out=buffers.probabilities[:count])  # [c, D]
    # Differences of logits first: they are small where draft and verifier agree.
    work_by_step = work.view_as(by_step)
    torch.sub(targets[:, None], by_step, out=work_by_step)
    loss = work_by_step.mul_(probabilities[:, None]).sum(-1)  # [c, K]
    best, target_best = _argmax(logits), _argmax(targets)  # [c * K, 1], [c, 1]
    d_logits = torch.softmax(logits, -1, out=work)
    loss += _normalizer(logits, d_logits, best).view(count, -1)
    loss -= _normalizer(targets, probabilities, target_best)
    work_by_step.sub_(probabilities[:, None])
    return loss, best.view(count, -1) == target_best, d_logits


def _autograd_loss(
    logits: Tensor, targets: Tensor, function: Callable[[Tensor, Tensor], Tensor], gradient: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Any other loss, by the function itself and its own gradient."""
    count = len(targets)
    matches = _argmax(logits).view(count, -1) == _argmax(targets)
    with torch.set_grad_enabled(gradient):
        leaf = logits.detach().requires_grad_(gradient)
        spread = targets.repeat_interleave(len(logits) // count, dim=0)  # [c * K, D]
        loss = function(leaf[None], spread[None])[0]  # [c * K]
        d_logits = torch.autograd.grad(loss.sum(), leaf)[0] if gradient else logits
    return loss.detach().to(logits.dtype).view(count, -1), matches, d_logits


def _logits(states: Tensor, head: Tensor, out: Tensor, narrow: Tensor | None) -> Tensor:
    """states @ head.T in `out`'s dtype; `narrow` holds the product where that is another."""
    wide = out[: len(states)]
    if narrow is None:
        return torch.mm(states, head.mT, out=wide)
    return wide.copy_(torch.mm(states, head.mT, out=narrow[: len(states)]))


def _normalizer(logits: Tensor, probabilities: Tensor, best: Tensor) -> Tensor:
    """log sum exp(logits) from a softmax that is there already: logit - log p at the top token."""
    return logits.gather(-1, best) - probabilities.gather(-1, best).log_()


def _argmax(logits: Tensor) -> Tensor:
    """First index of the largest value of each row, [.., 1]: by blocks, whose maxima vectorize.

    torch's own argmax takes 10x the time of its amax on a CPU.
    """
    rows, columns = logits.shape
    block = min(columns & -columns, 128)  # the largest power of two that divides the row
    if block < 8:
        return logits.argmax(-1, keepdim=True)
    blocks = logits.view(rows, -1, block)
    first = blocks.amax(-1).argmax(-1)  # [rows]
    inside = blocks[torch.arange(rows, device=logits.device), first].argmax(-1)
    return (first * block + inside)[:, None]
