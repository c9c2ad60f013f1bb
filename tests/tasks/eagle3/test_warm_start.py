"""Which speculators checkpoints a training can start from."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.eagle3.draft import save_speculator, trainable_parameters, trainable_shapes
from tasks.eagle3.draft_plan import DraftPlan, plan_draft
from tasks.eagle3.draft_settings import DraftSettings
from tasks.eagle3.warm_start import check_speculator, read_trainable
from tests.tasks.eagle3.draft_cases import TEXT_CONFIG, make_draft

LAYER_IDS = [2, 6, 9]


def plan(**settings: Any) -> DraftPlan:
    return plan_draft(DraftSettings(**settings), TEXT_CONFIG)


def write(directory: Path, *, dtype: torch.dtype = torch.bfloat16, **options: Any) -> Path:
    save_speculator(make_draft(**options), directory, dtype=dtype)
    return directory


def check(directory: Path, draft: DraftPlan, layer_ids: list[int] = LAYER_IDS) -> dict[str, Any]:
    return check_speculator(directory, draft=draft, text_config=TEXT_CONFIG, layer_ids=layer_ids)


def edit(directory: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    file = directory / "config.json"
    config = json.loads(file.read_text())
    change(config)
    file.write_text(json.dumps(config))


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"arch": "qwen3"},
        {"num_layers": 2},
        {"norm_before_fc": True, "norm_output": True},
        {"fc_norm": True, "norm_before_residual": True},
    ],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_every_trainable_tensor_of_a_fitting_checkpoint_is_read_as_it_is_stored(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    directory = write(tmp_path, dtype=dtype, **options)
    assert check(directory, plan(**options))["draft_vocab_size"] == 128
    draft = make_draft(draft_vocab=64, **options)  # of another vocabulary

    found = read_trainable(directory, trainable_shapes(draft.config))

    wanted = trainable_parameters(draft)
    assert found.keys() == wanted.keys()
    for name, value in found.items():
        assert value.dtype == dtype
        # make_draft draws all its drafts from one seed, the trainable part first
        assert torch.equal(value, wanted[name].to(dtype)), name


@pytest.mark.parametrize(
    ("written", "asked", "message"),
    [
        ({"layer_ids": (1, 6, 9)}, {}, r"layers \[1, 6, 9\], this run captures \[2, 6, 9\]; set"),
        ({"layer_ids": (2, 9)}, {}, r"set capture\.layers to \[2, 9\]"),
        ({"norm_before_fc": True}, {}, r"set draft\.norm_before_fc to true"),
        ({}, {"fc_norm": True}, r"set draft\.fc_norm to false"),
        (
            {},
            {"norm_output": True},
            r"its norm_output is False, .* set draft\.norm_output to false",
        ),
        ({"norm_before_residual": True}, {}, r"set draft\.norm_before_residual to true"),
        (
            {"arch": "qwen3"},
            {},
            r"have model_type qwen3, this run's draft llama; set draft\.config",
        ),
        ({"num_layers": 2}, {}, "have num_hidden_layers 2, this run's draft 1"),
        ({"intermediate_size": 80}, {}, "have intermediate_size 80, this run's draft 96"),
    ],
)
def test_a_draft_of_another_kind_is_refused_with_the_setting_that_makes_it_fit(
    written: dict[str, Any], asked: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ValueError, match=rf"^train\.init .*{message}"):
        check(write(tmp_path, **written), plan(**asked))


@pytest.mark.parametrize("name", ["norm_output", "norm_before_fc"])
def test_a_norm_that_a_config_does_not_name_is_none(name: str, tmp_path: Path) -> None:
    directory = write(tmp_path)
    edit(directory, lambda config: config.pop(name))
    check(directory, plan())
    with pytest.raises(ValueError, match=rf"set draft\.{name} to false"):
        check(directory, plan(**{name: True}))


def test_heads_of_another_width_are_refused_though_every_shape_is_the_same(tmp_path: Path) -> None:
    directory = write(tmp_path)
    heads = {"num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8}
    edit(directory, lambda config: config["transformer_layer_config"].update(heads))
    read_trainable(directory, trainable_shapes(make_draft().config))
    with pytest.raises(ValueError, match="num_attention_heads 8, this run's draft 4"):
        check(directory, plan())


def test_another_rope_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path)
    rope = {"rope_type": "default", "rope_theta": 500_000.0}
    edit(directory, lambda config: config["transformer_layer_config"].update(rope_parameters=rope))
    with pytest.raises(ValueError, match=r"rope_parameters .*500000.* this run's draft .*10000"):
        check(directory, plan())


def test_a_draft_of_another_verifier_is_refused(tmp_path: Path) -> None:
    directory = write(tmp_path)
    edit(directory, lambda config: config["transformer_layer_config"].update(vocab_size=301))
    with pytest.raises(ValueError, match=r"train\.init .*vocab_size 301 differs from the verifier"):
        check(directory, plan())


def test_the_default_layers_are_meant_where_a_config_names_none(tmp_path: Path) -> None:
    directory = write(tmp_path)
    edit(directory, lambda config: config.pop("eagle_aux_hidden_state_layer_ids"))
    check(directory, plan())  # of 12 layers: 2, 6 and 9
    with pytest.raises(ValueError, match=r"set capture\.layers to \[2, 6, 9\]"):
        check(directory, plan(), [1, 6, 9])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"speculators_model_type": "dflash"}, "is 'dflash', not 'eagle3'"),
        ({"embed_requires_grad": True}, "its embedding was trained too"),
    ],
)
def test_what_cannot_be_trained_here_is_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = write(tmp_path)
    edit(directory, lambda config: config.update(change))
    with pytest.raises(ValueError, match=message):
        check(directory, plan())


def damage_missing(tensors: dict[str, torch.Tensor]) -> None:
    del tensors["norm.weight"]


def damage_extra(tensors: dict[str, torch.Tensor]) -> None:
    tensors["layers.1.mlp.up_proj.weight"] = torch.ones(96, 64)


def damage_shape(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"] = torch.ones(64, 128)


def damage_value(tensors: dict[str, torch.Tensor]) -> None:
    tensors["fc.weight"][3, 4] = torch.nan


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (damage_missing, r"has \['norm\.weight'\] that it lacks"),
        (damage_extra, r"it has \['layers\.1\.mlp\.up_proj\.weight'\] that the draft lacks"),
        (damage_shape, r"fc\.weight has the shape \(64, 128\), this run's draft \(64, 192\)"),
        (damage_value, r"fc\.weight has non-finite values"),
    ],
)
def test_tensors_that_are_not_the_drafts_are_refused_by_name(
    damage: Callable[[dict[str, torch.Tensor]], None], message: str, tmp_path: Path
) -> None:
    directory = write(tmp_path)
    tensors = load_file(directory / "model.safetensors")
    damage(tensors)
    save_file(tensors, directory / "model.safetensors")
    with pytest.raises(ValueError, match=rf"^train\.init .*{message}"):
        read_trainable(directory, trainable_shapes(make_draft().config))
