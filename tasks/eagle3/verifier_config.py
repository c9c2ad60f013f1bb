"""A verifier's config.json: which part is the language model's, and what of it is not supported."""

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

# Config fields of transforms between the final norm and the logits (transformers 5.19), with the
# value that means "none".
_HEAD_TRANSFORMS: dict[str, float | None] = {
    "final_logit_softcapping": None,
    "output_logit_soft_cap": None,
    "logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
    "logits_mup_width_multiplier": 1.0,
}

# Models whose RMS norm scales by (1 + w) in transformers 5.19; all others scale by w.
_ONE_PLUS_NORMS = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "minimax_m3_vl_text", "muse_glimmer_text",
    "nemotron", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "qwen3_next",
    "qwen4_exp", "qwen4_exp_text", "recurrent_gemma", "step3p5", "t5gemma", "t5gemma2",
    "vaultgemma",
})  # fmt: skip

# Models whose config class transforms the logits by default: their config.json may not say so.
_TRANSFORM_BY_DEFAULT = frozenset({
    "cohere", "cohere2", "cohere2_moe", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text",
})  # fmt: skip

# Written by whoever saved the model last; they say nothing about it.
_INCIDENTAL_CONFIG = frozenset({"_name_or_path", "transformers_version"})


def read_config(files: ModelFiles) -> dict[str, Any]:
    """Return config.json; VerifierError when the directory or the file is not there."""
    if CONFIG_FILE not in files.sizes:
        raise VerifierError(f"{files.directory} has no {CONFIG_FILE}; is it a model directory?")
    return read_json_object(files, CONFIG_FILE)


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


def refuse_head_transforms(config: dict[str, Any], text: dict[str, Any]) -> None:
    """Raise VerifierError when the model's logits are not lm_head(norm(x)) with a norm scaled by w."""
    for field, none in _HEAD_TRANSFORMS.items():
        value = text.get(field, config.get(field))
        if value is not None and value != none:
            raise VerifierError(
                f"the config sets {field} = {value}: this model transforms its logits, and a head rebuilt "
                "as lm_head(norm(x)) would give other targets than the verifier; it is not supported"
            )
    for model_type in (text.get("model_type"), config.get("model_type")):
        if model_type in _ONE_PLUS_NORMS:
            raise VerifierError(
                f"model_type {model_type}: its norms scale by (1 + w), and a head rebuilt with w would "
                "give other targets than the verifier; it is not supported"
            )
        if model_type in _TRANSFORM_BY_DEFAULT:
            raise VerifierError(
                f"model_type {model_type}: it scales or caps its logits, and a head rebuilt as "
                "lm_head(norm(x)) would give other targets than the verifier; it is not supported"
            )
    if text.get("dim_model_base"):  # MiniCPM divides the last state by hidden_size / dim_model_base
        raise VerifierError("the config sets dim_model_base: scaled logits are not supported")


def required_number(text: dict[str, Any], field: str, directory: str) -> Any:
    """Return a positive number of the language model's config; VerifierError when it is missing."""
    value = text.get(field)
    if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
        raise VerifierError(
            f"{directory}/{CONFIG_FILE}: {field} is {value!r}; "
            "write the model's value into its language model's config"
        )
    return value


def eos_token_ids(
    files: ModelFiles, config: dict[str, Any], text: dict[str, Any]
) -> tuple[int, ...]:
    """Return the ids that end a text: of generation_config.json, else of the config."""
    there = GENERATION_FILE in files.sizes
    sources = [read_json_object(files, GENERATION_FILE)] if there else []
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
