"""The draft's rotary positions from the verifier's: flat parameters that transformers and vLLM read alike.

A draft is trained from scratch, so it owes the verifier no table; it owes training and serving the same
one, over the verifier's whole context. It takes the verifier's recipe (theta, factors, attention factor)
at its own head width and turns whole heads. Where the verifier turns whole heads of that width, the
tables are equal. Which channels form a pair (halves here, neighbors in GLM-4 and DeepSeek) is a
permutation that the draft's projections learn.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

_ORIGINAL = "original_max_position_embeddings"

# Other names of rope types. `proportional` (Gemma-4) leaves part of each head unturned.
_SAME_TYPES = {
    "mrope": "default",
    "axial": "default",
    "proportional": "default",
    "su": "longrope",
    "deepseek_yarn": "yarn",
}

# Keys that both transformers 5.19 (modeling_rope_utils) and vLLM 0.32 (rotary_embedding) read. All
# others are dropped: legacy spellings (`type`, `mrope_interleaved`), which vLLM's checks refuse, and
# what the verifier's own attention does beside its rope (`llama_4_scaling_beta`).
_REQUIRED_KEYS: dict[str, tuple[str, ...]] = {
    "default": (),
    "dynamic": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", _ORIGINAL),
    "yarn": ("factor", _ORIGINAL),
    "longrope": ("factor", "long_factor", _ORIGINAL),
}
_OPTIONAL_KEYS: dict[str, tuple[str, ...]] = {
    "default": ("mrope_section",),
    "yarn": ("beta_fast", "beta_slow", "truncate", "mrope_section"),
}


def draft_rope(text_config: Mapping[str, Any], *, head_dim: int) -> dict[str, Any]:
    """Return the `rope_parameters` of a draft whose heads are `head_dim` wide.

    `text_config` is the verifier's: its `rope_parameters`, or `rope_scaling` and `rope_theta` of configs
    older than transformers 5. Raises ValueError for rope types that a draft cannot have.
    """
    given = _verifiers_rope(text_config)
    kind = given["rope_type"]
    missing = [key for key in _REQUIRED_KEYS[kind] if given.get(key) is None]
    if missing:
        raise ValueError(
            f"the rope of type {kind} has no {', '.join(missing)}; "
            "write what the model was trained with into its config"
        )
    keys = (*_REQUIRED_KEYS[kind], *_OPTIONAL_KEYS.get(kind, ()))
    rope = {"rope_type": kind, "rope_theta": given["rope_theta"]}
    rope |= {key: given[key] for key in keys if given.get(key) is not None}
    if kind == "dynamic":
        rope = _undynamic(given, head_dim)
    if kind == "longrope":
        rope |= _longrope(given, text_config, head_dim)
    if kind == "yarn" and (attention := _yarn_attention_factor(given)) is not None:
        rope["attention_factor"] = attention
    if "mrope_section" in rope:
        rope["mrope_section"] = _full_head_sections(given, head_dim)
    return rope


def _verifiers_rope(text_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return one flat set with rope_type, rope_theta and partial_rotary_factor, in today's spelling."""
    rope = dict(text_config.get("rope_parameters") or text_config.get("rope_scaling") or {})
    nested = {key: value for key, value in rope.items() if isinstance(value, Mapping)}
    if nested:  # one set per layer type; the draft attends fully
        rope = dict(nested.get("full_attention") or next(iter(nested.values())))
    kind = rope.get("rope_type") or rope.get("type") or "default"
    if "long_factor" in rope:  # Phi-3 also calls it yarn
        kind = "longrope"
    kind = _SAME_TYPES.get(kind, kind)
    if kind not in _REQUIRED_KEYS:
        raise ValueError(
            f"rope_type {kind!r} is none that a draft can have ({', '.join(_REQUIRED_KEYS)}); "
            "give the draft one of these in a file of its own, named in draft.config"
        )
    positions = text_config["max_position_embeddings"]
    if kind in ("llama3", "yarn", "longrope"):  # Phi-3 writes it beside the rope, and means it
        original = text_config.get(_ORIGINAL) or rope.get(_ORIGINAL) or positions
        rope[_ORIGINAL] = original
        if rope.get("factor") is None:
            rope["factor"] = positions / original
    partial = rope.get("partial_rotary_factor") or text_config.get("partial_rotary_factor")
    theta = rope.get("rope_theta") or text_config.get("rope_theta")
    return rope | {
        "rope_type": kind,
        "rope_theta": float(theta or _class_theta(str(text_config.get("model_type")))),
        "partial_rotary_factor": float(partial or 1.0),
    }


