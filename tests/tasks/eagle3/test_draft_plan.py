"""A draft described by a file: what is read, and one clear refusal for each way it can be wrong."""

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError
from transformers import LlamaConfig, Qwen3Config

from tasks.eagle3.draft import draft_config
from tasks.eagle3.draft_plan import DraftPlan, plan_draft
from tasks.eagle3.draft_settings import DraftSettings
from tests.tasks.eagle3.draft_cases import HIDDEN, TEXT_CONFIG, VOCAB

LAYER: dict[str, Any] = {
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "vocab_size": VOCAB,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 32,
    "hidden_act": "silu",
    "max_position_embeddings": 512,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 7.0},
}


def write(path: Path, values: Any) -> str:
    path.write_text(values if isinstance(values, str) else json.dumps(values))
    return str(path)


def plan(path: str, **settings: Any) -> DraftPlan:
    return plan_draft(DraftSettings(config=path, **settings), TEXT_CONFIG)


def config_of(plan: DraftPlan) -> Any:
    return draft_config(
        TEXT_CONFIG,
        draft_vocab_size=128,
        layer_ids=[2, 6, 9],
        settings=plan.settings,
        layer=plan.layer,
        verifier_name_or_path="none",
        verifier_architectures=["LlamaForCausalLM"],
        draft_tokens=3,
    )


def test_the_files_layer_becomes_the_drafts(tmp_path: Path) -> None:
    layer = config_of(plan(write(tmp_path / "draft.json", LAYER))).transformer_layer_config
    for field, value in LAYER.items():
        assert getattr(layer, field) == value, field
    assert (layer.attention_bias, layer.num_aux_hidden_states) == (False, 3)


@pytest.mark.parametrize("made_by", [LlamaConfig, Qwen3Config])
def test_a_config_saved_by_transformers_is_read(made_by: Any, tmp_path: Path) -> None:
    values = {key: value for key, value in LAYER.items() if key != "model_type"}
    made_by(**values).save_pretrained(tmp_path)
    read = plan(str(tmp_path / "config.json")).layer
    assert read["model_type"] == made_by.model_type
    assert read | {"model_type": "llama"} == plan(write(tmp_path / "draft.json", LAYER)).layer


def test_the_config_of_a_trained_speculator_gives_the_same_draft_again(tmp_path: Path) -> None:
    derived = plan_draft(DraftSettings(arch="qwen3", norm_before_fc=True), TEXT_CONFIG)
    config_of(derived).save_pretrained(tmp_path)
    again = plan(str(tmp_path / "config.json"), norm_before_fc=True)
    assert again.layer == derived.layer
    assert again.identity() == derived.identity()


def test_norms_of_a_speculator_that_the_settings_do_not_ask_for_are_refused(tmp_path: Path) -> None:
    config_of(plan_draft(DraftSettings(fc_norm=True), TEXT_CONFIG)).save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"fc_norm is True, the setting draft\.fc_norm is False"):
        plan(str(tmp_path / "config.json"))


@pytest.mark.parametrize(
    ("written", "meant"),
    [("head_dims", "head_dim"), ("num_key_value_head", "num_key_value_heads")],
)
def test_a_slip_in_a_name_is_refused_with_the_name_that_was_meant(
    written: str, meant: str, tmp_path: Path
) -> None:
    path = write(tmp_path / "draft.json", {**LAYER, written: 16})
    with pytest.raises(ValueError, match=f"{written} means nothing to a draft; write {meant}"):
        plan(path)


def test_the_identity_is_the_content_and_not_the_path(tmp_path: Path) -> None:
    here = plan(write(tmp_path / "here.json", LAYER)).identity()
    reordered = dict(reversed(LAYER.items()))
    there = plan(write(tmp_path / "there.json", json.dumps(reordered, indent=3))).identity()
    wider = plan(write(tmp_path / "here.json", {**LAYER, "intermediate_size": 81})).identity()
    assert here == there
    assert "json" not in json.dumps(here)
    assert here != wider


