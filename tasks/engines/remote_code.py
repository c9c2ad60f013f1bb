"""Whose code runs a checkpoint: transformers' own where it has some, else what lies beside the weights, if trusted."""

import importlib.util
from pathlib import Path
from typing import Any

from tasks.eagle3.verifier import VerifierError
from tasks.eagle3.verifier_config import read_config
from tasks.eagle3.weight_files import read_json_object

SAME_MODEL = {"kimi_k2": "deepseek_v3"}
"""Model types that are another's under a name of their own (transformers 5.19: configuration_kimi_k25.py says so)."""

WAY_OUT = (
    "read it, then set verifier.trust_remote_code to true, or use a checkpoint of a model type that transformers "
    "has itself"
)


def is_native(model_type: str) -> bool:
    """Whether transformers has a config class of its own for the model type."""
    from transformers.models.auto import configuration_auto  # noqa: PLC0415 - seconds to import

    auto: Any = configuration_auto
    return SAME_MODEL.get(model_type, model_type) in auto.CONFIG_MAPPING_NAMES


def admit(directory: Path, *, trusted: bool) -> None:
    """Make transformers know the checkpoint's model type, for `AutoConfig` without trust too.

    Raises VerifierError when transformers alone cannot run the model or its tokenizer and code beside the
    weights is missing or not `trusted`.
    """
    from transformers import CONFIG_MAPPING, AutoConfig  # noqa: PLC0415 - seconds to import

    config = read_config(directory)
    model_type = str(config.get("model_type", ""))
    _check_model(directory, model_type, config.get("auto_map"), trusted=trusted)
    if not trusted:
        _check_tokenizer(directory, model_type)
    mapping: Any = CONFIG_MAPPING
    if model_type in SAME_MODEL:
        mapping.register(model_type, mapping[SAME_MODEL[model_type]], exist_ok=True)
    elif not is_native(model_type):
        own = AutoConfig.from_pretrained(directory, local_files_only=True, trust_remote_code=True)
        mapping.register(model_type, type(own), exist_ok=True)


def check_quantization(directory: Path, quantization: dict[str, Any] | None) -> None:
    """Raise VerifierError when the weights are packed in a way that no installed package can read."""
    if not quantization or quantization.get("quant_method") != "compressed-tensors":
        return
    if importlib.util.find_spec("compressed_tensors") is None:
        raise VerifierError(
            f"{directory}: its weights are packed by compressed-tensors (such as INT4 experts), and that package "
            "is not installed here: install compressed-tensors, or use a checkpoint with plain weights"
        )


def _check_model(directory: Path, model_type: str, auto_map: Any, *, trusted: bool) -> None:
    if is_native(model_type):
        return
    if not auto_map:
        raise VerifierError(
            f"{directory}: transformers has no model type {model_type!r} and config.json names no code for it "
            "(auto_map); use a newer transformers or a checkpoint converted to a known model type"
        )
    if not trusted:
        raise VerifierError(
            f"{directory}: transformers has no model type {model_type!r}; its code lies beside the weights "
            f"({_listed(auto_map)}) and would run here with your rights: {WAY_OUT}"
        )


def _check_tokenizer(directory: Path, model_type: str) -> None:
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return
    from transformers.models.auto.tokenization_auto import (  # noqa: PLC0415 - seconds to import
        TOKENIZER_MAPPING_NAMES,
        tokenizer_class_from_name,
    )

    tokenizer = read_json_object(path)
    name = str(tokenizer.get("tokenizer_class") or "")
    known = TOKENIZER_MAPPING_NAMES.get(SAME_MODEL.get(model_type, model_type)) or any(
        name and tokenizer_class_from_name(name + suffix) for suffix in ("", "Fast")
    )
    if tokenizer.get("auto_map") and not known:
        raise VerifierError(
            f"{directory}: transformers has no tokenizer {name!r}; its code lies beside the weights "
            f"({_listed(tokenizer['auto_map'])}) and would run here with your rights: {WAY_OUT}"
        )


def _listed(auto_map: Any) -> str:
    values = auto_map.values() if isinstance(auto_map, dict) else auto_map
    flat = [v for value in values for v in (value if isinstance(value, list | tuple) else [value])]
    return ", ".join(str(value) for value in flat if value)
