"""The config of the draft's decoder layers, as plain values: derived from the verifier's, or read from a file.

Free of torch and transformers: the flow's process checks a draft before anything runs.
"""

import difflib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tasks.eagle3.draft_rope import draft_rope
from tasks.eagle3.draft_settings import DraftSettings
from tasks.eagle3.verifier_config import norm_eps

LayerConfig = dict[str, Any]
"""Values of a LlamaConfig or Qwen3Config; `model_type` says which."""

NORM_OPTIONS = ("norm_before_fc", "fc_norm", "norm_output", "norm_before_residual")
"""What a speculators config.json says of a draft's norms beside its layers; draft settings of the same names."""

LAYER_TYPES = ("llama", "qwen3")
"""Decoder layers that EAGLE-3 drafts can have in speculators 0.9 and in vLLM 0.32."""

ACTIVATION = "silu"
"""The one activation of vLLM's llama and qwen3 layers (0.32), whatever the verifier's is."""

_COUNTS = (
    "hidden_size", "vocab_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
    "max_position_embeddings",
)  # fmt: skip

# What neither the training step nor vLLM's draft applies, with the value that means "none".
_NEUTRAL: dict[str, Any] = {
    "attention_bias": False,
    "mlp_bias": False,
    "attention_dropout": 0,
    "tie_word_embeddings": False,
    "use_sliding_window": False,
    "partial_rotary_factor": 1,
    "quantization_config": None,
}

# All that is read here, and the token ids that may stand beside it: what is written almost like one of these is a slip.
_NAMES = frozenset(
    {
        *_COUNTS,
        *_NEUTRAL,
        "model_type", "num_key_value_heads", "head_dim", "hidden_act", "rms_norm_eps", "initializer_range",
        "rope_parameters", "rope_scaling", "rope_theta", "sliding_window", "layer_types",
        "bos_token_id", "eos_token_id", "pad_token_id",
    }
)  # fmt: skip

# Multi-head latent attention: `head_dim` there is the rope part of a head, not a head.
_LATENT_ATTENTION_KEYS = ("kv_lora_rank", "qk_rope_head_dim")


def derived_layer(text_config: dict[str, Any], settings: DraftSettings) -> LayerConfig:
    """Return a layer with the verifier's widths, norms and rope, but not its depth.

    `text_config` is the verifier's (the one with `hidden_size`), as in its config.json.
    Raises ValueError when its widths contradict each other or its rope fits no draft.
    """
    widths = _attention_widths(text_config)
    dense = settings.intermediate_size or text_config.get("intermediate_size")
    layer = {
        "model_type": settings.arch,
        "num_hidden_layers": settings.num_layers,
        "intermediate_size": int(dense or 3 * widths["hidden_size"]),
        "rope_parameters": draft_rope(text_config, head_dim=widths["head_dim"]),
        **widths,
        **_common(text_config, text_config),
    }
    _check_numbers(layer)
    return layer


def read_layer(
    path: Path,
    text_config: dict[str, Any],
    settings: DraftSettings,
    *,
    named_by: str = "draft.config",
) -> LayerConfig:
    """Return the layer that the JSON file describes, checked against the verifier's `text_config`.

    The file is a LlamaConfig's or Qwen3Config's, or the config.json of a speculators checkpoint, whose
    `transformer_layer_config` is taken. Raises ValueError, naming the file and the setting that named it, for what
    is missing, what contradicts the verifier, and what drafts do not have.
    """
    try:
        values = _layer_values(_read_object(path), settings)
        _check_spelling(values)
        _check_sizes(values, text_config)
        _check_features(values)
        widths = _attention_widths(values)
        layer = {
            "model_type": values["model_type"],
            "num_hidden_layers": values["num_hidden_layers"],
            "intermediate_size": values["intermediate_size"],
            "rope_parameters": draft_rope(values, head_dim=widths["head_dim"]),
            **widths,
            **_common(values, text_config),
        }
        _check_numbers(layer)
        _check_positions(layer, text_config)
    except ValueError as error:
        raise ValueError(f"{named_by} {path}: {error}") from error
    return layer