def test_every_setting_of_the_draft_is_in_its_identity() -> None:
    plain = plan_draft(DraftSettings(), TEXT_CONFIG).identity()
    for change in (
        {"arch": "qwen3"},
        {"num_layers": 2},
        {"intermediate_size": 97},
        {"norm_before_fc": True},
        {"fc_norm": True},
        {"norm_output": True},
        {"norm_before_residual": True},
    ):
        settings = DraftSettings.model_validate(change)
        assert plan_draft(settings, TEXT_CONFIG).identity() != plain, change


def test_sizes_left_out_follow_from_the_others(tmp_path: Path) -> None:
    left_out = ("head_dim", "num_key_value_heads", "hidden_act")
    values = {key: value for key, value in LAYER.items() if key not in left_out}
    layer = plan(write(tmp_path / "draft.json", values)).layer
    assert (layer["head_dim"], layer["num_key_value_heads"]) == (HIDDEN // 8, 8)
    assert layer["hidden_act"] == "silu"


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "another hidden size": (
        {"hidden_size": 128},
        r"hidden_size 128 differs from the verifier's 64, .*; write 64",
    ),
    "another vocabulary": ({"vocab_size": 299}, r"vocab_size 299 differs .* 300, .*; write 300"),
    "another eps": (
        {"rms_norm_eps": 1e-6},
        r"rms_norm_eps 1e-06 .* verifier's 1e-05, .*final norm",
    ),
    "too many layers": (
        {"num_hidden_layers": 3},
        r"3 exceeds the 2 that a draft can have; write 1",
    ),
    "no layers": ({"num_hidden_layers": 0}, r"num_hidden_layers is 0; write a positive"),
    "a missing size": ({"intermediate_size": None}, r"intermediate_size is None; write a positive"),
    "heads that do not divide": (
        {"num_key_value_heads": 3},
        r"num_attention_heads 8 is not a multiple of num_key_value_heads 3",
    ),
    "a width that heads do not divide": (
        {"num_attention_heads": 12, "head_dim": None},
        r"hidden_size 64 is not a multiple of num_attention_heads 12",
    ),
    "an odd head": ({"head_dim": 15}, r"head_dim 15 is odd, .* even head_dim"),
    "key heads below zero": (
        {"num_key_value_heads": -4},
        r"num_key_value_heads is -4; write a pos",
    ),
    "a rope that is no object": (
        {"rope_parameters": "yarn"},
        r"rope_parameters is 'yarn'; write an",
    ),
    "no head": ({"head_dim": 0}, r"head_dim is 0; write a positive"),
    "a qwen3 head that is its class's": (
        {"model_type": "qwen3", "head_dim": None},
        r"head_dim is None; write a positive",
    ),
    "another layer": (
        {"model_type": "mistral"},
        r"model_type 'mistral' is no layer that drafts have; use llama or qwen3",
    ),
    "no layer type": ({"model_type": None}, r"model_type None is no layer"),
    "another activation": ({"hidden_act": "gelu"}, r"hidden_act 'gelu' .* write 'silu'"),
    "a bias": ({"attention_bias": True}, r"attention_bias is True, .*; write false"),
    "a bias in the MLP": ({"mlp_bias": True}, r"mlp_bias is True, .*; write false"),
    "dropout": ({"attention_dropout": 0.1}, r"attention_dropout is 0.1, .*; write 0"),
    "a tied head": ({"tie_word_embeddings": True}, r"tie_word_embeddings is True"),
    "a window": ({"sliding_window": 128}, r"sliding_window 128 .* attend fully; remove it"),
    "a window in one layer": (
        {"layer_types": ["full_attention", "sliding_attention"]},
        r"layer_types \['sliding_attention'\] .* attend fully; remove it",
    ),
    "partial rotation": ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor is 0.5"),
    "partial rotation in the rope": (
        {"rope_parameters": {"rope_theta": 7.0, "partial_rotary_factor": 0.5}},
        r"partial_rotary_factor is 0.5",
    ),
    "no rope": ({"rope_parameters": None}, r"no rope_parameters; write rope_type and rope_theta"),
    "an unknown rope": (
        {"rope_parameters": {"rope_type": "spiral"}},
        r"rope_type 'spiral' is none that a draft can have",
    ),
    "more positions": (
        {"max_position_embeddings": 1024},
        r"max_position_embeddings 1024 exceeds the verifier's 512, .*; write 512",
    ),
}


