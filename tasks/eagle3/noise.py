"""Noise on the captured states that a draft trains on: it then leans less on their last digits.

T = packed rows, A = captured layers, H = hidden size.
"""

import hashlib

import torch
from torch import Tensor


def add_noise(aux: Tensor, width: float, *, seed: int, epoch: int, batch: int) -> Tensor:
    """Return `aux` [T, A * H] + U(-width, width), in fp32: what is added would be lost in bf16.

    The noise is a function of the arguments and of the kind of device, and of no random state. Its form is that of
    speculators' AddUniformNoise (train/noise_transforms.py, until it was removed before 0.9).
    """
    generator = torch.Generator(aux.device).manual_seed(_seed(seed, epoch, batch))
    dtype = torch.promote_types(aux.dtype, torch.float32)
    noise = torch.rand(aux.shape, generator=generator, dtype=dtype, device=aux.device)
    return noise.sub_(0.5).mul_(2 * width).add_(aux)


def _seed(*parts: int) -> int:
    """63 bits of a digest: neighboring seeds, epochs and batches share nothing."""
    digest = hashlib.sha256(":".join(map(str, parts)).encode()).digest()
    return int.from_bytes(digest[:8], "big") >> 1
