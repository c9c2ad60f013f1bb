"""Verifiers' configs, shaped as published, and the classes that make their rotary tables."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    DeepseekV3Config,
    Gemma3TextConfig,
    Glm4Config,
    GptOssConfig,
    LlamaConfig,
    MistralConfig,
    Phi3Config,
    PretrainedConfig,
    Qwen3Config,
)
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.gemma3.modeling_gemma3 import Gemma3RotaryEmbedding
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssRotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.ministral3.configuration_ministral3 import Ministral3Config
from transformers.models.ministral3.modeling_ministral3 import Ministral3RotaryEmbedding
from transformers.models.mistral.modeling_mistral import MistralRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen2_5_vl.configuration_qwen2_5_vl import Qwen2_5_VLTextConfig
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLRotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

Tables = tuple[Tensor, Tensor]

KIMI = json.loads((Path(__file__).parents[2] / "fixtures" / "kimi_k2_5_config.json").read_text())[
    "text_config"
]

PHI_LONG = [1.0 + 0.35 * i for i in range(48)]
PHI_SHORT = [1.0 + 0.02 * i for i in range(48)]


@dataclass(frozen=True)
class Family:
    """A verifier's config as published before transformers 5, and who makes its tables."""

    config: type[PretrainedConfig]
    rotary: Callable[[Any], torch.nn.Module]
    published: dict[str, Any]
    call: dict[str, Any] = field(default_factory=dict)

    def text_config(self, spelling: str) -> dict[str, Any]:
        if spelling == "published":
            return {**self.published, "model_type": self.config.model_type}
        return json.loads(json.dumps(self.verifier().to_dict()))

    def verifier(self) -> PretrainedConfig:
        return self.config(**json.loads(json.dumps(self.published)))

    def tables(self, positions: Tensor) -> Tables:
        if self.rotary is Qwen2_5_VLRotaryEmbedding:  # text: all three axes are the same
            positions = positions[None].expand(3, -1, -1)
        cos, sin = self.rotary(self.verifier())(torch.zeros(1), positions, **self.call)
        if self.rotary is GptOssRotaryEmbedding:  # it keeps one of the two equal halves
            cos, sin = torch.cat([cos, cos], -1), torch.cat([sin, sin], -1)
        return cos, sin


def sizes(hidden: int, heads: int, kv_heads: int, positions: int, **more: Any) -> dict[str, Any]:
    return {
        "hidden_size": hidden, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "max_position_embeddings": positions, "intermediate_size": 2 * hidden, "vocab_size": 1000,
        "num_hidden_layers": 12, "rms_norm_eps": 1e-5, "hidden_act": "silu", "pad_token_id": None,
        **more,
    }  # fmt: skip


EQUAL: dict[str, Family] = {
    "Llama-3.1-8B": Family(
        LlamaConfig, LlamaRotaryEmbedding,
        sizes(4096, 32, 8, 131_072, rope_theta=500_000.0, rope_scaling={
            "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192, "rope_type": "llama3",
        }),
    ),
    "Qwen3-8B": Family(
        Qwen3Config, Qwen3RotaryEmbedding,
        sizes(4096, 32, 8, 40_960, head_dim=128, rope_theta=1_000_000.0, rope_scaling=None),
    ),
    "Qwen3-8B, YaRN": Family(
        Qwen3Config, Qwen3RotaryEmbedding,
        sizes(4096, 32, 8, 131_072, head_dim=128, rope_theta=1_000_000.0, rope_scaling={
            "rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32_768,
        }),
    ),
    "Qwen2.5-VL-7B": Family(
        Qwen2_5_VLTextConfig, Qwen2_5_VLRotaryEmbedding,
        sizes(3584, 28, 4, 128_000, rope_theta=1_000_000.0, rope_scaling={
            "type": "mrope", "mrope_section": [16, 24, 24],
        }),
    ),
    "Phi-4": Family(
        Phi3Config, Phi3RotaryEmbedding,
        sizes(5120, 40, 10, 16_384, rope_theta=250_000.0, rope_scaling=None,
              original_max_position_embeddings=16_384),
    ),
    "gpt-oss-20b": Family(
        GptOssConfig, GptOssRotaryEmbedding,
        sizes(2880, 64, 8, 131_072, head_dim=64, rope_theta=150_000.0, rope_scaling={
            "rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096,
            "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
        }),
    ),
    "Mistral-Small-3.1": Family(
        MistralConfig, MistralRotaryEmbedding,
        sizes(5120, 32, 8, 131_072, head_dim=128, rope_theta=1_000_000_000.0),
    ),
    "Ministral-3-8B": Family(
        Ministral3Config, Ministral3RotaryEmbedding,
        sizes(4096, 32, 8, 262_144, head_dim=128, rope_parameters={
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 16.0, "llama_4_scaling_beta": 0.1,
            "mscale": 1.0, "mscale_all_dim": 1.0, "original_max_position_embeddings": 16_384,
            "rope_theta": 1_000_000.0, "rope_type": "yarn", "type": "yarn",
        }),
    ),
    "Gemma-3-27B": Family(
        Gemma3TextConfig, Gemma3RotaryEmbedding,
        sizes(5376, 32, 16, 131_072, head_dim=128, rope_theta=1_000_000.0,
              rope_local_base_freq=10_000.0, rope_scaling={"factor": 8.0, "rope_type": "linear"}),
        call={"layer_type": "full_attention"},
    ),
}  # fmt: skip

PHI_3_MINI_128K = Family(
    Phi3Config, Phi3RotaryEmbedding,
    sizes(3072, 32, 32, 131_072, rope_theta=10_000.0, original_max_position_embeddings=4096,
          rope_scaling={"type": "longrope", "long_factor": PHI_LONG, "short_factor": PHI_SHORT}),
)  # fmt: skip
PHI_4_MINI = Family(
    Phi3Config, Phi3RotaryEmbedding,
    sizes(3072, 24, 8, 131_072, rope_theta=10_000.0, original_max_position_embeddings=4096,
          partial_rotary_factor=0.75,
          rope_scaling={"type": "longrope", "long_factor": PHI_LONG, "short_factor": PHI_SHORT}),
)  # fmt: skip
GLM_4 = Family(
    Glm4Config, Glm4RotaryEmbedding,
    sizes(4096, 32, 2, 32_768, head_dim=128, rope_theta=10_000.0, partial_rotary_factor=0.5),
)  # fmt: skip
KIMI_K2_5 = Family(DeepseekV3Config, DeepseekV3RotaryEmbedding, {**KIMI, "pad_token_id": None})

WIDTH_DIFFERS = {"Kimi-K2.5": KIMI_K2_5, "GLM-4-9B": GLM_4, "Phi-4-mini": PHI_4_MINI}
ALL = {**EQUAL, "Phi-3-mini-128k": PHI_3_MINI_128K, **WIDTH_DIFFERS}