def check_readable(path: Path, *, named_by: str) -> None:
    """Raise ValueError when the file is no JSON object."""
    try:
        _read_object(path)
    except ValueError as error:
        raise ValueError(f"{named_by} {path}: {error}") from error


def _common(values: Mapping[str, Any], text_config: dict[str, Any]) -> dict[str, Any]:
    return {
        "vocab_size": int(values["vocab_size"]),
        "hidden_act": ACTIVATION,
        "max_position_embeddings": int(values["max_position_embeddings"]),
        "rms_norm_eps": norm_eps(text_config),
        "initializer_range": float(values.get("initializer_range") or 0.02),
        "bos_token_id": text_config.get("bos_token_id"),
        "eos_token_id": text_config.get("eos_token_id"),
    }


def _check_numbers(layer: LayerConfig) -> None:
    """Raise ValueError for numbers that no layer can be built or trained with."""
    rope, hidden = layer["rope_parameters"], layer["hidden_size"]
    bounds = {
        "intermediate_size": (layer["intermediate_size"], 1, 64 * hidden),
        "num_attention_heads * head_dim": (
            layer["num_attention_heads"] * layer["head_dim"], 2, 16 * hidden
        ),
        "initializer_range": (layer["initializer_range"], 1e-6, 1.0),
        "rope_theta": (rope.get("rope_theta", 1e4), 1.0, 1e12),
        "rope factor": (rope.get("factor", 1.0), 1.0, 1e6),
    }  # fmt: skip
    for name, (value, least, most) in bounds.items():
        number = isinstance(value, int | float) and not isinstance(value, bool)
        if not number or not least <= value <= most:
            raise ValueError(
                f"{name} is {value!r}, which no draft can have: it must lie between {least:g} and {most:g}"
            )


