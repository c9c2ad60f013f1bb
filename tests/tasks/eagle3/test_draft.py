"""Building, saving and loading the draft."""

from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from safetensors import safe_open
from transformers import LlamaConfig, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from tasks.eagle3.draft import (
    DraftSettings,
    Eagle3DraftModel,
    build_draft,
    check_vocab_map,
    draft_config,
    load_speculator,
    save_speculator,
    trainable_parameters,
)
from tasks.eagle3.draft_runner import DraftRunner
from tasks.eagle3.training_step import training_forward
from tests.tasks.eagle3.draft_cases import (
    DRAFT_VOCAB,
    HIDDEN,
    TEXT_CONFIG,
    VOCAB,
    make_batch,
    make_draft,
    verifier_tensors,
)


def config_of(changes: dict[str, Any] | None = None, **settings: Any) -> Any:
    text_config = {**TEXT_CONFIG, **(changes or {})}
    return draft_config(
        {key: value for key, value in text_config.items() if value is not None},
        draft_vocab_size=DRAFT_VOCAB,
        layer_ids=[2, 6, 9],
        settings=DraftSettings(**settings),
        verifier_name_or_path="none",
        verifier_architectures=["LlamaForCausalLM"],
        draft_tokens=3,
    )


def test_the_draft_has_the_verifiers_widths_but_not_its_depth() -> None:
    layer = config_of().transformer_layer_config
    assert layer.num_hidden_layers == 1
    assert (layer.hidden_size, layer.intermediate_size, layer.vocab_size) == (HIDDEN, 96, VOCAB)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (4, 2, 16)
    assert layer._attn_implementation == "eager"


@pytest.mark.parametrize("rope", [None, 4.0])
def test_rope_tables_equal_the_verifiers(rope: float | None) -> None:
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": 50_000.0}
    if rope:
        yarn = {"rope_type": "yarn", "factor": rope, "original_max_position_embeddings": 4096}
        parameters |= yarn
    changes = {"rope_parameters": parameters, "max_position_embeddings": 65_536}
    verifier = LlamaRotaryEmbedding(LlamaConfig(**{**TEXT_CONFIG, **changes}))
    draft = make_draft(text_config={**TEXT_CONFIG, **changes})
    positions = torch.tensor([[0, 4096, 32_768]])
    for ours, theirs in zip(
        draft.rotary_emb(torch.zeros(1), positions),
        verifier(torch.zeros(1), positions),
        strict=True,
    ):
        assert torch.equal(ours, theirs)


def test_rope_settings_older_than_transformers_5_are_understood() -> None:
    old = {"rope_scaling": {"type": "linear", "factor": 2.0}, "rope_theta": 7.0}
    rope = config_of(old).transformer_layer_config.rope_parameters
    assert rope == {"rope_type": "linear", "factor": 2.0, "rope_theta": 7.0}


def test_latent_attention_heads_are_not_taken_for_the_drafts() -> None:
    # DeepSeek's head_dim is the rotated part of a head; Kimi-K2.5's draft has hidden / heads.
    layer = config_of({"head_dim": 8, "kv_lora_rank": 4}).transformer_layer_config
    assert layer.head_dim == HIDDEN // 4


def test_a_verifier_without_a_dense_mlp_gives_three_times_its_width() -> None:
    layer = config_of({"intermediate_size": None}).transformer_layer_config
    assert layer.intermediate_size == 3 * HIDDEN
    chosen = config_of(intermediate_size=80).transformer_layer_config
    assert chosen.intermediate_size == 80


def test_the_activation_is_the_one_that_vllm_serves_whatever_the_verifiers_is() -> None:
    layer = config_of({"hidden_act": "gelu_pytorch_tanh"}).transformer_layer_config
    assert layer.hidden_act == "silu"


def test_a_draft_vocabulary_beyond_the_verifiers_is_refused() -> None:
    with pytest.raises(ValueError, match=r"draft_vocab_size 128 is not in 1\.\.100"):
        config_of({"vocab_size": 100})


def test_heads_that_do_not_divide_are_refused() -> None:
    with pytest.raises(ValueError, match="hidden_size 64 is not a multiple"):
        config_of({"num_attention_heads": 6, "head_dim": None})
    with pytest.raises(ValueError, match="4 is not a multiple of num_key_value_heads 3"):
        config_of({"num_key_value_heads": 3})


