"""Weights in fp8 as DeepSeek-V3 is published: e4m3 values, a scale for each block of 128 x 128."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from tests.families.checkpoints import WEIGHTS_FILE, rewrite_config

LARGEST = 448.0  # of e4m3
PLAIN = ("embed_tokens.weight", "lm_head.weight", "norm.weight", "gate.weight", "correction_bias")
"""What is stored as it is: no linear layers, the head, the router."""

QUANTIZATION: dict[str, Any] = {
    "quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "weight_block_size": [128, 128],
}  # fmt: skip
"""As in DeepSeek-V3's config."""


def round_weights(directory: Path) -> dict[str, Tensor]:
    """Replace the stored weights by what fp8 leaves of them, and return them as they are published.

    Each is smaller than a block, so it has one scale.
    """
    published: dict[str, Tensor] = {}
    tensors = load_file(directory / WEIGHTS_FILE)
    for key, weight in tensors.items():
        if not key.endswith(PLAIN):
            scale = weight.abs().max() / LARGEST
            published[key] = (weight / scale).to(torch.float8_e4m3fn)
            published[f"{key}_scale_inv"] = scale.reshape(1, 1)
            tensors[key] = published[key].float() * scale
    save_file(tensors, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    return published


def store_published(directory: Path, published: dict[str, Tensor]) -> None:
    """Store the weights as they are published, and say so in the config."""
    stored = load_file(directory / WEIGHTS_FILE)
    save_file(stored | published, directory / WEIGHTS_FILE, metadata={"format": "pt"})
    rewrite_config(directory, lambda config: config | {"quantization_config": QUANTIZATION})
