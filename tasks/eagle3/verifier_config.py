"""A verifier's config.json: which part is the language model's, and what of it is not supported."""

import math
from collections.abc import Iterator
from typing import Any

from tasks.eagle3.model_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    ModelFiles,
    VerifierError,
    read_json_object,
)

SIZE_FIELDS = ("hidden_size", "num_hidden_layers", "vocab_size")

# What the draft is built from besides; a config may leave any of it to the defaults of its class.
_NEEDED_FIELDS = (*SIZE_FIELDS, "max_position_embeddings", "num_attention_heads")

# Written by whoever saved the model last; they say nothing about it.
_INCIDENTAL_CONFIG = frozenset({"_name_or_path", "transformers_version"})


def read_config(files: ModelFiles) -> dict[str, Any]:
    """Return config.json; VerifierError when the directory or the file is not there."""
    if CONFIG_FILE not in files.sizes:
        raise VerifierError(f"{files.directory} has no {CONFIG_FILE}; is it a model directory?")
    return read_json_object(files, CONFIG_FILE)


def with_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Return the config with the defaults of its transformers class where it lacks what is needed here.

    Some published configs (Gemma-3's) hold little more than what differs from them. One that is complete, or whose
    model_type transformers does not know, is returned as it is.
    """
    complete = any(
        all(field in found for field in _NEEDED_FIELDS) and norm_eps(found) is not None
        for _, found in _walk(config)
    )
    if complete:
        return config
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - a second that complete configs save

    model_type = str(config.get("model_type"))
    if model_type not in CONFIG_MAPPING:
        return config
    try:
        resolved: dict[str, Any] = CONFIG_MAPPING[model_type].from_dict(config).to_dict()
    except Exception as error:  # each class has checks of its own kind
        raise VerifierError(
            f"config.json is no {model_type} config that transformers accepts: {' '.join(str(error).split())}"
        ) from error
    return resolved


def norm_eps(text: dict[str, Any]) -> float | None:
    """Return the final norm's epsilon under whichever name the config has it; None when it has none."""
    for field in ("rms_norm_eps", "layer_norm_eps", "norm_eps"):
        value = text.get(field)
        if isinstance(value, int | float) and not isinstance(value, bool) and 0 < value < 1:
            return float(value)
    return None


def find_text_config(
    config: dict[str, Any], directory: str
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Return (keys to it, the language model's config): the dict, at any depth, with all SIZE_FIELDS.

    Raises VerifierError when there is none, and when there are several of different sizes.
    """
    candidates = [
        (path, found)
        for path, found in _walk(config)
        if all(_is_count(found.get(f)) for f in SIZE_FIELDS)
    ]
    if not candidates:
        raise VerifierError(
            f"{directory}/{CONFIG_FILE}: no part of it has {', '.join(SIZE_FIELDS)}; it is no decoder "
            "language model, or its config leaves them to defaults: write them out"
        )
    sizes = {tuple(found[f] for f in SIZE_FIELDS) for _, found in candidates}
    if len(sizes) > 1:
        listed = "; ".join(
            f"{'.'.join(path) or 'top level'}: " + ", ".join(f"{f} {found[f]}" for f in SIZE_FIELDS)
            for path, found in candidates
        )
        raise VerifierError(
            f"{directory}/{CONFIG_FILE} describes several language models ({listed}); "
            "save the one that is served alone"
        )
    # Some composite configs repeat the sizes at the top: the fullest one is the model's own.
    return max(candidates, key=lambda candidate: len(candidate[1]))


def _walk(
    config: dict[str, Any], path: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], dict[str, Any]]]:
    yield path, config
    for key, value in config.items():
        if isinstance(value, dict):
            yield from _walk(value, (*path, key))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def required_eps(text: dict[str, Any], directory: str) -> float:
    """Return the final norm's epsilon; VerifierError when there is none that a norm can have."""
    eps = norm_eps(text)
    if eps is None:
        given = text.get("rms_norm_eps", text.get("layer_norm_eps"))
        raise VerifierError(
            f"{directory}/{CONFIG_FILE}: rms_norm_eps is {given!r}, which is none between 0 and 1; "
            "write the model's value into its language model's config"
        )
    return eps


def required_number(text: dict[str, Any], field: str, directory: str) -> Any:
    """Return a positive number of the language model's config; VerifierError when it is missing."""
    value = text.get(field)
    if not isinstance(value, int | float) or isinstance(value, bool) or not 0 < value < math.inf:
        raise VerifierError(
            f"{directory}/{CONFIG_FILE}: {field} is {value!r}; "
            "write the model's value into its language model's config"
        )
    return value


def eos_token_ids(
    files: ModelFiles, config: dict[str, Any], text: dict[str, Any]
) -> tuple[int, ...]:
    """Return the ids that end a text: of generation_config.json, else of the config.

    Raises VerifierError when one is no token of the vocabulary: no text would ever end there.
    """
    there = GENERATION_FILE in files.sizes
    sources = [read_json_object(files, GENERATION_FILE)] if there else []
    for source in (*sources, text, config):
        value = source.get("eos_token_id")
        if value is not None:
            ids = tuple(value) if isinstance(value, list) else (value,)
            wrong = [i for i in ids if not _is_token(i, text["vocab_size"])]
            if wrong:
                raise VerifierError(
                    f"{files.directory}: eos_token_id {wrong[0]!r} is no token of the vocabulary of "
                    f"{text['vocab_size']}; correct generation_config.json or config.json"
                )
            return ids
    return ()


def _is_token(value: object, vocab_size: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < vocab_size


def without_incidentals(value: Any) -> Any:
    """Return the config without what the last save wrote into it: path and library version."""
    if isinstance(value, dict):
        return {k: without_incidentals(v) for k, v in value.items() if k not in _INCIDENTAL_CONFIG}
    return value
