"""Experts packed to INT4 as compressed-tensors stores them ("pack-quantized", symmetric, groups of 32)."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families.checkpoints import WEIGHTS_FILE, rewrite_config

GROUP = 32
NIBBLES = 8  # of an int32

QUANTIZATION: dict[str, Any] = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*",
               "re:.*mlp\\.(gate|up|gate_up|down)_proj.*"],
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "input_activations": None,
            "output_activations": None,
            "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP,
                        "symmetric": True, "dynamic": False},
        },
    },
}  # fmt: skip
"""As in Kimi-K2.5's text_config."""


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """[out, in] -> integers [out, in] in [-8, 7] and bf16 scales [out, in / GROUP]."""
    groups = weight.unflatten(1, (-1, GROUP))
    scale = (groups.abs().amax(dim=-1) / 7.5).to(torch.bfloat16)
    whole = (groups / scale.float()[..., None]).round().clamp(-8, 7)
    return whole.flatten(1), scale


def dequantize(whole: Tensor, scale: Tensor) -> Tensor:
    """What loading makes of them, in the scales' own bf16: [out, in]."""
    return (whole.unflatten(1, (-1, GROUP)).to(scale.dtype) * scale[..., None]).flatten(1)


def pack(whole: Tensor) -> Tensor:
    """Integers [out, in] -> int32 [out, in / 8]: value + 8 in each nibble, the first in the lowest."""
    nibbles = (whole + 8).long().unflatten(1, (-1, NIBBLES))
    packed = (nibbles << (4 * torch.arange(NIBBLES))).sum(dim=-1)
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def round_experts(directory: Path) -> dict[str, Tensor]:
    """Replace the stored experts by what INT4 leaves of them, and return them packed."""
    packed: dict[str, Tensor] = {}
    tensors = load_file(directory / WEIGHTS_FILE)
    for key, weight in tensors.items():
        if ".experts." in key:
            whole, scale = quantize(weight)
            tensors[key] = dequantize(whole, scale).float()
            packed[f"{key}_packed"] = pack(whole)
            packed[f"{key}_scale"] = scale
            packed[f"{key}_shape"] = torch.tensor(weight.shape)
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    return packed


def store_packed(directory: Path, packed: dict[str, Tensor]) -> None:
    """Store the packed experts in place of the plain ones, and say so in the config."""
    stored = load_file(directory / WEIGHTS_FILE)
    others = {key: tensor for key, tensor in stored.items() if ".experts." not in key}
    save_file(others | packed, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    rewrite_config(directory, lambda config: config | {"quantization_config": QUANTIZATION})
