"""Whose code runs a checkpoint: transformers' own where it has some, else what lies beside the weights, if trusted."""

import importlib.util
from pathlib import Path
from typing import Any

from tasks.eagle3.model_files import LocalFiles
from tasks.eagle3.remote_code import SAME_MODEL, is_native, refuse_remote_code
from tasks.eagle3.verifier import VerifierError
from tasks.eagle3.verifier_config import read_config


def admit(directory: Path, *, trusted: bool) -> None:
    """Make transformers know the checkpoint's model type, for `AutoConfig` without trust too.

    Raises VerifierError when transformers alone cannot run the model or its tokenizer and code beside the
    weights is missing or not `trusted`.
    """
    from transformers import CONFIG_MAPPING, AutoConfig  # noqa: PLC0415 - seconds to import

    files = LocalFiles(directory)
    if not trusted:
        refuse_remote_code(files)
    config = read_config(files)
    model_type = str(config.get("model_type", ""))
    if not is_native(model_type) and not config.get("auto_map"):
        raise VerifierError(
            f"{directory}: transformers has no model type {model_type!r} and config.json names no code for it "
            "(auto_map); use a newer transformers or a checkpoint converted to a known model type"
        )
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
