"""What a verifier does between its last layer and its logits, beyond lm_head(norm(x)).

N = positions, H = verifier hidden size. All of it is known from the config alone; the canary of every shard holds it
against the verifier's own logits. What is not implemented is refused: a wrong head would train a draft on wrong targets
while the loss still falls.
"""

import math
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

from tasks.eagle3.weight_files import VerifierError

NormKind = Literal["rms", "rms_plus_one", "layer"]


class HeadTransform(BaseModel):
    """The final norm's kind and what is done to the logits: cap * tanh(scale * lm_head(norm(x)) / cap)."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    norm: NormKind = "rms"
    """rms scales by w; rms_plus_one (Gemma, Qwen3.5) by 1 + w; layer (Cohere) takes the mean off first."""
    logit_scale: float = 1.0
    """Factor of the logits (Cohere's logit_scale, one over Granite's logits_scaling)."""
    logit_softcap: float | None = None
    """Largest absolute logit, by tanh (Gemma-2)."""

    @property
    def plain(self) -> bool:
        """Whether the logits are lm_head(norm(x)) with a norm that scales by w."""
        return self == PLAIN


PLAIN = HeadTransform()

# The forms of transformers 5.19, by the model_type of the language model's config. Each number is the default of its
# config class, in force where config.json does not say otherwise.
_SOFTCAPPED = {"gemma2": 30.0, "vaultgemma": 30.0, "gemma3": None, "gemma3_text": None}
_MULTIPLIED = {"cohere": ("logit_scale", 0.0625), "cohere2": ("logit_scale", 0.0625),
               "hyperclovax": ("logits_scaling", 1.0)}  # fmt: skip
_DIVIDED = frozenset({
    "granite", "granite_swa", "granitemoe", "granitemoe_swa", "granitemoehybrid", "granitemoeshared",
})  # fmt: skip
_LAYER_NORMS = frozenset({"cohere", "cohere2"})
_ONE_PLUS_NORMS = frozenset({
    "gemma", "gemma2", "gemma3", "gemma3_text", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text",
    "qwen3_next", "vaultgemma",
})  # fmt: skip

# Model types whose head has a form of its own that is not implemented.
_OTHER_HEADS = frozenset({
    "cohere2_moe", "cohere_compass", "diffusion_gemma", "gemma3n", "gemma3n_text", "gemma4", "gemma4_text",
    "gemma4_unified", "gemma4_unified_text", "inkling", "inkling_text", "minicpm3", "minimax_m3_vl",
    "minimax_m3_vl_text", "mpt", "muse_glimmer", "muse_glimmer_text", "nanochat", "nemotron", "qwen4_exp",
    "qwen4_exp_text", "recurrent_gemma", "step3p5", "step3p7", "t5gemma", "t5gemma2", "xlstm",
})  # fmt: skip

# Config fields of such transforms, with the value that means "none".
_FIELDS: dict[str, float | None] = {
    "final_logit_softcapping": None,
    "output_logit_soft_cap": None,
    "logits_soft_cap": None,
    "logit_scale": 1.0,
    "logits_scaling": 1.0,
    "lm_head_multiplier": 1.0,
    "output_multiplier": 1.0,
    "output_multiplier_scale": 1.0,
    "logits_mup_width_multiplier": 1.0,
    "dim_model_base": None,
}


def find_transform(config: dict[str, Any], text: dict[str, Any]) -> HeadTransform:
    """Return the head transform of a language model's config `text` inside the whole `config`.

    Raises VerifierError for a model or a field whose transform is not implemented.
    """
    model_type = str(text.get("model_type") or config.get("model_type"))
    for named in (model_type, config.get("model_type")):
        if named in _OTHER_HEADS:
            raise VerifierError(
                f"model_type {named}: its norm or logits have a form of their own, and a head rebuilt as "
                "lm_head(norm(x)) would give other targets than the verifier; it is not supported"
            )
    known: set[str] = set()
    scale, softcap = 1.0, None
    if model_type in _SOFTCAPPED:
        known.add("final_logit_softcapping")
        softcap = text.get("final_logit_softcapping", _SOFTCAPPED[model_type])
        if softcap is not None:
            softcap = _given(text, "final_logit_softcapping", softcap)
    if model_type in _MULTIPLIED:
        field, default = _MULTIPLIED[model_type]
        known.add(field)
        scale = _given(text, field, default)
    if model_type in _DIVIDED:
        known.add("logits_scaling")
        scale = 1.0 / _given(text, "logits_scaling", 1.0)
    _refuse_unknown(config, text, known)
    if model_type in _LAYER_NORMS:
        return HeadTransform(norm="layer", logit_scale=scale, logit_softcap=softcap)
    norm: NormKind = "rms_plus_one" if model_type in _ONE_PLUS_NORMS else "rms"
    return HeadTransform(norm=norm, logit_scale=scale, logit_softcap=softcap)


def _given(text: dict[str, Any], field: str, default: float) -> float:
    value = text.get(field)
    value = default if value is None else value
    number = isinstance(value, int | float) and not isinstance(value, bool)
    if not number or not 0 < value < math.inf:
        raise VerifierError(f"the config sets {field} = {value!r}; it must be a positive number")
    return float(value)


def _refuse_unknown(config: dict[str, Any], text: dict[str, Any], known: set[str]) -> None:
    for field, none in _FIELDS.items():
        value = text.get(field, config.get(field))
        if field not in known and value is not None and value != none:
            raise VerifierError(
                f"the config sets {field} = {value}: this model transforms its logits in a way that is not known "
                "for its model_type, and a head rebuilt without it would give other targets than the verifier; "
                "it is not supported"
            )
