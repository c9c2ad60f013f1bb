"""The draft's rotary tables against the verifiers' own, from configs shaped as published."""

import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
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

from tasks.eagle3.draft import DraftSettings, draft_config
from tasks.eagle3.draft_rope import draft_rope

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

POSITIONS = torch.tensor([[0, 1, 4096, 32_768, 100_000]])
SPELLINGS = pytest.mark.parametrize("spelling", ["published", "transformers 5"])

# What vLLM 0.32 reads of each rope type (rotary_embedding/__init__.py), and longrope's `factor`, without
# which transformers warns.
SERVED_KEYS = {
    "default": {"mrope_section"},
    "linear": {"factor"},
    "llama3": {
        "factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings",
    },
    "yarn": {
        "factor", "original_max_position_embeddings", "beta_fast", "beta_slow", "truncate",
        "attention_factor", "mrope_section",
    },
    "longrope": {"factor", "short_factor", "long_factor", "original_max_position_embeddings"},
}  # fmt: skip


def layer_config(text_config: dict[str, Any], **settings: Any) -> Any:
    config = draft_config(
        text_config,
        draft_vocab_size=500,
        layer_ids=[2, 6, 9],
        settings=DraftSettings(**settings),
        verifier_name_or_path="none",
        verifier_architectures=["none"],
        draft_tokens=3,
    )
    # as it comes back from the checkpoint's config.json
    return type(config).from_dict(json.loads(config.to_json_string())).transformer_layer_config


def draft_rotary(text_config: dict[str, Any], **settings: Any) -> Any:
    config = layer_config(text_config, **settings)
    return (Qwen3RotaryEmbedding if config.model_type == "qwen3" else LlamaRotaryEmbedding)(config)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@SPELLINGS
@pytest.mark.parametrize("family", EQUAL.values(), ids=EQUAL.keys())
def test_where_verifiers_turn_whole_heads_the_tables_are_theirs(
    family: Family, spelling: str, arch: str
) -> None:
    rotary = draft_rotary(family.text_config(spelling), arch=arch)
    ours, theirs = rotary(torch.zeros(1), POSITIONS), family.tables(POSITIONS)
    for mine, table in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, table, rtol=0, atol=1e-6)


@SPELLINGS
@pytest.mark.parametrize("family", ALL.values(), ids=ALL.keys())
def test_the_parameters_are_flat_and_all_of_them_are_served(family: Family, spelling: str) -> None:
    config = layer_config(family.text_config(spelling))
    rope = config.rope_parameters
    assert rope.keys() <= {"rope_type", "rope_theta"} | SERVED_KEYS[rope["rope_type"]]
    assert not [value for value in rope.values() if value is None or isinstance(value, dict)]
    assert config.max_position_embeddings == family.published["max_position_embeddings"]


@SPELLINGS
def test_longrope_is_the_verifiers_long_table_at_every_position(spelling: str) -> None:
    # Which table a server takes depends on its own longest sequence; the draft has but one.
    rotary = draft_rotary(PHI_3_MINI_128K.text_config(spelling))
    theirs = PHI_3_MINI_128K.tables(POSITIONS)  # of a batch longer than 4,096: the long one
    for mine, table in zip(rotary(torch.zeros(1), POSITIONS), theirs, strict=True):
        torch.testing.assert_close(mine, table, rtol=0, atol=1e-6)
    short = torch.arange(64)[None]
    for mine, table in zip(
        rotary(torch.zeros(1), short),
        PHI_3_MINI_128K.tables(torch.cat([short, POSITIONS], dim=1)),
        strict=True,
    ):
        torch.testing.assert_close(mine, table[:, :64], rtol=0, atol=1e-6)


