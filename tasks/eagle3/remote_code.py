"""Whether a model needs Python code that its own files bring along."""

from typing import Any

from tasks.eagle3.model_files import (
    CONFIG_FILE,
    TOKENIZER_CONFIG_FILE,
    ModelFiles,
    VerifierError,
    read_json_object,
)


def refuse_remote_code(files: ModelFiles) -> None:
    """Raise VerifierError when model or tokenizer cannot be loaded without code of the model's files.

    A model that transformers knows by its `model_type` is loaded by transformers' own code, whatever its
    `auto_map` offers.
    """
    config = read_json_object(files, CONFIG_FILE)
    model_type = str(config.get("model_type"))
    tokenizer = (
        read_json_object(files, TOKENIZER_CONFIG_FILE)
        if TOKENIZER_CONFIG_FILE in files.sizes
        else {}
    )
    if config.get("auto_map") and not _knows_model(model_type):
        what = f"model_type {model_type} is not part of transformers"
    elif _own_tokenizer(tokenizer) and not _knows_tokenizer(model_type, tokenizer):
        what = f"its tokenizer {tokenizer.get('tokenizer_class')} is not part of transformers"
    else:
        return
    raise VerifierError(
        f"{files.directory}: {what} and needs code of the model's own files; read that code, then set "
        "verifier.trust_remote_code (--trust-remote-code) to let it run"
    )


def _own_tokenizer(tokenizer: dict[str, Any]) -> bool:
    auto_map = tokenizer.get("auto_map")
    return isinstance(auto_map, list) or bool((auto_map or {}).get("AutoTokenizer"))


def _knows_model(model_type: str) -> bool:
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - seconds, and few models need it

    return model_type in CONFIG_MAPPING


def _knows_tokenizer(model_type: str, tokenizer: dict[str, Any]) -> bool:
    from transformers.models.auto.tokenization_auto import (  # noqa: PLC0415 - the same
        TOKENIZER_MAPPING_NAMES,
        tokenizer_class_from_name,
    )

    name = str(tokenizer.get("tokenizer_class"))
    return model_type in TOKENIZER_MAPPING_NAMES or tokenizer_class_from_name(name) is not None
