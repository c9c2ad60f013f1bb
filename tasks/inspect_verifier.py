"""The verb `inspect`: what is understood of a verifier from its config and weight headers, wherever it lies."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from storage.codecs import codec_named
from tasks.eagle3.model_files import (
    CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    ModelFiles,
    read_json_object,
)
from tasks.eagle3.quantization import read_quantization
from tasks.eagle3.verifier import VerifierFacts, default_layer_ids, read_facts
from tasks.eagle3.verifier_config import read_config
from tasks.eagle3.weight_files import TensorEntry, read_weight_files
from tasks.engine_advice import advise
from tasks.hardware import Machine, this_machine
from tasks.verifier_sources import VerifierSettings, open_model, refuse_untrusted

TEMPLATE_FILES = ("chat_template.jinja", "chat_template.json")


def inspect_verifier(settings: VerifierSettings, machine: Machine | None = None) -> dict[str, Any]:
    """Return what is understood of a verifier, as plain JSON values; its weights are not read.

    `machine` is what the engine is chosen for, by default this one. Raises VerifierError when there is no
    such model or it cannot be used.
    """
    files = open_model(settings)
    weights = read_weight_files(files)
    facts = read_facts(files, weights)
    refuse_untrusted(files, settings)
    stored = {key: entry for file in weights for key, entry in file.tensors.items()}
    quantization = read_quantization(
        read_config(files), facts.text_config, stored, place=f"{files.directory}/{CONFIG_FILE}"
    )
    weight_bytes = sum(file.file_bytes for file in weights)
    advice = advise(
        weight_bytes,
        facts.parameters,
        quantized=quantization is not None,
        machine=machine or this_machine(),
    )
    return {
        "model": settings.model,
        "directory": files.directory,
        **_language_model(facts),
        "tensors": _three_tensors(facts, stored),
        "tied": facts.tied,
        "head_transform": facts.transform.model_dump(),
        "quantization": None if quantization is None else asdict(quantization),
        "weight_files": len(weights),
        "weight_bytes": weight_bytes,
        "parameters": facts.parameters,
        "eos_token_ids": list(facts.eos_token_ids),
        "chat_template": _has_template(files),
        "recommended": asdict(advice),
    }


def _language_model(facts: VerifierFacts) -> dict[str, Any]:
    layers = _default_layers(facts)
    return {
        "model_type": facts.model_type,
        "architectures": list(facts.architectures),
        "config_path": list(facts.config_path),
        "hidden_size": facts.hidden_size,
        "num_hidden_layers": facts.num_hidden_layers,
        "vocab_size": facts.vocab_size,
        "context_length": facts.max_position_embeddings,
        "default_layers": layers,
        "bytes_per_token": _bytes_per_token(facts, layers, "bf16"),
        "bytes_per_token_fp8": _bytes_per_token(facts, layers, "fp8"),
    }


def _bytes_per_token(facts: VerifierFacts, layers: list[int], codec: str) -> int | None:
    """Return what a token's states take in a codec; None when no layers are named."""
    return (len(layers) + 1) * codec_named(codec).state_bytes(facts.hidden_size) if layers else None


def _three_tensors(facts: VerifierFacts, stored: Mapping[str, TensorEntry]) -> dict[str, Any]:
    keys = {"embedding": facts.embed_key, "final_norm": facts.norm_key, "head": facts.head_key}
    return {
        name: {
            "key": key,
            "file": stored[key].file,
            "dtype": stored[key].dtype,
            "shape": list(stored[key].shape),
        }
        for name, key in keys.items()
    }


def _default_layers(facts: VerifierFacts) -> list[int]:
    """Return the layers that are captured unless capture.layers names others; none when there are too few."""
    try:
        return default_layer_ids(facts.num_hidden_layers)
    except ValueError:
        return []


def _has_template(files: ModelFiles) -> bool:
    if any(name in files.sizes for name in TEMPLATE_FILES):
        return True
    there = TOKENIZER_CONFIG_FILE in files.sizes
    return there and bool(read_json_object(files, TOKENIZER_CONFIG_FILE).get("chat_template"))