def test_a_verifier_that_does_not_name_its_heads_is_refused() -> None:
    with pytest.raises(ValueError, match="names no num_attention_heads"):
        config_of({"num_attention_heads": None})


def test_two_input_norms_are_refused() -> None:
    with pytest.raises(ValidationError, match="turn one of them off"):
        DraftSettings(norm_before_fc=True, fc_norm=True)


def test_the_frozen_part_is_the_verifiers_and_the_rest_is_drawn_from_the_seed() -> None:
    tensors = verifier_tensors()

    def build(seed: int) -> Any:
        return build_draft(config_of(), **tensors, seed=seed)

    before = torch.get_rng_state()
    draft, again, other = build(0), build(0), build(1)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(draft.embed_tokens.weight, tensors["embed"])
    assert torch.equal(draft.lm_head.weight, tensors["head"][tensors["t2d"]])
    assert torch.equal(draft.verifier_lm_head.weight, draft.lm_head.weight)
    assert torch.equal(draft.verifier_norm.weight, tensors["norm"])
    for name, weight in trainable_parameters(draft).items():
        assert torch.equal(weight, trainable_parameters(again)[name])
        if weight.dim() == 2:
            assert not torch.equal(weight, trainable_parameters(other)[name])
            assert 0.015 < float(weight.detach().std()) < 0.025  # the config's 0.02
        else:
            assert bool((weight == 1).all())


def test_initial_values_follow_from_seed_and_name_alone() -> None:
    one, two = (
        trainable_parameters(build_draft(config_of(num_layers=n), **verifier_tensors(), seed=7))
        for n in (1, 2)
    )
    assert one.keys() < two.keys()
    for name, weight in one.items():
        assert torch.equal(weight, two[name]), name
    first, second = (two[f"layers.{n}.mlp.down_proj.weight"] for n in (0, 1))
    assert not torch.equal(first, second)


def test_nothing_of_the_frozen_part_is_held_twice() -> None:
    tensors = verifier_tensors()
    tensors["embed"] = tensors["embed"].bfloat16()
    tensors["head"] = tensors["head"].bfloat16()
    draft = build_draft(config_of(), **tensors, seed=0)
    assert draft.embed_tokens.weight.data_ptr() == tensors["embed"].data_ptr()
    assert draft.lm_head.weight.data_ptr() == draft.verifier_lm_head.weight.data_ptr()
    assert draft.lm_head.weight.dtype == torch.float32
    counted = sum(value.numel() for value in draft.parameters())
    assert counted == sum(v.numel() for v in Eagle3DraftModel(draft.config).parameters())


def test_a_16_bit_embedding_gives_the_numbers_of_its_fp32_copy() -> None:
    tensors = verifier_tensors()
    rounded = tensors["embed"].bfloat16()
    losses, states = [], []
    for embed in (rounded, rounded.float()):
        draft = build_draft(config_of(), **{**tensors, "embed": embed}, seed=0)
        losses.append(training_forward(draft, make_batch(), ttt_steps=3).loss.detach())
        aux = torch.ones(2, 5, 3 * HIDDEN)
        runner = DraftRunner(draft, rows=2, slots=8)
        ids = torch.arange(10).view(2, 5)
        with torch.no_grad():
            states.append(runner.extend(ids, aux, counts=torch.tensor([5, 3])))
    assert torch.equal(*losses)
    assert torch.equal(*states)


def test_trainable_parameters_are_sorted_and_exclude_the_frozen() -> None:
    names = list(trainable_parameters(make_draft()))
    assert names == sorted(names)
    assert "fc.weight" in names
    assert not [name for name in names if "head" in name or "embed" in name or "verifier" in name]


def test_tensors_of_another_verifier_are_refused() -> None:
    tensors = verifier_tensors()
    tensors["embed"] = tensors["embed"][:-1]
    with pytest.raises(ValueError, match=r"embed has shape \(299, 64\)"):
        build_draft(config_of(), **tensors, seed=0)


