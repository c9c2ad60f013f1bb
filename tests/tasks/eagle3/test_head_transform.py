"""Transforms of the head: against the verifier's own logits, and against transformers' own config classes."""

import dataclasses
import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM

from tasks.eagle3 import head_transform
from tasks.eagle3.head import VerifierHead, load_head, save_head
from tasks.eagle3.head_transform import HeadTransform, find_transform
from tasks.eagle3.hidden_states import find_decoder
from tasks.eagle3.verifier_config import norm_eps
from tasks.eagle3.weight_files import VerifierError

SIZES = {
    "vocab_size": 50, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64, "pad_token_id": 0, "bos_token_id": 1,
    "eos_token_id": 2,
}  # fmt: skip

CASES: dict[str, tuple[str, dict[str, Any], HeadTransform]] = {
    "plain": ("llama", {}, HeadTransform()),
    "gemma": ("gemma", {}, HeadTransform(norm="rms_plus_one")),
    "gemma-2 by default": ("gemma2", {}, HeadTransform(norm="rms_plus_one", logit_softcap=30.0)),
    "gemma-2, small cap": (
        "gemma2",
        {"final_logit_softcapping": 2.0},
        HeadTransform(norm="rms_plus_one", logit_softcap=2.0),
    ),
    "gemma-3": ("gemma3_text", {}, HeadTransform(norm="rms_plus_one")),
    "qwen3.5": ("qwen3_5_text", {"num_hidden_layers": 4}, HeadTransform(norm="rms_plus_one")),
    "cohere by default": ("cohere", {}, HeadTransform(norm="layer", logit_scale=0.0625)),
    "cohere-2": ("cohere2", {"logit_scale": 0.3}, HeadTransform(norm="layer", logit_scale=0.3)),
    "granite divides": ("granite", {"logits_scaling": 8.0}, HeadTransform(logit_scale=1 / 8)),
    "hyperclovax multiplies": (
        "hyperclovax",
        {"logits_scaling": 3.0},
        HeadTransform(logit_scale=3.0),
    ),
}


@torch.no_grad()
def make_model(model_type: str, **changes: Any) -> Any:
    config = CONFIG_MAPPING[model_type](**SIZES | changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(0)
    for _, parameter in sorted(model.named_parameters()):
        if parameter.dim() == 1:
            parameter.uniform_(0.5, 2.0, generator=generator)
        else:
            parameter.normal_(0, 2 * parameter.shape[-1] ** -0.5, generator=generator)
    return model


@pytest.mark.parametrize(("model_type", "changes", "expected"), CASES.values(), ids=CASES.keys())
def test_the_rebuilt_logits_are_the_models_own(model_type, changes, expected, tmp_path):
    model = make_model(model_type, **changes)
    text = model.config.to_dict()
    transform = find_transform(text, text)
    assert transform == expected
    last: list[torch.Tensor] = []
    find_decoder(model).norm.register_forward_pre_hook(lambda _, args: last.append(args[0]))

    with torch.inference_mode():
        logits = model(torch.arange(3, 40)[None]).logits[0]

    eps = norm_eps(text)
    assert eps is not None
    embed = model.get_input_embeddings().weight.detach()
    head = VerifierHead(
        embed=embed,
        norm=find_decoder(model).norm.weight.detach(),
        head=embed if model.config.tie_word_embeddings else model.lm_head.weight.detach(),
        eps=eps,
        transform=transform,
    )
    torch.testing.assert_close(head.logits(last[0][0]), logits, atol=5e-5, rtol=1e-5)
    if not transform.plain:  # and it is the transform that makes them so
        untransformed = dataclasses.replace(head, transform=HeadTransform()).logits(last[0][0])
        assert not torch.allclose(untransformed, logits, atol=1e-2)

    save_head(head, tmp_path / "head.safetensors")
    assert load_head(tmp_path / "head.safetensors").transform == transform


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ({"model_type": "llama", "logit_scale": 0.5}, "sets logit_scale = 0.5"),
        (
            {"model_type": "llama", "final_logit_softcapping": 30.0},
            "final_logit_softcapping = 30.0",
        ),
        ({"model_type": "granite", "logit_scale": 0.5}, "sets logit_scale = 0.5"),
        ({"model_type": "granite", "logits_scaling": 0}, "must be a positive number"),
        ({"model_type": "cohere", "logit_scale": "x"}, "must be a positive number"),
        ({"model_type": "gemma3n_text"}, "a form of their own"),
        ({"model_type": "nanochat"}, "a form of their own"),
    ],
)
def test_a_transform_that_is_not_known_for_its_model_is_refused(text, message):
    with pytest.raises(VerifierError, match=message):
        find_transform(text, text)


def test_a_composite_model_is_refused_by_its_outer_name_too():
    with pytest.raises(VerifierError, match="minimax_m3_vl"):
        find_transform({"model_type": "minimax_m3_vl"}, {"model_type": "llama"})


def test_fields_that_change_nothing_are_accepted():
    text = {"model_type": "llama", "logits_scaling": 1.0, "final_logit_softcapping": None}

    assert find_transform(text, text) == HeadTransform()


def implemented() -> set[str]:
    return (
        set(head_transform._SOFTCAPPED)
        | set(head_transform._MULTIPLIED)
        | head_transform._DIVIDED
        | head_transform._ONE_PLUS_NORMS
        | head_transform._OTHER_HEADS
    )


def test_every_config_class_of_transformers_with_such_a_field_is_known_with_its_default():
    seen = 0
    for model_type, config_class in CONFIG_MAPPING.items():
        for field, none in head_transform._FIELDS.items():
            default = inspect.getattr_static(config_class, field, none)
            # contrastive models have a logit_scale of their own and no language model head
            if default in {none, None} or not decodes(model_type):
                continue
            seen += 1
            assert model_type in implemented(), (model_type, field, default)
            if model_type in head_transform._OTHER_HEADS:
                continue
            transform = find_transform({"model_type": model_type}, {"model_type": model_type})
            assert default in {transform.logit_scale, transform.logit_softcap}, (model_type, field)
    assert seen >= 5


def test_every_model_of_transformers_whose_norm_scales_by_one_plus_w_is_known():
    models = Path(transformers.__file__).parent / "models"
    found = {
        path.parent.name
        for path in models.glob("*/modeling_*.py")
        if re.search(r"1(\.0)? \+ self\.weight|self\.weight \+ 1", path.read_text())
    }
    # an encoder for videos
    assert len(found) > 10
    assert found - {"videoprism"} <= implemented()


def decodes(model_type: str) -> bool:
    return model_type in transformers.models.auto.modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES


def test_layer_norm_of_a_centered_state_is_its_rms_norm():
    last = torch.randn(5, 8, generator=torch.Generator().manual_seed(0)) + 3.0
    weight = torch.linspace(0.5, 2.0, 8)
    head = VerifierHead(
        last, weight, last, eps=1e-5, transform=HeadTransform(norm="layer", logit_scale=0.5)
    )

    expected = nn.functional.layer_norm(last, [8], weight, eps=1e-5)

    torch.testing.assert_close(head.normed(last), expected)
    torch.testing.assert_close(head.logits(last), 0.5 * expected @ last.T)
