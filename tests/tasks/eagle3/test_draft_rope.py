"""The draft's rotary tables against the verifiers' own, from configs shaped as published."""

import json
import math
from typing import Any

import pytest
import torch
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3RotaryEmbedding
from transformers.models.glm4.modeling_glm4 import Glm4RotaryEmbedding
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from transformers.models.phi3.modeling_phi3 import Phi3RotaryEmbedding
from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

from tasks.eagle3.draft import DraftSettings, draft_config
from tasks.eagle3.draft_rope import draft_rope
from tests.tasks.eagle3.rope_families import (
    ALL,
    EQUAL,
    GLM_4,
    KIMI,
    KIMI_K2_5,
    PHI_3_MINI_128K,
    PHI_4_MINI,
    Family,
    sizes,
)

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
