"""Builders of mixture-of-experts families, their experts stored as the published checkpoints store them."""

import shutil
from pathlib import Path
from typing import Any

import torch
from transformers import (
    DeepseekV3Config,
    DeepseekV3ForCausalLM,
    Glm4MoeConfig,
    Glm4MoeForCausalLM,
    GptOssConfig,
    GptOssForCausalLM,
    PreTrainedModel,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
)

from tests.families import fp8, mxfp4
from tests.families.checkpoints import (
    HIDDEN,
    LAYERS,
    SIZES,
    WINDOW,
    rewrite_config,
    rewrite_weights,
    save_checkpoint,
)
from tests.tiny_models import VOCAB_SIZE

REMOTE_CODE = Path(__file__).parent / "remote_code"

ROUTING: dict[str, Any] = {
    "moe_intermediate_size": 32, "n_routed_experts": 4, "n_shared_experts": 1, "n_group": 2,
    "topk_group": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.5,
}  # fmt: skip


def build_qwen3_moe(directory: Path) -> PreTrainedModel:
    config = Qwen3MoeConfig(
        **SIZES, head_dim=16, moe_intermediate_size=32, num_experts=4, num_experts_per_tok=2,
        norm_topk_prob=True, mlp_only_layers=[1],
    )  # fmt: skip
    return save_checkpoint(Qwen3MoeForCausalLM(config), directory)


def deepseek_config(**changes: Any) -> DeepseekV3Config:
    rope = {
        "rope_type": "yarn", "rope_theta": 10000.0, "factor": 4.0, "beta_fast": 32.0, "beta_slow": 1.0,
        "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 128,
    }  # fmt: skip
    sizes = SIZES | {"num_key_value_heads": 4}
    return DeepseekV3Config(
        **sizes, **ROUTING, q_lora_rank=24, kv_lora_rank=16, qk_rope_head_dim=8, qk_nope_head_dim=16,
        v_head_dim=16, rope_parameters=rope, **changes,
    )  # fmt: skip


def build_deepseek_v3(directory: Path) -> PreTrainedModel:
    model = save_checkpoint(DeepseekV3ForCausalLM(deepseek_config()), directory)
    _add_prediction_layer(directory)
    return model


def build_deepseek_v3_fp8(directory: Path) -> PreTrainedModel:
    """The model returned has the weights that fp8 leaves, in fp32."""
    save_checkpoint(DeepseekV3ForCausalLM(deepseek_config()), directory)
    published = fp8.round_weights(directory)
    model = DeepseekV3ForCausalLM.from_pretrained(directory, dtype=torch.float32)
    fp8.store_published(directory, published)
    return model.eval()


def build_kimi_k2(directory: Path) -> PreTrainedModel:
    """Kimi-K2 as published: DeepSeek-V3 under another name, with code that must not be needed (it is not there)."""
    model = save_checkpoint(DeepseekV3ForCausalLM(deepseek_config()), directory)
    named = {
        "model_type": "kimi_k2",
        "auto_map": {
            "AutoConfig": "configuration_deepseek.DeepseekV3Config",
            "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
        },
    }
    rewrite_config(directory, lambda config: config | named)
    return model


def build_remote_code(directory: Path) -> PreTrainedModel:
    """A model type that transformers does not know, its code beside the weights."""
    model = save_checkpoint(DeepseekV3ForCausalLM(deepseek_config()), directory)
    for source in REMOTE_CODE.glob("*.py"):
        shutil.copy(source, directory)
    own = {
        "model_type": "own_moe",
        "architectures": ["OwnMoeForCausalLM"],
        "auto_map": {
            "AutoConfig": "configuration_own.OwnMoeConfig",
            "AutoModelForCausalLM": "modeling_own.OwnMoeForCausalLM",
        },
    }
    rewrite_config(directory, lambda config: config | own)
    return model


def build_glm4_moe(directory: Path) -> PreTrainedModel:
    config = Glm4MoeConfig(
        **SIZES, **ROUTING, head_dim=16, use_qk_norm=True, attention_bias=True,
        partial_rotary_factor=0.5, num_nextn_predict_layers=1,
    )  # fmt: skip
    model = save_checkpoint(Glm4MoeForCausalLM(config), directory)
    _add_prediction_layer(directory)
    return model


def build_gpt_oss(directory: Path) -> PreTrainedModel:
    config = GptOssConfig(
        **SIZES, head_dim=16, sliding_window=WINDOW, num_local_experts=4, num_experts_per_tok=2
    )
    return save_checkpoint(GptOssForCausalLM(config), directory)


def build_gpt_oss_mxfp4(directory: Path) -> PreTrainedModel:
    """The model returned has the experts that MXFP4 leaves, in fp32."""
    build_gpt_oss(directory)
    packed = mxfp4.round_experts(directory)
    model = GptOssForCausalLM.from_pretrained(directory, dtype=torch.float32)
    mxfp4.store_packed(directory, packed)
    return model.eval()


def _add_prediction_layer(directory: Path) -> None:
    """Put a multi-token-prediction layer behind the last, which has an embedding, norms and a head of its own."""
    layer = f"model.layers.{LAYERS}"
    rewrite_weights(
        directory,
        lambda key: key,
        **{
            f"{layer}.embed_tokens.weight": torch.randn(VOCAB_SIZE, HIDDEN),
            f"{layer}.enorm.weight": torch.ones(HIDDEN),
            f"{layer}.eh_proj.weight": torch.randn(HIDDEN, 2 * HIDDEN),
            f"{layer}.shared_head.norm.weight": torch.ones(HIDDEN),
            f"{layer}.shared_head.head.weight": torch.randn(VOCAB_SIZE, HIDDEN),
        },
    )