def yarn_by_hand(config: dict[str, Any], width: int) -> list[float]:
    """YaRN's inverse frequencies (arXiv 2309.00071, section 3.2), one by one."""
    theta, original, factor = config["rope_theta"], 4096, 64.0

    def dimension(turns: float) -> float:
        """The dimension that makes `turns` turns within the original context."""
        return width / 2 * math.log(original / (turns * 2 * math.pi)) / math.log(theta)

    low, high = math.floor(dimension(32)), math.ceil(dimension(1))
    frequencies = []
    for i in range(width // 2):
        plain = theta ** (-2 * i / width)
        stretched = min(max((i - low) / (high - low), 0.0), 1.0)
        frequencies.append(plain * (1 - stretched) + plain / factor * stretched)
    return frequencies


@SPELLINGS
def test_kimis_draft_has_its_yarn_at_the_drafts_own_head_width(spelling: str) -> None:
    # Kimi-K2.5 turns 64 channels beside its latent ones; the draft's heads are 7168 / 64 = 112 wide.
    draft = draft_rotary(KIMI_K2_5.text_config(spelling))
    verifier: Any = DeepseekV3RotaryEmbedding(KIMI_K2_5.verifier())
    for rotary, width in ((verifier, 64), (draft, 112)):
        expected = torch.tensor(yarn_by_hand(KIMI, width))
        torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-5, atol=0)
    # mscale = mscale_all_dim = 1: cos and sin are not scaled. Without the two, YaRN would by 1.42.
    assert draft.attention_scaling == verifier.attention_scaling == 1.0
    assert draft.config.rope_parameters["attention_factor"] == 1.0
    # where both turn by the same plain theta, the fastest pair, the tables meet
    ours, theirs = draft(torch.zeros(1), POSITIONS), KIMI_K2_5.tables(POSITIONS)
    for mine, table in zip(ours, theirs, strict=True):
        assert torch.equal(mine[..., 0], table[..., 0])


@pytest.mark.parametrize(("mscale", "expected"), [(0.707, 1.0), (1.0, 1.4159 / 1.2940)])
def test_deepseeks_mscale_pair_becomes_the_factor_it_means(mscale: float, expected: float) -> None:
    rope = {**KIMI["rope_scaling"], "mscale": mscale, "mscale_all_dim": 0.707}
    text_config = {**KIMI, "rope_scaling": rope}
    # 0.1 * ln 64 + 1 = 1.4159; 0.1 * 0.707 * ln 64 + 1 = 1.2940
    factor = draft_rope(text_config, head_dim=112)["attention_factor"]
    assert factor == pytest.approx(expected, rel=1e-4)


