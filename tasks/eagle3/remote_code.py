"""Whether a model needs Python code that its own files bring along."""

from typing import Any

from tasks.eagle3.model_files import (
    CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    ModelFiles,
    VerifierError,
    read_json_object,
)

SAME_MODEL = {"kimi_k2": "deepseek_v3"}
"""Model types that are another's under a name of their own (transformers 5.19: configuration_kimi_k25.py says so)."""


def refuse_remote_code(files: ModelFiles) -> None:
    """Raise VerifierError when model or tokenizer cannot be loaded without code of the model's files.

    What transformers knows by its model_type is loaded by transformers' own code, whatever an `auto_map` offers.
    """
    config = read_json_object(files, CONFIG_FILE)
    model_type = str(config.get("model_type"))
    there = TOKENIZER_CONFIG_FILE in files.sizes
    tokenizer = read_json_object(files, TOKENIZER_CONFIG_FILE) if there else {}
    if config.get("auto_map") and not is_native(model_type):
        what, code = f"no model type {model_type!r}", config["auto_map"]
    elif tokenizer.get("auto_map") and not _has_native_tokenizer(model_type, tokenizer):
        what, code = f"no tokenizer {tokenizer.get('tokenizer_class')!r}", tokenizer["auto_map"]
    else:
        return
    raise VerifierError(
        f"{files.directory}: transformers has {what}; its code lies beside the weights ({_listed(code)}) and would "
        "run here with your rights: read it, then set verifier.trust_remote_code to true (inspect: "
        "--trust-remote-code), or use a checkpoint of a model type that transformers has itself"
    )


def is_native(model_type: str) -> bool:
    """Tell whether transformers has a config class of its own for the model type."""
    from transformers.models.auto import (  # noqa: PLC0415 - seconds, and few models need it
        configuration_auto,
    )

    auto: Any = (
        configuration_auto  # CONFIG_MAPPING would hold what a trusted model has registered too
    )
    return SAME_MODEL.get(model_type, model_type) in auto.CONFIG_MAPPING_NAMES


def _has_native_tokenizer(model_type: str, tokenizer: dict[str, Any]) -> bool:
    from transformers.models.auto.tokenization_auto import (  # noqa: PLC0415 - the same
        TOKENIZER_MAPPING_NAMES,
        tokenizer_class_from_name,
    )

    if TOKENIZER_MAPPING_NAMES.get(SAME_MODEL.get(model_type, model_type)):
        return True
    name = tokenizer.get("tokenizer_class") or ""
    return any(name and tokenizer_class_from_name(name + suffix) for suffix in ("", "Fast"))


def _listed(auto_map: Any) -> str:
    values = auto_map.values() if isinstance(auto_map, dict) else auto_map
    flat = [v for value in values for v in (value if isinstance(value, list | tuple) else [value])]
    return ", ".join(str(value) for value in flat if value)
