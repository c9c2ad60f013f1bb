"""KL divergence of many steps against one target, and its gradient in the logits' own memory.

c = targets, K = TTT steps, D = draft vocabulary.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096
WARPS = 8
LOWEST = tl.constexpr(-1e30)
"""Stands beyond the vocabulary: below every logit, and finite, so that differences stay numbers."""


def kl_loss(
    logits: Tensor, targets: Tensor, factors: Tensor, *, softcap: float | None, gradient: bool
) -> tuple[Tensor, Tensor]:
    """KL(target || draft) times its factor [c, K] fp32, and whether both have the same most likely token [c, K].

    Afterwards, if `gradient`, `logits` [c * K, D] hold the gradient (q - p) * factor, exactly zero where the factor
    [c, K] is. `targets` [c, D] are capped by `softcap`.
    """
    count, steps = len(targets), len(logits) // len(targets)
    losses = torch.empty(count, steps, dtype=torch.float32, device=logits.device)
    matches = torch.empty(count, steps, dtype=torch.bool, device=logits.device)
    _kl_loss[(count, steps)](
        logits,
        targets,
        factors,
        losses,
        matches,
        targets.shape[1],
        softcap or 1.0,
        STEPS=steps,
        CAPPED=softcap is not None,
        GRADIENT=gradient,
        BLOCK=BLOCK,
        num_warps=WARPS,
    )
    return losses, matches


@triton.jit
def _load(row, at, width, cap, CAPPED: tl.constexpr):
    """A block of logits in fp32."""
    x = tl.load(row + at, mask=at < width, other=LOWEST).to(tl.float32)
    if CAPPED:
        # tanh by exp of a negative number; the padding is put back behind it
        shrink = tl.exp(-2.0 * tl.abs(x) / cap)
        capped = cap * (1.0 - shrink) / (1.0 + shrink)
        x = tl.where(at < width, tl.where(x < 0, -capped, capped), LOWEST)
    return x


@triton.jit
def _scan(row, width, cap, CAPPED: tl.constexpr, BLOCK: tl.constexpr):
    """Largest logit, its first index, and the log of the sum of exponentials."""
    top = tl.full((), LOWEST, tl.float32)
    total = tl.zeros((), tl.float32)
    best = tl.zeros((), tl.int32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = _load(row, at, width, cap, CAPPED)
        block_top = tl.max(x, 0)
        first = tl.min(tl.where(x == block_top, at, width), 0)
        best = tl.where(block_top > top, first, best)
        new_top = tl.maximum(top, block_top)
        total = total * tl.exp(top - new_top) + tl.sum(tl.exp(x - new_top), 0)
        top = new_top
    return top, best, top + tl.log(total)


@triton.jit
def _kl_loss(
    logits,
    targets,
    factors,
    losses,
    matches,
    width,
    cap,
    STEPS: tl.constexpr,
    CAPPED: tl.constexpr,
    GRADIENT: tl.constexpr,
    BLOCK: tl.constexpr,
):
    target = tl.program_id(0).to(tl.int64)
    step = tl.program_id(1)
    target_row = targets + target * width
    row = logits + (target * STEPS + step) * width
    _, target_best, target_norm = _scan(target_row, width, cap, CAPPED, BLOCK)
    _, best, norm = _scan(row, width, cap, False, BLOCK)
    factor = tl.load(factors + target * STEPS + step)
    loss = tl.zeros((), tl.float32)
    for start in range(0, width, BLOCK):
        at = start + tl.arange(0, BLOCK)
        inside = at < width
        log_p = _load(target_row, at, width, cap, CAPPED) - target_norm
        log_q = _load(row, at, width, cap, False) - norm
        p = tl.exp(log_p)
        # differences of logarithms: they are small where draft and verifier agree
        loss += tl.sum(tl.where(inside, p * (log_p - log_q), 0.0), 0)
        if GRADIENT:
            # a score that counts nowhere may be anything; 0 * inf would not vanish
            d = tl.where(factor == 0.0, 0.0, (tl.exp(log_q) - p) * factor)
            tl.store(row + at, d.to(logits.dtype.element_ty), mask=inside)
    tl.store(losses + target * STEPS + step, tl.where(factor == 0.0, 0.0, loss * factor))
    tl.store(matches + target * STEPS + step, best == target_best)
