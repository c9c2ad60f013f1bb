"""A verifier's config.json: which part is the language model's, and what of it is not supported."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tasks.eagle3.weight_files import VerifierError, read_json_object

SIZE_FIELDS = ("hidden_size", "num_hidden_layers", "vocab_size")

# What the draft is built from besides; a config may leave any of it to the defaults of its class.
_NEEDED_FIELDS = (*SIZE_FIELDS, "max_position_embeddings", "num_attention_heads")

# Written by whoever saved the model last; they say nothing about it.
_INCIDENTAL_CONFIG = frozenset({"_name_or_path", "transformers_version"})


def read_config(directory: Path) -> dict[str, Any]:
    """Return config.json; VerifierError when the directory or the file is not there."""
    if not directory.is_dir():
        raise VerifierError(f"there is no model directory {directory}; correct verifier.model")
    if not (directory / "config.json").is_file():
        raise VerifierError(f"{directory} has no config.json; is it a model directory?")
    return read_json_object(directory / "config.json")


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
        if isinstance(value, int | float) and not isinstance(value, bool) and value > 0:
            return float(value)
    return None


def find_text_config(
    config: dict[str, Any], directory: Path
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
            f"{directory / 'config.json'}: no part of it has {', '.join(SIZE_FIELDS)}; it is no decoder "
            "language model, or its config leaves them to defaults: write them out"
        )
    sizes = {tuple(found[f] for f in SIZE_FIELDS) for _, found in candidates}
    if len(sizes) > 1:
        listed = "; ".join(
            f"{'.'.join(path) or 'top level'}: " + ", ".join(f"{f} {found[f]}" for f in SIZE_FIELDS)
            for path, found in candidates
        )
        raise VerifierError(
            f"{directory / 'config.json'} describes several language models ({listed}); "
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


def required_number(text: dict[str, Any], field: str, directory: Path) -> Any:
    """Return a positive number of the language model's config; VerifierError when it is missing."""
    value = text.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise VerifierError(
            f"{directory / 'config.json'}: {field} is {value!r}; "
            "write the model's value into its language model's config"
        )
    return value


def eos_token_ids(directory: Path, config: dict[str, Any], text: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids that end a text: of generation_config.json, else of the config."""
    generation = directory / "generation_config.json"
    sources = [read_json_object(generation)] if generation.is_file() else []
    for source in (*sources, text, config):
        value = source.get("eos_token_id")
        if value is not None:
            return tuple(value) if isinstance(value, list) else (value,)
    return ()


def without_incidentals(value: Any) -> Any:
    """Return the config without what the last save wrote into it: path and library version."""
    if isinstance(value, dict):
        return {k: without_incidentals(v) for k, v in value.items() if k not in _INCIDENTAL_CONFIG}
    return value
