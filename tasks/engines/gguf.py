"""Converts a Llama GGUF file into a model directory that everything else can load.

transformers loads such a file but refuses to save what it loaded. Weights are written in fp32: the
dequantized values are products of an fp16 scale and a small integer plus an fp16 minimum, and 42 % of
SmolLM2's are no fp16 numbers (79 % no bf16 ones), so a smaller dtype would be another model.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from tasks.engines.gguf_file import GgufError, GgufFile, read_gguf

__all__ = ["GgufError", "convert_gguf"]

CONTROL_TOKEN, USER_DEFINED_TOKEN = 3, 4  # tokenizer.ggml.token_type

# GGUF tensor name -> transformers' Llama name
TOP_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}

Array = np.ndarray[Any, np.dtype[np.float32]]


def convert_gguf(gguf_path: Path, directory: Path) -> None:
    """Write config, safetensors, tokenizer, chat template and generation config into `directory`.

    Equal files give equal bytes. Raises GgufError for anything but a plain Llama with a byte-level BPE
    tokenizer: other architectures, scaled rope, experts, a vocabulary split in an unknown way.
    """
    gguf = read_gguf(gguf_path)
    config = _llama_config(gguf)
    tokenizer = _tokenizer(gguf)
    names = {name: _llama_name(name, gguf.path) for name in gguf.tensors}
    directory.mkdir(parents=True, exist_ok=True)
    heads = {
        "attn_q": config["num_attention_heads"],
        "attn_k": config["num_key_value_heads"],
    }
    tensors = {}
    for name, llama_name in names.items():
        part = name.split(".")[-2]
        tensor = gguf.read(name)
        tensors[llama_name] = _halves(tensor, heads[part]) if part in heads else tensor
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    _write_json(directory / "config.json", config)
    ends = {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    _write_json(directory / "generation_config.json", {"do_sample": False, **ends})
    tokenizer.save_pretrained(directory)


def _llama_config(gguf: GgufFile) -> dict[str, Any]:
    architecture = gguf.metadata.get("general.architecture")
    if architecture != "llama":
        raise GgufError(
            f"{gguf.path} holds a model of architecture {architecture!r}; only llama is converted: "
            "use its safetensors checkpoint"
        )
    scaled = [key for key in gguf.metadata if ".rope.scaling." in key]
    experts = _number(gguf, "llama.expert_count", int, default=0)
    if scaled or experts:
        raise GgufError(
            f"{gguf.path} has {'scaled rope (' + scaled[0] + ')' if scaled else f'{experts} experts'}, "
            "which is not converted: use the model's safetensors checkpoint"
        )
    hidden = _number(gguf, "llama.embedding_length", int)
    heads = _number(gguf, "llama.attention.head_count", int)
    head_dim = _number(gguf, "llama.attention.key_length", int, default=hidden // heads)
    if _number(gguf, "llama.rope.dimension_count", int, default=head_dim) != head_dim:
        raise GgufError(f"{gguf.path} rotates a part of each head, which is not converted")
    eos = _number(gguf, "tokenizer.ggml.eos_token_id", int)
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "attention_bias": False,
        "bos_token_id": _number(gguf, "tokenizer.ggml.bos_token_id", int, default=eos),
        "dtype": "float32",
        "eos_token_id": eos,
        "head_dim": head_dim,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "intermediate_size": _number(gguf, "llama.feed_forward_length", int),
        "max_position_embeddings": _number(gguf, "llama.context_length", int),
        "mlp_bias": False,
        "num_attention_heads": heads,
        "num_hidden_layers": _number(gguf, "llama.block_count", int),
        "num_key_value_heads": _number(gguf, "llama.attention.head_count_kv", int, default=heads),
        "pad_token_id": _number(gguf, "tokenizer.ggml.padding_token_id", int, default=eos),
        "rms_norm_eps": _number(gguf, "llama.attention.layer_norm_rms_epsilon", float),
        "rope_parameters": {
            "rope_theta": _number(gguf, "llama.rope.freq_base", float, default=10_000.0),
            "rope_type": "default",
        },
        "tie_word_embeddings": "output.weight" not in gguf.tensors,
        "vocab_size": gguf.tensors["token_embd.weight"].shape[0],
    }


def _number(gguf: GgufFile, key: str, kind: Callable[[str], Any], default: Any = None) -> Any:
    value = gguf.metadata.get(key, default)
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise GgufError(f"{gguf.path}: metadata {key} is {value!r}, expected a number")
    # A float of the file is an fp32: 1e-5 and not 9.999999747378752e-06.
    return kind(str(np.float32(value)) if kind is float else str(value))


def _llama_name(name: str, path: Path) -> str:
    layer = re.fullmatch(r"blk\.(\d+)\.(\w+)\.weight", name)
    if layer is not None and layer[2] in LAYER_NAMES:
        return f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}.weight"
    if name not in TOP_NAMES:
        raise GgufError(f"{path} has a tensor {name}, which a plain Llama does not have")
    return TOP_NAMES[name]


def _halves(weight: Array, heads: int) -> Array:
    """Put the rows of each head from pairs (ggml's rope) back into halves (transformers' rope)."""
    rows, columns = weight.shape
    pairs = weight.reshape(heads, rows // heads // 2, 2, columns)
    return np.ascontiguousarray(pairs.swapaxes(1, 2)).reshape(rows, columns)


def _tokenizer(gguf: GgufFile) -> Any:
    """Build the byte-level BPE tokenizer with its specials and chat template."""
    from tokenizers import AddedToken, Tokenizer, decoders, models  # noqa: PLC0415 - see below
    from transformers import PreTrainedTokenizerFast  # noqa: PLC0415 - seconds; after refusals

    kind = gguf.metadata.get("tokenizer.ggml.model")
    if kind != "gpt2":
        raise GgufError(
            f"{gguf.path} has a tokenizer of type {kind!r}; only byte-level BPE (gpt2) is converted"
        )
    tokens: list[str] = gguf.metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in gguf.metadata["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={t: i for i, t in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = _pre_tokenizer(gguf)
    backend.decoder = decoders.ByteLevel()
    token_types = gguf.metadata.get("tokenizer.ggml.token_type", [])
    for token, token_type in zip(tokens, token_types, strict=bool(token_types)):
        if token_type in (CONTROL_TOKEN, USER_DEFINED_TOKEN):
            special = token_type == CONTROL_TOKEN
            backend.add_tokens([AddedToken(token, special=special, normalized=False)])
    named = {
        f"{ours}_token": tokens[gguf.metadata[f"tokenizer.ggml.{theirs}_token_id"]]
        for ours, theirs in (("bos", "bos"), ("eos", "eos"), ("unk", "unknown"), ("pad", "padding"))
        if f"tokenizer.ggml.{theirs}_token_id" in gguf.metadata
    }
    make_tokenizer: Any = PreTrainedTokenizerFast
    return make_tokenizer(
        tokenizer_object=backend,
        chat_template=gguf.metadata.get("tokenizer.chat_template"),
        clean_up_tokenization_spaces=False,
        model_max_length=_number(gguf, "llama.context_length", int),
        **named,
    )


def _pre_tokenizer(gguf: GgufFile) -> Any:
    from tokenizers import pre_tokenizers  # noqa: PLC0415

    name = gguf.metadata.get("tokenizer.ggml.pre", "default")
    plain = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    if name in ("gpt-2", "default"):
        return plain
    # Every digit alone, before anything else: "\n\n1" is "\n\n" and "1". transformers' own reading of the
    # file leaves this out and splits "\n\n" before a digit, which SmolLM2 finds less likely by 7 %.
    if name == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), plain])
    raise GgufError(
        f"{gguf.path} splits text by the rule {name!r}; only gpt-2 and smollm are converted: "
        "use the model's safetensors checkpoint"
    )


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2, sort_keys=True) + "\n")