def test_non_finite_verifier_tensors_are_refused() -> None:
    tensors = verifier_tensors()
    tensors["norm"][3] = float("nan")
    with pytest.raises(ValueError, match=r"verifier_norm.weight has non-finite"):
        build_draft(config_of(), **tensors, seed=0)


def test_a_map_of_ids_instead_of_offsets_is_refused() -> None:
    tensors = verifier_tensors()
    ids = tensors["d2t"] + torch.arange(DRAFT_VOCAB)
    check_vocab_map(tensors["t2d"], tensors["d2t"], draft_vocab_size=DRAFT_VOCAB)
    with pytest.raises(ValueError, match="offsets, not ids"):
        check_vocab_map(tensors["t2d"], ids, draft_vocab_size=DRAFT_VOCAB)


def save_verifier(directory: Path) -> None:
    """A verifier with the tensors of `verifier_tensors`."""
    tensors = verifier_tensors()
    model = LlamaForCausalLM(LlamaConfig(**{**TEXT_CONFIG, "num_hidden_layers": 12}))
    with torch.no_grad():
        model.model.embed_tokens.weight.copy_(tensors["embed"])
        model.model.norm.weight.copy_(tensors["norm"])
        model.lm_head.weight.copy_(tensors["head"])
    model.save_pretrained(directory)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("options", [{}, {"arch": "qwen3", "fc_norm": True, "num_layers": 2}])
def test_speculators_loads_what_was_saved(
    options: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    save_verifier(tmp_path / "verifier")
    draft = make_draft(verifier=str(tmp_path / "verifier"), **options)
    kept = {name: value.clone() for name, value in draft.state_dict().items()}
    save_speculator(draft, tmp_path / "speculator", dtype=dtype)
    loaded = load_speculator(tmp_path / "speculator").state_dict()
    assert loaded.keys() == kept.keys()
    for name, value in kept.items():
        assert torch.equal(draft.state_dict()[name], value), f"saving changed {name}"
        rounded = value.to(dtype).float() if value.is_floating_point() else value
        assert torch.equal(loaded[name].to(rounded.dtype), rounded), name
    targets = torch.arange(DRAFT_VOCAB) + loaded["d2t"]
    assert bool(loaded["t2d"][targets].all())
    assert int(loaded["t2d"].sum()) == DRAFT_VOCAB


def test_the_file_has_the_tensors_and_dtypes_that_servers_expect(tmp_path: Path) -> None:
    save_speculator(make_draft(), tmp_path)
    with safe_open(tmp_path / "model.safetensors", framework="pt") as file:
        dtypes = {name: file.get_tensor(name).dtype for name in file.keys()}  # noqa: SIM118
    assert dtypes.pop("d2t") == torch.int64
    assert dtypes.pop("t2d") == torch.bool
    assert set(dtypes.values()) == {torch.bfloat16}
    assert {"embed_tokens.weight", "lm_head.weight", "fc.weight", "norm.weight"} <= dtypes.keys()
    assert "layers.0.hidden_norm.weight" in dtypes
    assert not [name for name in dtypes if name.startswith("verifier")]


def test_a_full_vocabulary_draft_needs_no_map(tmp_path: Path) -> None:
    draft = make_draft(draft_vocab=VOCAB)
    assert draft.d2t is None
    save_speculator(draft, tmp_path)
    assert (tmp_path / "config.json").exists()


def test_a_draft_is_built_around_given_weights_and_nothing_is_drawn():
    config = make_draft().config
    weights = {
        name: torch.full_like(value, 0.25)
        for name, value in trainable_parameters(make_draft()).items()
    }

    draft = build_draft(config, **verifier_tensors(), seed=1, weights=weights)

    assert all(torch.equal(w, weights[n]) for n, w in trainable_parameters(draft).items())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda weights: weights.pop("fc.weight"), r"differ: \['fc.weight'\]"),
        (
            lambda weights: weights.update({"fc.weight": torch.zeros(2, 3)}),
            r"fc\.weight has shape \[2, 3\], the draft's is \[64, 192\]",
        ),
    ],
)
def test_weights_of_another_draft_are_refused(change, message):
    weights = dict(trainable_parameters(make_draft()))
    change(weights)

    with pytest.raises(ValueError, match=message):
        build_draft(make_draft().config, **verifier_tensors(), seed=1, weights=weights)