def _attention_widths(config: Mapping[str, Any]) -> dict[str, int]:
    for field in ("hidden_size", "num_attention_heads"):
        if not config.get(field):
            raise ValueError(f"the config names no {field}; write the model's number into it")
    hidden, heads = int(config["hidden_size"]), int(config["num_attention_heads"])
    kv_heads = int(config.get("num_key_value_heads") or heads)
    latent = any(config.get(key) for key in _LATENT_ATTENTION_KEYS)
    head_dim = None if latent else config.get("head_dim")
    if head_dim is None and hidden % heads:
        raise ValueError(
            f"hidden_size {hidden} is not a multiple of num_attention_heads {heads} and no head_dim is "
            "named; a draft needs one of the two: give a draft.config with a head_dim"
        )
    if heads % kv_heads:
        raise ValueError(
            f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}; "
            "correct the one that is wrong"
        )
    width = int(head_dim or hidden // heads)
    if width % 2:
        raise ValueError(
            f"head_dim {width} is odd, but rotary positions turn pairs of channels; "
            "give a draft.config with an even head_dim"
        )
    return {
        "hidden_size": hidden,
        "num_attention_heads": heads,
        "num_key_value_heads": kv_heads,
        "head_dim": width,
    }


def _read_object(path: Path) -> dict[str, Any]:
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{error.strerror or error}; correct the path") from error
    except ValueError as error:  # no UTF-8, no JSON
        raise ValueError(
            f"it is no JSON ({error}); write the draft's layer config there"
        ) from error
    if not isinstance(values, dict):
        raise ValueError(f"it holds a {type(values).__name__}, not an object of config values")
    return values


def _layer_values(values: dict[str, Any], settings: DraftSettings) -> dict[str, Any]:
    """Take the layer out of a speculators config.json, whose norms must be those of the settings."""
    layer = values.get("transformer_layer_config")
    if layer is None:
        return values
    if not isinstance(layer, dict):
        raise ValueError(f"transformer_layer_config is {layer!r}, not an object of config values")
    for norm in NORM_OPTIONS:
        wanted = getattr(settings, norm)
        if values.get(norm, wanted) != wanted:
            raise ValueError(
                f"{norm} is {values[norm]}, the setting draft.{norm} is {wanted}; make them equal"
            )
    return layer


def _check_spelling(values: Mapping[str, Any]) -> None:
    for name in values:
        nearest = difflib.get_close_matches(name, _NAMES, n=1, cutoff=0.8)
        if name not in _NAMES and nearest:
            raise ValueError(f"{name} means nothing to a draft; write {nearest[0]}, or remove it")


def _check_sizes(values: Mapping[str, Any], text_config: dict[str, Any]) -> None:
    if values.get("model_type") not in LAYER_TYPES:
        raise ValueError(
            f"model_type {values.get('model_type')!r} is no layer that drafts have; "
            f"use {' or '.join(LAYER_TYPES)} (qwen3 norms queries and keys)"
        )
    optional = [f for f in ("head_dim", "num_key_value_heads") if values.get(f) is not None]
    # Without a head_dim, transformers' Qwen3 has heads of 128, whatever its hidden size.
    needed = ["head_dim"] if values["model_type"] == "qwen3" else []
    for field in (*_COUNTS, *optional, *needed):
        count = values.get(field)
        if isinstance(count, bool) or not isinstance(count, int) or count <= 0:
            raise ValueError(f"{field} is {count!r}; write a positive whole number")
    for field, wanted, why in (
        ("hidden_size", text_config["hidden_size"], "the draft reads the verifier's states"),
        ("vocab_size", text_config["vocab_size"], "the draft reads the verifier's tokens"),
        ("rms_norm_eps", norm_eps(text_config), "the verifier's final norm is computed with it"),
    ):
        if values.get(field) != wanted:
            raise ValueError(
                f"{field} {values.get(field)!r} differs from the verifier's {wanted!r}, but {why}; write {wanted!r}"
            )
    if values["num_hidden_layers"] > 2:
        raise ValueError(
            f"num_hidden_layers {values['num_hidden_layers']} exceeds the 2 that a draft can have; "
            "write 1 (a second layer costs time at every drafted token)"
        )


def _check_features(values: Mapping[str, Any]) -> None:
    if values.get("hidden_act", ACTIVATION) != ACTIVATION:
        raise ValueError(
            f"hidden_act {values['hidden_act']!r} is not served by vLLM's draft layers; "
            f"write {ACTIVATION!r}"
        )
    rope = values.get("rope_parameters") or values.get("rope_scaling") or {}
    if not isinstance(rope, dict):
        raise ValueError(
            f"rope_parameters is {rope!r}; write an object with rope_type and rope_theta"
        )
    for field, none in _NEUTRAL.items():
        value = values.get(field, rope.get(field))
        if value is not None and value != none:
            raise ValueError(
                f"{field} is {value!r}, which drafts do not have; write {json.dumps(none)}"
            )
    windows = [kind for kind in values.get("layer_types") or () if kind != "full_attention"]
    windowed = values.get("sliding_window") and values.get("use_sliding_window") is not False
    if windows or windowed:
        named = (
            f"layer_types {windows}" if windows else f"sliding_window {values['sliding_window']}"
        )
        raise ValueError(
            f"{named} makes a layer attend within a window, but drafts attend fully; remove it"
        )
    if not rope and not values.get("rope_theta"):
        raise ValueError("it names no rope_parameters; write rope_type and rope_theta at least")


def _check_positions(layer: LayerConfig, text_config: dict[str, Any]) -> None:
    positions, theirs = layer["max_position_embeddings"], text_config["max_position_embeddings"]
    rope = layer["rope_parameters"]
    stretched = int(rope.get("original_max_position_embeddings", 0) * rope.get("factor", 1))
    if positions > max(theirs, stretched):
        raise ValueError(
            f"max_position_embeddings {positions} exceeds the verifier's {theirs}, and the draft's rope does "
            f"not stretch so far; write {theirs}"
        )