@pytest.mark.parametrize(("change", "message"), REFUSED.values(), ids=REFUSED.keys())
def test_what_does_not_fit_is_refused(change: dict[str, Any], message: str, tmp_path: Path) -> None:
    values = {key: value for key, value in {**LAYER, **change}.items() if value is not None}
    path = write(tmp_path / "draft.json", values)
    with pytest.raises(ValueError, match=message) as refusal:
        plan(path)
    assert str(refusal.value).startswith(f"draft.config {path}: ")
    assert "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "it is no JSON"),
        ("[1]", "it holds a list, not an object"),
        (
            '{"transformer_layer_config": "llama"}',
            "transformer_layer_config is 'llama', not an obj",
        ),
    ],
)
def test_what_is_no_config_is_refused(content: str, message: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=message):
        plan(write(tmp_path / "draft.json", content))


def test_a_file_that_is_not_there_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"draft\.config .*none\.json: No such file"):
        plan(str(tmp_path / "none.json"))


def test_a_rope_that_stretches_may_have_more_positions(tmp_path: Path) -> None:
    yarn = {
        "rope_type": "yarn", "rope_theta": 7.0, "factor": 4.0,
        "original_max_position_embeddings": 512,
    }  # fmt: skip
    values = {**LAYER, "rope_parameters": yarn}
    layer = plan(write(tmp_path / "a.json", {**values, "max_position_embeddings": 2048})).layer
    assert layer["max_position_embeddings"] == 2048
    with pytest.raises(ValueError, match="2049 exceeds the verifier's 512"):
        plan(write(tmp_path / "b.json", {**values, "max_position_embeddings": 2049}))


def test_a_window_that_is_switched_off_is_none(tmp_path: Path) -> None:
    values = {**LAYER, "sliding_window": 4096, "use_sliding_window": False}
    assert plan(write(tmp_path / "draft.json", values)).layer["model_type"] == "llama"


def test_a_verifier_whose_rope_fits_no_draft_has_a_file_as_its_way_out(tmp_path: Path) -> None:
    verifier = {**TEXT_CONFIG, "rope_parameters": {"rope_type": "spiral"}}
    with pytest.raises(ValueError, match=r"named in draft\.config"):
        plan_draft(DraftSettings(), verifier)
    path = write(tmp_path / "draft.json", LAYER)
    assert plan_draft(DraftSettings(config=path), verifier).layer["rope_parameters"]


@pytest.mark.parametrize(
    ("name", "value"), [("arch", "qwen3"), ("num_layers", 2), ("intermediate_size", 80)]
)
def test_settings_that_the_file_decides_are_refused_beside_it(name: str, value: Any) -> None:
    with pytest.raises(
        ValidationError, match=rf"draft\.{name} {value} is set beside draft\.config d\.json"
    ):
        DraftSettings.model_validate({"config": "d.json", name: value})


def test_settings_come_back_from_a_form_that_fills_in_the_defaults() -> None:
    settings = DraftSettings(config="d.json")
    assert DraftSettings.model_validate(settings.model_dump(mode="json")) == settings


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({"intermediate_size": 10**12}, "intermediate_size"),
        ({"head_dim": 10**6}, r"num_attention_heads \* head_dim"),
        ({"initializer_range": 1.5}, "initializer_range"),
        ({"initializer_range": -1.0}, "initializer_range"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": -5.0}}, "rope_theta"),
        (
            {"rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 0.0}},
            "rope factor",
        ),
    ],
)
def test_numbers_that_no_layer_can_have_are_refused_before_anything_runs(
    tmp_path: Path, changes: dict[str, Any], name: str
) -> None:
    with pytest.raises(ValueError, match=rf"{name} is .*, which no draft can have"):
        plan(write(tmp_path / "draft.json", LAYER | changes))


def test_a_width_out_of_all_proportion_is_refused_in_the_settings_too() -> None:
    with pytest.raises(ValueError, match=r"intermediate_size is 100000000000000, which no draft"):
        plan_draft(DraftSettings(intermediate_size=10**14), TEXT_CONFIG)
