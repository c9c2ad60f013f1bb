"""Builders of dense families: each writes a tiny checkpoint and returns the model that it holds."""

from pathlib import Path
from typing import Any

from transformers import (
    AutoModelForCausalLM,
    Cohere2Config,
    Cohere2ForCausalLM,
    CohereConfig,
    CohereForCausalLM,
    Gemma2Config,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GraniteConfig,
    GraniteForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Phi3Config,
    Phi3ForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from tests.families.checkpoints import LAYERS, SIZES, WINDOW, save_checkpoint

ALTERNATING = ["sliding_attention", "full_attention"] * (LAYERS // 2)


def build_llama(directory: Path) -> PreTrainedModel:
    rope = {
        "rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0,
        "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    }  # fmt: skip
    config = LlamaConfig(**SIZES, rms_norm_eps=1e-5, rope_parameters=rope)
    return save_checkpoint(LlamaForCausalLM(config), directory)


def build_mistral(directory: Path) -> PreTrainedModel:
    config = MistralConfig(**SIZES, rms_norm_eps=1e-5, head_dim=16, sliding_window=WINDOW)
    return save_checkpoint(MistralForCausalLM(config), directory)


def build_qwen2(directory: Path) -> PreTrainedModel:
    config = Qwen2Config(
        **SIZES, tie_word_embeddings=True, use_sliding_window=True, sliding_window=WINDOW,
        max_window_layers=2,
    )  # fmt: skip
    return save_checkpoint(Qwen2ForCausalLM(config), directory)


def build_qwen3(directory: Path) -> PreTrainedModel:
    config = Qwen3Config(**SIZES, head_dim=16)
    return save_checkpoint(Qwen3ForCausalLM(config), directory)


def build_phi3(directory: Path) -> PreTrainedModel:
    config = Phi3Config(**SIZES, sliding_window=WINDOW)
    return save_checkpoint(Phi3ForCausalLM(config), directory)


def build_phi4_mini(directory: Path) -> PreTrainedModel:
    pairs = 6  # 0.75 of a head of 16, in pairs
    rope = {
        "rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.75,
        "short_factor": [1.0] * pairs, "long_factor": [1.0 + i for i in range(pairs)],
    }  # fmt: skip
    config = Phi3Config(
        **SIZES,
        tie_word_embeddings=True,
        original_max_position_embeddings=128,
        rope_parameters=rope,
    )
    return save_checkpoint(Phi3ForCausalLM(config), directory)


def build_gemma2(directory: Path) -> PreTrainedModel:
    config = Gemma2Config(
        **SIZES, head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW, layer_types=ALTERNATING,
        attn_logit_softcapping=2.0, final_logit_softcapping=6.0,
    )  # fmt: skip
    # transformers' sdpa would leave the cap of the scores out
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    return save_checkpoint(model, directory, one_plus_norms=True)


def gemma3_config(**changes: Any) -> Gemma3TextConfig:
    return Gemma3TextConfig(
        **SIZES, head_dim=16, query_pre_attn_scalar=24, sliding_window=WINDOW,
        sliding_window_pattern=3, **changes,
    )  # fmt: skip


def build_gemma3_text(directory: Path) -> PreTrainedModel:
    return save_checkpoint(Gemma3ForCausalLM(gemma3_config()), directory, one_plus_norms=True)


def build_cohere(directory: Path) -> PreTrainedModel:
    config = CohereConfig(**SIZES, logit_scale=0.25, use_qk_norm=True)
    return save_checkpoint(CohereForCausalLM(config), directory)


def build_cohere2(directory: Path) -> PreTrainedModel:
    config = Cohere2Config(
        **SIZES, logit_scale=0.25, sliding_window=WINDOW, layer_types=ALTERNATING
    )
    return save_checkpoint(Cohere2ForCausalLM(config), directory)


def build_granite(directory: Path) -> PreTrainedModel:
    config = GraniteConfig(
        **SIZES, tie_word_embeddings=True, embedding_multiplier=8.0, residual_multiplier=0.7,
        attention_multiplier=0.2, logits_scaling=4.0,
    )  # fmt: skip
    return save_checkpoint(GraniteForCausalLM(config), directory)
