"""Tiny checkpoints in the layouts that families are published in, with weights that let no fault hide.

Every layer moves the residual stream as much as the embedding did; norms scale by U(0.5, 2), whether they
multiply by w or by 1 + w; biases, sinks and routers' corrections are drawn too: what is lost on the way
changes the text.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel

from tests.tiny_models import EOS_ID, VOCAB_SIZE, make_tokenizer

LAYERS = 6
HIDDEN = 64
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE, "hidden_size": HIDDEN, "intermediate_size": 96,
    "num_hidden_layers": LAYERS, "num_attention_heads": 4, "num_key_value_heads": 2,
    "max_position_embeddings": 512, "bos_token_id": 1, "eos_token_id": EOS_ID, "pad_token_id": EOS_ID,
}  # fmt: skip
"""What nearly all configs share; a head has 16 dimensions."""

WINDOW = 6
"""A window or chunk that is shorter than any text of the tests."""

SHARPENED = (
    "q_proj.weight",
    "q_b_proj.weight",
    "k_proj.weight",
    "qkv_proj.weight",
    "o_proj.weight",
)
"""Weights drawn larger: attention that chooses, and is heard. Else greedy texts turn in small circles."""

WEIGHTS_FILE = "model.safetensors"


def save_checkpoint(
    model: PreTrainedModel, directory: Path, *, one_plus_norms: bool = False
) -> PreTrainedModel:
    """Draw the model's weights and write it with tokenizer and generation config; return it, ready to run."""
    draw_weights(model, one_plus_norms=one_plus_norms)
    model.generation_config.eos_token_id = EOS_ID
    model.save_pretrained(directory)
    make_tokenizer().save_pretrained(directory)
    return model.eval()


@torch.no_grad()
def draw_weights(model: nn.Module, *, one_plus_norms: bool = False) -> None:
    """Draw every parameter and the routers' corrections in the order of their names."""
    generator = torch.Generator().manual_seed(0)
    low = -0.5 if one_plus_norms else 0.5
    tied = model.config.tie_word_embeddings
    corrections = [(n, b) for n, b in model.named_buffers() if "correction" in n]
    for name, weight in sorted([*model.named_parameters(), *corrections]):
        if name.endswith("norm.weight") or ".norm" in name:
            weight.uniform_(low, low + 1.5, generator=generator)
        elif weight.dim() == 1 or "bias" in name:
            weight.normal_(0.0, 0.3, generator=generator)
        else:
            weight.normal_(0.0, weight.shape[-1] ** -0.5, generator=generator)
        if name.endswith(SHARPENED):
            weight.mul_(2.0)
        if name.endswith("embed_tokens.weight") and not tied:
            weight.mul_(weight.shape[-1] ** 0.5)


def rewrite_weights(directory: Path, rename: Callable[[str], str], **others: Tensor) -> None:
    """Rename the stored tensors and put others beside them, as a published checkpoint has them."""
    stored = load_file(directory / WEIGHTS_FILE)
    renamed = {rename(key): tensor for key, tensor in stored.items()}
    save_file(renamed | others, directory / WEIGHTS_FILE, metadata={"format": "pt"})


def rewrite_config(directory: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Replace config.json by what `change` makes of it."""
    path = directory / "config.json"
    path.write_text(json.dumps(change(json.loads(path.read_text())), indent=1))


def nest_config(directory: Path, top: dict[str, Any], **text: Any) -> None:
    """Put the config under text_config of `top`; `text` is changed in it."""
    rewrite_config(directory, lambda config: top | {"text_config": config | text})