def _class_theta(model_type: str) -> float:
    """Return the theta that transformers takes for a config.json without one."""
    from transformers import CONFIG_MAPPING  # noqa: PLC0415 - seconds that nearly every config saves

    # The mapping loads lazily, which its `get` does not.
    known = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None  # noqa: SIM401
    theta = getattr(known, "default_theta", 10_000.0)
    return float(theta["global"] if isinstance(theta, dict) else theta)


def _undynamic(given: Mapping[str, Any], head_dim: int) -> dict[str, Any]:
    """Return the plain rope that a dynamic one is within its trained context.

    Beyond it, transformers follows the longest sequence of a batch and vLLM the longest it may ever
    serve: no draft could be trained and served by one table. `alpha` (Hunyuan) is a fixed theta.
    """
    stretch = float(given.get("alpha") or 1.0) ** (head_dim / (head_dim - 2))
    return {"rope_type": "default", "rope_theta": given["rope_theta"] * stretch}


def _longrope(
    given: Mapping[str, Any], text_config: Mapping[str, Any], head_dim: int
) -> dict[str, Any]:
    """Return both tables of longrope: the long one twice.

    transformers chooses by the longest sequence of a batch, vLLM by the longest it may ever serve, so
    that drafts trained on short samples would be served with the other table.
    """
    factors = _resample(given["long_factor"], head_dim // 2)
    rope: dict[str, Any] = {"short_factor": factors, "long_factor": factors}
    original = given[_ORIGINAL]
    served = _longrope_attention_factor(
        text_config["max_position_embeddings"] / original, original
    )  # vLLM's, which reads neither `factor` nor `attention_factor`
    stated = given.get("long_mscale") or given.get("attention_factor")
    attention = float(stated or _longrope_attention_factor(given["factor"], original))
    if not math.isclose(attention, served, rel_tol=1e-6):
        rope |= dict.fromkeys(("attention_factor", "short_mscale", "long_mscale"), attention)
    return rope


def _longrope_attention_factor(factor: float, original: int) -> float:
    """Source: LongRoPE (arXiv 2402.13753), section 4.2."""
    return math.sqrt(1 + math.log(factor) / math.log(original)) if factor > 1 else 1.0


def _resample(factors: Sequence[float], count: int) -> list[float]:
    """Return `count` factors: entry i of n belongs to the frequency theta ** -(i / n); linear between."""
    last, resampled = len(factors) - 1, []
    for i in range(count):
        at = min(i * len(factors) / count, last)
        below, share = int(at), at - int(at)
        above = min(below + 1, last)
        resampled.append(float(factors[below] * (1 - share) + factors[above] * share))
    return resampled


def _yarn_attention_factor(given: Mapping[str, Any]) -> float | None:
    """Return what scales cos and sin, where it is not YaRN's own 0.1 * ln(factor) + 1.

    DeepSeek's `mscale` pair becomes the number it means, which more servers read.
    """
    if given.get("attention_factor") is not None:
        return float(given["attention_factor"])
    mscale, all_dims = given.get("mscale"), given.get("mscale_all_dim")
    if not mscale or not all_dims:
        return None

    def magnitude(scale: float) -> float:
        return 0.1 * scale * math.log(given["factor"]) + 1.0 if given["factor"] > 1 else 1.0

    return magnitude(mscale) / magnitude(all_dims)


def _full_head_sections(given: Mapping[str, Any], head_dim: int) -> list[int]:
    """Sections of a partly rotated head scaled to the whole head, which is what drafts rotate.

    A server with multimodal positions needs the sections; for text all three positions are equal.
    """
    partial, sections = given["partial_rotary_factor"], given["mrope_section"]
    scaled = [round(size / partial) for size in sections]
    if 2 * sum(scaled) != head_dim:
        raise ValueError(
            f"mrope_section {list(sections)} with partial_rotary_factor {partial} covers "
            f"{2 * sum(scaled)} of head_dim {head_dim}; the verifier's config contradicts itself"
        )
    return scaled
