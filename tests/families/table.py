"""The one table of verifier families: what is tested, and what the README says of it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel

from tests.families import dense, experts, nested


@dataclass(frozen=True)
class Family:
    """One family: `build` writes a tiny checkpoint of it and returns the model that it holds."""

    name: str
    build: Callable[[Path], PreTrainedModel]
    examples: str
    """Models that people serve."""
    weights: str = "`model.*`"
    """Where the language model's weights lie."""
    special: str = ""
    """What sets it apart for a draft, in words."""
    tied: bool = False
    trust_remote_code: bool = False
    package: str = ""
    """What has to be installed besides."""


@dataclass(frozen=True)
class RefusedFamily:
    """One family that `read_facts` refuses by its config alone."""

    name: str
    examples: str
    why: str
    config: dict[str, Any]
    """What of config.json decides it."""
    error: str
    """Part of the error's text."""


FAMILIES = (
    Family("Llama", dense.build_llama, "Llama 3.1 / 3.3"),
    Family("Mistral", dense.build_mistral, "Mistral 7B", special="sliding window"),
    Family("Qwen2", dense.build_qwen2, "Qwen2.5", special="biases, sliding window", tied=True),
    Family("Qwen3", dense.build_qwen3, "Qwen3 8B / 32B", special="norms of q and k"),
    Family("Qwen3-MoE", experts.build_qwen3_moe, "Qwen3 30B-A3B / 235B-A22B", special="experts"),
    Family(
        "Qwen3.5",
        nested.build_qwen3_5,
        "Qwen3.5 9B / 27B",
        "`model.language_model.*`",
        "linear attention; norms by 1 + w",
    ),
    Family(
        "DeepSeek-V3",
        experts.build_deepseek_v3,
        "DeepSeek V3 / R1",
        special="latent attention, experts, a prediction layer that is left out",
    ),
    Family(
        "DeepSeek-V3 FP8",
        experts.build_deepseek_v3_fp8,
        "DeepSeek V3 / R1 as published",
        special="weights in fp8 blocks",
    ),
    Family(
        "Kimi-K2",
        experts.build_kimi_k2,
        "Kimi-K2 Instruct / Thinking",
        special="latent attention, experts; its own code is not needed",
    ),
    Family(
        "Kimi-K2.5",
        nested.build_kimi_k25,
        "Kimi-K2.5 / K2.6",
        "`language_model.model.*`",
        "latent attention, experts",
    ),
    Family(
        "Kimi-K2.5 INT4",
        nested.build_kimi_k25_int4,
        "Kimi-K2.5 as published",
        "`language_model.model.*`",
        "experts packed by compressed-tensors, unpacked on loading",
        package="compressed_tensors",
    ),
    Family(
        "GLM-MoE",
        experts.build_glm4_moe,
        "GLM-4.5 / 4.6",
        special="experts, partial rotation, a prediction layer that is left out",
    ),
    Family(
        "gpt-oss",
        experts.build_gpt_oss,
        "gpt-oss 20b / 120b",
        special="attention sinks, sliding window, experts",
    ),
    Family(
        "gpt-oss MXFP4",
        experts.build_gpt_oss_mxfp4,
        "gpt-oss as published",
        special="experts in MXFP4",
    ),
    Family(
        "Llama 4",
        nested.build_llama4,
        "Llama 4 Scout / Maverick",
        "`language_model.model.*`",
        "chunked attention, layers without rotation, experts",
    ),
    Family(
        "Mistral 3",
        nested.build_mistral3,
        "Mistral Small 3.1 / 3.2",
        "`language_model.model.*`",
    ),
    Family(
        "Ministral 3",
        nested.build_ministral3,
        "Ministral 3 8B / 14B",
        "`language_model.model.*`",
        "queries scaled by position",
    ),
    Family("Phi-3", dense.build_phi3, "Phi-3, Phi-4", special="fused projections, sliding window"),
    Family(
        "Phi-4-mini",
        dense.build_phi4_mini,
        "Phi-4-mini",
        special="partial rotation, long rope",
        tied=True,
    ),
    Family(
        "Gemma 2",
        dense.build_gemma2,
        "Gemma 2 9B / 27B",
        special="norms by 1 + w, capped scores and logits",
        tied=True,
    ),
    Family(
        "Gemma 3 (text)",
        dense.build_gemma3_text,
        "Gemma 3 270M / 1B",
        special="norms by 1 + w, two ropes",
        tied=True,
    ),
    Family(
        "Gemma 3",
        nested.build_gemma3,
        "Gemma 3 4B / 27B",
        "`language_model.model.*`",
        "norms by 1 + w, two ropes",
        tied=True,
    ),
    Family(
        "Cohere",
        dense.build_cohere,
        "Command R+",
        special="LayerNorm, scaled logits",
        tied=True,
    ),
    Family(
        "Cohere 2",
        dense.build_cohere2,
        "Command A, Command R7B",
        special="LayerNorm, scaled logits, sliding window",
        tied=True,
    ),
    Family(
        "Granite",
        dense.build_granite,
        "Granite 3.3",
        special="scaled logits, embeddings and residuals",
        tied=True,
    ),
    Family(
        "Other model types",
        experts.build_remote_code,
        "with code beside the weights",
        special="runs with `verifier.trust_remote_code: true`",
        trust_remote_code=True,
    ),
)

OWN_FORM = "its norm or logits have a form of their own"

REFUSED = (
    RefusedFamily(
        "Gemma 3n, Gemma 4",
        "Gemma 3n E4B, Gemma 4 31B",
        "its norms and embeddings have forms of their own",
        {"model_type": "gemma3n", "text_config": {"model_type": "gemma3n_text"}},
        OWN_FORM,
    ),
    RefusedFamily(
        "MiniCPM",
        "MiniCPM3 4B",
        "the last state is divided before the head",
        {"model_type": "minicpm3"},
        OWN_FORM,
    ),
    RefusedFamily(
        "Nemotron",
        "Nemotron-4, Minitron",
        "a LayerNorm with a bias that scales by 1 + w",
        {"model_type": "nemotron"},
        OWN_FORM,
    ),
    RefusedFamily(
        "Others whose logits are scaled or capped",
        "fine-tunes with such a field in config.json",
        "only the forms of the families above are known",
        {"model_type": "llama", "output_multiplier": 0.5},
        "transforms its logits in a way that is not known",
    ),
)
