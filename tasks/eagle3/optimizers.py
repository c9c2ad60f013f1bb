"""The optimizers of a draft, driven as one: AdamW alone, or Muon for the matrices and AdamW for the rest.

Whether a step is taken is decided where the gradients are: nothing here waits for a GPU.
"""

import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from tasks.eagle3.training_settings import TrainSettings

# speculators' own (train/trainer.py, 0.9.0); the adjustment gives Muon's updates the RMS of AdamW's (arXiv 2502.16982)
MUON_MOMENTUM = 0.95
MUON_NEWTON_SCHULZ_STEPS = 5
MUON_ADJUSTMENT = "match_rms_adamw"

BETA1 = 0.9
CLIP_EPS = 1e-6  # torch.nn.utils.clip_grad_norm_


class Optimizers:
    """All optimizers of the parameters; each parameter has one."""

    def __init__(self, parameters: Iterable[Parameter], settings: TrainSettings) -> None:
        self._parameters, self._settings = list(parameters), settings
        muon = [p for p in self._parameters if settings.optimizer == "muon" and is_matrix(p)]
        chosen = set(muon)
        self._muons = [_make_muon(p, settings) for p in muon]
        self._adamw = _make_adamw([p for p in self._parameters if p not in chosen], settings)
        self.state: defaultdict[Tensor, dict[str, Any]] = defaultdict(dict)
        """Moments of each parameter by name, whichever optimizer they belong to."""
        self.moments = 1 if self._muons else 2
        """Of the size of the weights, those of all parameters together."""
        self._all: list[torch.optim.Optimizer] = [*self._muons, self._adamw]
        for optimizer in self._all:
            optimizer.state = self.state

    def set_rates(self, step: int, total_steps: int) -> float:
        """Set every learning rate to that of optimizer step `step` (from 0); returns AdamW's."""
        for optimizer in self._all:
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(
                    step, total_steps, self._settings, peak=group["peak_lr"]
                )
        return learning_rate(step, total_steps, self._settings)

    @torch.no_grad()
    def step(self, loss: Tensor) -> Tensor:
        """Clip and step, unless loss or gradient is no finite number: then nothing changes.

        Returns the gradient's norm before clipping. Gradients are not kept as they were.
        """
        gradients = [p.grad for p in self._parameters if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        clip = (self._settings.max_grad_norm / (norm + CLIP_EPS)).clamp(max=1.0)
        skip = ~(torch.isfinite(loss) & torch.isfinite(norm))
        for muon in self._muons:
            self._step_muon(muon, clip=clip, skip=skip)
        # What a gradient scaler tells a fused optimizer: it divides the gradients and skips the step by itself.
        amp: Any = self._adamw
        amp.grad_scale, amp.found_inf = 1.0 / clip, skip.float()
        self._adamw.step()
        del amp.grad_scale, amp.found_inf
        return norm

    def zero_grad(self) -> None:
        """Let go of all gradients."""
        for parameter in self._parameters:
            parameter.grad = None

    def _step_muon(self, muon: torch.optim.Muon, *, clip: Tensor, skip: Tensor) -> None:
        """One matrix's step. Muon cannot skip by itself: what it changed is put back on the device.

        A matrix at a time, so that the copies of one are all the memory it takes.
        """
        (parameter,) = muon.param_groups[0]["params"]
        if parameter.grad is None:
            return
        parameter.grad.mul_(clip)
        moments = self.state[parameter]
        moments.setdefault("momentum_buffer", torch.zeros_like(parameter))
        changed = [parameter, moments["momentum_buffer"]]
        before = [tensor.clone() for tensor in changed]
        muon.step()  # type: ignore[no-untyped-call]
        for tensor, old in zip(changed, before, strict=True):
            torch.where(skip, old, tensor, out=tensor)


def is_matrix(parameter: Tensor) -> bool:
    """Tell whether Muon is for it, by speculators' rule; embeddings and heads, its exceptions, do not train here."""
    return parameter.dim() == 2 and min(parameter.shape) > 1


def warmup_steps(total_steps: int, settings: TrainSettings) -> int:
    """Return the number of steps over which the rate rises."""
    return math.ceil(settings.warmup_ratio * total_steps)


def learning_rate(
    step: int, total_steps: int, settings: TrainSettings, *, peak: float | None = None
) -> float:
    """Return the rate of optimizer step `step` (from 0): linear warm-up, then the schedule down to zero.

    `peak` is the highest rate, by default AdamW's.
    """
    peak = settings.lr if peak is None else peak
    warmup = warmup_steps(total_steps, settings)
    if step < warmup:
        return peak * (step + 1) / warmup
    done = (step - warmup) / max(1, total_steps - warmup)
    if settings.schedule == "constant":
        return peak
    if settings.schedule == "linear":
        return peak * (1 - done)
    return peak * 0.5 * (1 + math.cos(math.pi * done))


def _make_muon(parameter: Parameter, settings: TrainSettings) -> torch.optim.Muon:
    peak = settings.peak_muon_lr
    return torch.optim.Muon(
        [{"params": [parameter], "peak_lr": peak}],
        lr=peak,
        momentum=MUON_MOMENTUM,
        weight_decay=settings.muon_weight_decay,
        ns_steps=MUON_NEWTON_SCHULZ_STEPS,
        adjust_lr_fn=MUON_ADJUSTMENT,
    )


def _make_adamw(parameters: list[Parameter], settings: TrainSettings) -> torch.optim.AdamW:
    """AdamW whose weight decay leaves norms alone."""
    matrices = [p for p in parameters if p.dim() > 1]
    vectors = [p for p in parameters if p.dim() <= 1]
    decays = [(matrices, settings.weight_decay), (vectors, 0.0)]
    groups = [{"params": p, "weight_decay": d, "peak_lr": settings.lr} for p, d in decays]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=(BETA1, settings.beta2), fused=True)
