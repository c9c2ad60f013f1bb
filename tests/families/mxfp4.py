"""Experts packed to MXFP4 as gpt-oss is published: fp4 (e2m1) values, an exponent for each 32 of them."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families.checkpoints import WEIGHTS_FILE, rewrite_config

GROUP = 32
POSITIVE = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
VALUES = torch.tensor([*POSITIVE, *(-value for value in POSITIVE)])
"""The value of each nibble."""

QUANTIZATION: dict[str, Any] = {
    "quant_method": "mxfp4",
    "modules_to_not_convert": [
        "model.layers.*.self_attn", "model.layers.*.mlp.router", "model.embed_tokens", "lm_head",
    ],
}  # fmt: skip
"""As in gpt-oss's config."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[E, in, out], as the model has it -> nibbles [E, out, in / 32, 32] and exponents + 127 [E, out, in / 32]."""
    groups = weight.mT.unflatten(2, (-1, GROUP))
    exponent = (groups.abs().amax(dim=-1) / POSITIVE[-1]).log2().ceil()
    scaled = groups / exponent.exp2()[..., None]
    nibbles = (scaled[..., None] - VALUES).abs().argmin(dim=-1)
    return nibbles, (exponent + 127).to(torch.uint8)


def dequantize(nibbles: Tensor, scales: Tensor) -> Tensor:
    """What loading makes of them: [E, in, out]."""
    groups = VALUES[nibbles] * (scales.float() - 127).exp2()[..., None]
    return groups.flatten(2).mT.contiguous()


def round_experts(directory: Path) -> dict[str, Tensor]:
    """Replace the stored experts by what MXFP4 leaves of them, and return them packed."""
    packed: dict[str, Tensor] = {}
    tensors = load_file(directory / WEIGHTS_FILE)
    for key, weight in tensors.items():
        if key.endswith(("experts.gate_up_proj", "experts.down_proj")):
            nibbles, scales = quantize(weight)
            tensors[key] = dequantize(nibbles, scales)
            low, high = nibbles[..., 0::2], nibbles[..., 1::2]
            packed[f"{key}_blocks"] = (low | high << 4).to(torch.uint8)  # [E, out, in / 32, 16]
            packed[f"{key}_scales"] = scales
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    return packed


def store_packed(directory: Path, packed: dict[str, Tensor]) -> None:
    """Store the packed experts in place of the plain ones, and say so in the config."""
    plain = {key.removesuffix("_blocks") for key in packed}
    stored = load_file(directory / WEIGHTS_FILE)
    others = {key: tensor for key, tensor in stored.items() if key not in plain}
    save_file(others | packed, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    rewrite_config(directory, lambda config: config | {"quantization_config": QUANTIZATION})
