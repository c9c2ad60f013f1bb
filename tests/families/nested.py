"""Builders of families whose language model lies inside a composite one, beside towers that are not loaded."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV3ForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    Llama4ForCausalLM,
    Llama4TextConfig,
    Ministral3Config,
    Ministral3ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    PreTrainedModel,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
)

from tests.families.checkpoints import (
    SIZES,
    WINDOW,
    nest_config,
    rewrite_config,
    rewrite_weights,
    save_checkpoint,
)
from tests.families.dense import gemma3_config
from tests.families.experts import deepseek_config
from tests.families.int4 import round_experts, store_packed

VISION = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}


def tower(*keys: str) -> dict[str, Tensor]:
    """Tensors of a vision tower or a projector: what matters is their names."""
    return {key: torch.ones(8) for key in keys}


def build_kimi_k25(directory: Path) -> PreTrainedModel:
    model = save_checkpoint(DeepseekV3ForCausalLM(deepseek_config()), directory)
    _as_kimi_k25(directory)
    return model


def build_kimi_k25_int4(directory: Path) -> PreTrainedModel:
    """The model returned has the experts that INT4 leaves, in plain fp32."""
    save_checkpoint(DeepseekV3ForCausalLM(deepseek_config()), directory)
    packed = round_experts(directory)
    model = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    store_packed(directory, packed)
    _as_kimi_k25(directory)
    return model.eval()


def _as_kimi_k25(directory: Path) -> None:
    rewrite_weights(
        directory,
        lambda key: f"language_model.{key}",
        **tower("vision_tower.encoder.final_layernorm.weight", "mm_projector.pre_norm.weight"),
    )
    top = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "vision_config": VISION,
        "tie_word_embeddings": False,
    }
    # as published; transformers' own class of that name takes it for deepseek_v3
    nest_config(directory, top, model_type="kimi_k2")


def build_qwen3_5(directory: Path) -> PreTrainedModel:
    config = Qwen3_5TextConfig(
        **SIZES, head_dim=16, linear_key_head_dim=16, linear_value_head_dim=16, linear_num_key_heads=2,
        linear_num_value_heads=4,
        layer_types=["linear_attention", "linear_attention", "full_attention"] * 2,
    )  # fmt: skip
    model = save_checkpoint(Qwen3_5ForCausalLM(config), directory, one_plus_norms=True)
    rewrite_weights(
        directory,
        lambda key: key if key.startswith("lm_head") else key.replace("model.", "model.language_model.", 1),
        **tower("model.visual.merger.norm.weight", "mtp.norm.weight", "mtp.layers.0.input_layernorm.weight"),
    )  # fmt: skip
    top = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "vision_config": {"depth": 1, "hidden_size": 8},
        "tie_word_embeddings": False,
    }
    nest_config(directory, top)
    return model


def build_gemma3(directory: Path) -> PreTrainedModel:
    model = save_checkpoint(Gemma3ForCausalLM(gemma3_config()), directory, one_plus_norms=True)
    rewrite_weights(
        directory,
        lambda key: f"language_model.{key}",
        **tower(
            "vision_tower.vision_model.post_layernorm.weight",
            "multi_modal_projector.mm_soft_emb_norm.weight",
        ),
    )
    top = {
        "model_type": "gemma3",
        "architectures": ["Gemma3ForConditionalGeneration"],
        "vision_config": VISION,
    }
    nest_config(directory, top)
    rewrite_config(directory, _without_defaults)
    return model


def _without_defaults(config: dict[str, Any]) -> dict[str, Any]:
    """Leave out of a Gemma-3 config what is as in its class, as published ones do."""
    defaults = Gemma3TextConfig().to_dict()
    text = {k: v for k, v in config["text_config"].items() if k not in defaults or defaults[k] != v}
    return config | {"text_config": text}


def build_mistral3(directory: Path) -> PreTrainedModel:
    config = MistralConfig(**SIZES, rms_norm_eps=1e-5, head_dim=16, sliding_window=None)
    model = save_checkpoint(MistralForCausalLM(config), directory)
    return _as_mistral3(model, directory)


def build_ministral3(directory: Path) -> PreTrainedModel:
    rope = {
        "rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0,
        "llama_4_scaling_beta": 0.1,
    }  # fmt: skip
    config = Ministral3Config(**SIZES, rms_norm_eps=1e-5, head_dim=16, rope_parameters=rope)
    model = save_checkpoint(Ministral3ForCausalLM(config), directory)
    return _as_mistral3(model, directory)


def _as_mistral3(model: PreTrainedModel, directory: Path) -> PreTrainedModel:
    rewrite_weights(
        directory,
        lambda key: f"language_model.{key}",
        **tower("vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight"),
    )
    top = {
        "model_type": "mistral3",
        "architectures": ["Mistral3ForConditionalGeneration"],
        "vision_config": VISION | {"model_type": "pixtral"},
    }
    # no tie_word_embeddings on top, where transformers' default is true: the head's own tensor decides
    nest_config(directory, top)
    return model


def build_llama4(directory: Path, *, floor_scale: int = 8192) -> PreTrainedModel:
    """From `floor_scale` tokens on the layers without rotation scale their queries by position."""
    config = Llama4TextConfig(
        **SIZES, head_dim=16, intermediate_size_mlp=96, num_local_experts=4, num_experts_per_tok=1,
        interleave_moe_layer_step=2, no_rope_layer_interval=3, attention_chunk_size=WINDOW,
        floor_scale=floor_scale, attn_scale=0.5,
    )  # fmt: skip
    model = save_checkpoint(Llama4ForCausalLM(config), directory)
    rewrite_weights(
        directory,
        lambda key: f"language_model.{key}",
        **tower("vision_model.layernorm_pre.weight", "multi_modal_projector.linear_1.weight"),
    )
    top = {
        "model_type": "llama4",
        "architectures": ["Llama4ForConditionalGeneration"],
        "vision_config": VISION | {"model_type": "llama4_vision_model"},
        "tie_word_embeddings": False,
    }
    nest_config(directory, top)
    return model