@SPELLINGS
def test_glm4s_draft_turns_whole_heads_by_its_theta(spelling: str) -> None:
    # GLM-4 turns the first 64 of 128 channels, in neighboring pairs. Llama and Qwen3 layers turn all
    # of them, in halves: which channels pair up is a permutation that the projections learn.
    draft = draft_rotary(GLM_4.text_config(spelling))
    verifier: Any = Glm4RotaryEmbedding(GLM_4.verifier())
    for rotary, width in ((verifier, 64), (draft, 128)):
        expected = torch.tensor([10_000.0 ** (-2 * i / width) for i in range(width // 2)])
        torch.testing.assert_close(rotary.inv_freq, expected, rtol=1e-5, atol=0)
    # every other pair of the draft turns as a pair of the verifier does
    torch.testing.assert_close(draft.inv_freq[::2], verifier.inv_freq, rtol=1e-5, atol=0)


@SPELLINGS
def test_phi4_minis_factors_are_taken_at_the_drafts_own_frequencies(spelling: str) -> None:
    # 48 factors for 96 of 128 channels; the draft's 64 frequencies lie at 0.75 of a step of theirs.
    draft = draft_rotary(PHI_4_MINI.text_config(spelling))
    assert (
        draft.config.rope_parameters["short_factor"] == draft.config.rope_parameters["long_factor"]
    )
    expected = [1.0 + 0.35 * min(0.75 * i, 47.0) for i in range(64)]
    assert draft.config.rope_parameters["long_factor"] == pytest.approx(expected)
    # every fourth frequency of the draft is every third of the verifier's, scaled alike
    verifier: Any = Phi3RotaryEmbedding(PHI_4_MINI.verifier())
    verifier(torch.zeros(1), POSITIONS)
    torch.testing.assert_close(draft.inv_freq[::4], verifier.inv_freq[::3], rtol=1e-5, atol=0)
    assert draft.attention_scaling == verifier.attention_scaling
    assert draft.attention_scaling == pytest.approx(math.sqrt(1 + math.log(32) / math.log(4096)))


@pytest.mark.parametrize("name", ["su", "yarn"])
def test_older_names_of_longrope_are_understood(name: str) -> None:
    published = PHI_3_MINI_128K.published
    renamed = {**published, "rope_scaling": {**published["rope_scaling"], "type": name}}
    assert draft_rope(renamed, head_dim=96) == draft_rope(published, head_dim=96)


def test_another_attention_factor_of_longrope_reaches_both_libraries() -> None:
    rope = {**PHI_3_MINI_128K.published["rope_scaling"], "long_mscale": 1.25}
    text_config = {**PHI_3_MINI_128K.published, "rope_scaling": rope}
    ours = draft_rope(text_config, head_dim=96)
    assert ours["attention_factor"] == 1.25  # transformers
    assert ours["long_mscale"] == ours["short_mscale"] == 1.25  # vLLM


@pytest.mark.parametrize("partial_at", ["top", "rope"])
def test_sections_of_a_partly_turned_head_are_scaled_to_the_whole(partial_at: str) -> None:
    # GLM-4.1V writes partial_rotary_factor beside its rope, Qwen3.5 into it.
    rope: dict[str, Any] = {"rope_type": "default", "mrope_section": [8, 12, 12]}
    text_config = sizes(4096, 32, 2, 65_536, rope_theta=10_000.0)
    if partial_at == "rope":
        rope["partial_rotary_factor"] = 0.5
    else:
        text_config["partial_rotary_factor"] = 0.5
    ours = draft_rope({**text_config, "rope_scaling": rope}, head_dim=128)
    assert ours["mrope_section"] == [16, 24, 24]
    with pytest.raises(ValueError, match="covers 96 of head_dim 128"):
        draft_rope(
            {**text_config, "rope_scaling": {**rope, "mrope_section": [8, 8, 8]}}, head_dim=128
        )


def test_a_dynamic_rope_is_plain_within_its_trained_context() -> None:
    text_config = sizes(2048, 16, 16, 4096, rope_theta=10_000.0)
    scaling = {"type": "dynamic", "factor": 4.0}
    plain = draft_rope({**text_config, "rope_scaling": scaling}, head_dim=128)
    assert plain == {"rope_type": "default", "rope_theta": 10_000.0}
    # Hunyuan's alpha is a fixed theta: theta * alpha ** (width / (width - 2))
    fixed = draft_rope({**text_config, "rope_scaling": {**scaling, "alpha": 1000.0}}, head_dim=128)
    assert fixed["rope_theta"] == pytest.approx(10_000.0 * 1000.0 ** (128 / 126))


@pytest.mark.parametrize(
    ("model_type", "theta"), [("gpt_oss", 150_000.0), ("gemma3_text", 1e6), ("unknown", 10_000.0)]
)
def test_a_theta_left_to_the_config_class_is_looked_up_there(model_type: str, theta: float) -> None:
    text_config = sizes(2880, 64, 8, 4096, model_type=model_type)
    assert draft_rope(text_config, head_dim=64)["rope_theta"] == theta


def test_a_rope_that_no_draft_has_is_refused_with_the_way_out() -> None:
    text_config = sizes(2048, 16, 16, 4096, rope_scaling={"rope_type": "spiral"})
    with pytest.raises(ValueError, match=r"rope_type 'spiral' is none .* named in draft\.config"):
        draft_rope(text_config, head_dim=128)


def test_a_rope_without_its_factors_is_refused() -> None:
    text_config = sizes(2048, 16, 16, 4096, rope_scaling={"rope_type": "llama3", "factor": 8.0})
    with pytest.raises(ValueError, match="llama3 has no low_freq_factor, high_freq_factor"):
        draft_rope(text_config, head_dim=128)
