"""Checkpoints that are config and headers alone: the tensors' bytes are a hole in the file, all zeros."""

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

DTYPE_BYTES = {"F32": 4, "BF16": 2, "F16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "U8": 1}

Tensors = dict[str, tuple[str, tuple[int, ...]]]
"""Key -> dtype and shape."""

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 64,
    "num_hidden_layers": 8,
    "vocab_size": 96,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": 5,
    "tie_word_embeddings": False,
}

PLAIN: Tensors = {
    "model.embed_tokens.weight": ("BF16", (96, 64)),
    "model.norm.weight": ("BF16", (64,)),
    "lm_head.weight": ("BF16", (96, 64)),
}


PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "config_groups": {
        "group_0": {"weights": {"num_bits": 4, "type": "int", "group_size": 32}},
    },
}
FLOAT = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "type": "float", "group_size": None}}},
}


class Scheme(NamedTuple):
    """How one scheme states itself and stores a module of 96 outputs and 64 inputs."""

    stated: dict[str, Any]
    parts: Tensors
    words: str
    bytes: int


SCHEMES = {
    "int4 of compressed-tensors": Scheme(
        PACKED,
        {
            ".weight_packed": ("I32", (96, 8)),
            ".weight_scale": ("BF16", (96, 2)),
            ".weight_shape": ("I64", (2,)),
        },
        "compressed-tensors pack-quantized, 4 bits int, groups of 32",
        96 * 8 * 4 + 96 * 2 * 2 + 2 * 8,
    ),
    "fp8 of compressed-tensors": Scheme(
        FLOAT,
        {".weight": ("F8_E4M3", (96, 64)), ".weight_scale": ("BF16", (96, 1))},
        "compressed-tensors float-quantized, 8 bits float",
        96 * 64 + 96 * 2,
    ),
    "fp8 in blocks": Scheme(
        {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [128, 128]},
        {".weight": ("F8_E4M3", (96, 64)), ".weight_scale_inv": ("F32", (1, 1))},
        "fp8, blocks of 128 x 128",
        96 * 64 + 4,
    ),
    "gptq": Scheme(
        {"quant_method": "gptq", "bits": 4, "group_size": 32},
        {
            ".qweight": ("I32", (8, 96)),
            ".qzeros": ("I32", (2, 12)),
            ".scales": ("F16", (2, 96)),
            ".g_idx": ("I32", (64,)),
        },
        "gptq, 4 bits, groups of 32",
        8 * 96 * 4 + 2 * 12 * 4 + 2 * 96 * 2 + 64 * 4,
    ),
    "awq": Scheme(
        {"quant_method": "awq", "w_bit": 4, "q_group_size": 64},
        {
            ".qweight": ("I32", (64, 12)),
            ".qzeros": ("I32", (1, 12)),
            ".scales": ("F16", (1, 96)),
        },
        "awq, 4 bits, groups of 64",
        64 * 12 * 4 + 12 * 4 + 96 * 2,
    ),
    "bitsandbytes": Scheme(
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {".weight": ("U8", (3072, 1)), ".weight.absmax": ("F32", (96,))},
        "bitsandbytes",
        3072 + 96 * 4,
    ),
}


def quantized_module(name: str, scheme: Scheme) -> Tensors:
    return {f"{name}{part}": entry for part, entry in scheme.parts.items()}


def write_checkpoint(
    directory: Path,
    config: Mapping[str, Any] = CONFIG,
    tensors: Tensors = PLAIN,
    *,
    files: int = 1,
) -> Path:
    """Write config.json and weights, with an index when there are several files."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if files == 1:
        write_weights(directory / "model.safetensors", tensors)
        return directory
    places = {
        key: f"model-{i % files + 1:05d}-of-{files:05d}.safetensors"
        for i, key in enumerate(tensors)
    }
    for name in set(places.values()):
        write_weights(directory / name, {k: t for k, t in tensors.items() if places[k] == name})
    index = {"metadata": {}, "weight_map": places}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


def write_weights(path: Path, tensors: Tensors) -> int:
    """Write one safetensors file; returns the bytes before its data: the header's length and the header."""
    header, stop = {}, 0
    for key, (dtype, shape) in tensors.items():
        start, stop = stop, stop + DTYPE_BYTES[dtype] * math.prod(shape)
        header[key] = {"dtype": dtype, "shape": shape, "data_offsets": [start, stop]}
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)
    os.truncate(path, 8 + len(text) + stop)
    return 8 + len(text)
