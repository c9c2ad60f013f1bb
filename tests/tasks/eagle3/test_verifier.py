import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.eagle3.verifier import (
    VerifierError,
    check_layer_ids,
    default_layer_ids,
    identity,
    read_facts,
)

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 4,
    "num_hidden_layers": 2,
    "vocab_size": 6,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 2,
    "max_position_embeddings": 32,
    "eos_token_id": 5,
}


def tensors(prefix: str = "", *, head: bool = True) -> dict[str, torch.Tensor]:
    found = {
        f"{prefix}model.embed_tokens.weight": torch.arange(24.0).reshape(6, 4),
        f"{prefix}model.layers.0.input_layernorm.weight": torch.ones(4),
        f"{prefix}model.norm.weight": torch.full((4,), 0.5),
    }
    return found | ({f"{prefix}lm_head.weight": torch.ones(6, 4)} if head else {})


def write_model(
    directory: Path, config: dict[str, Any], weights: dict[str, torch.Tensor], *, files: int = 1
) -> Path:
    directory.mkdir(parents=True)
    (directory / "config.json").write_text(json.dumps(config))
    if files == 1:
        save_file(weights, directory / "model.safetensors")
        return directory
    weight_map = {key: f"part-{place % files}.safetensors" for place, key in enumerate(weights)}
    for name in set(weight_map.values()):
        save_file({k: t for k, t in weights.items() if weight_map[k] == name}, directory / name)
    index = {"metadata": {}, "weight_map": weight_map}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    return directory


@pytest.mark.parametrize("files", [1, 2])
def test_the_three_tensors_are_found_in_single_and_sharded_checkpoints(tmp_path, files):
    facts = read_facts(write_model(tmp_path / "m", CONFIG, tensors(), files=files))

    assert (facts.embed_key, facts.norm_key, facts.head_key) == (
        "model.embed_tokens.weight",
        "model.norm.weight",
        "lm_head.weight",
    )
    # the third and fourth key of the four lie in the first and second file in turn
    wanted = {1: ["model.safetensors"] * 3, 2: [f"part-{i}.safetensors" for i in (0, 0, 1)]}
    assert [facts.files[k] for k in (facts.embed_key, facts.norm_key, facts.head_key)] == wanted[
        files
    ]
    assert (facts.hidden_size, facts.num_hidden_layers, facts.vocab_size) == (4, 2, 6)
    assert (facts.tied, facts.eos_token_ids, facts.config_path) == (False, (5,), ())


def test_a_nested_config_is_found_at_any_depth_beside_a_vision_tower(tmp_path):
    nested = {
        "model_type": "outer",
        "vision_config": {"hidden_size": 4, "num_hidden_layers": 9},
        "thinker": {"text_config": CONFIG | {"dtype": "bfloat16"}},
    }
    weights = tensors("language_model.") | {"projector.norm.weight": torch.ones(9)}

    facts = read_facts(write_model(tmp_path / "m", nested, weights))

    assert facts.config_path == ("thinker", "text_config")
    assert facts.norm_key == "language_model.model.norm.weight"
    assert (facts.model_type, facts.norm_eps, facts.dtype) == ("outer", 1e-5, "bfloat16")


def test_a_kimi_checkpoint_is_read(tmp_path):
    from tests.tiny_models import make_kimi

    facts = read_facts(make_kimi(tmp_path / "kimi"))

    assert (facts.model_type, facts.config_path) == ("kimi_k25", ("text_config",))
    assert facts.embed_key == "language_model.model.embed_tokens.weight"
    assert facts.head_key == "language_model.lm_head.weight"


def test_embedding_and_head_of_a_prediction_layer_are_not_taken(tmp_path):
    extra = {
        "model.layers.2.embed_tokens.weight": torch.zeros(6, 4),
        "model.layers.2.shared_head.norm.weight": torch.zeros(4),
        "model.layers.2.lm_head.weight": torch.zeros(6, 4),
    }

    facts = read_facts(write_model(tmp_path / "m", CONFIG, tensors() | extra))

    assert (facts.embed_key, facts.head_key) == ("model.embed_tokens.weight", "lm_head.weight")


@pytest.mark.parametrize("top", [True, None])
@pytest.mark.parametrize("inner", [True, False, None])
def test_without_a_head_tensor_the_head_is_the_embedding_unless_the_config_denies_it(
    tmp_path, top, inner
):
    text = CONFIG | ({} if inner is None else {"tie_word_embeddings": inner})
    config = {"text_config": text} | ({} if top is None else {"tie_word_embeddings": top})
    model = write_model(tmp_path / "m", config, tensors(head=False))

    if inner is False and top is None:
        with pytest.raises(VerifierError, match=r"no lm_head.weight although .* fetch it again"):
            read_facts(model)
    else:
        facts = read_facts(model)
        assert facts.tied
        assert facts.head_key == "model.embed_tokens.weight"


def test_a_head_tensor_is_used_even_if_the_config_says_tied(tmp_path):
    facts = read_facts(
        write_model(tmp_path / "m", CONFIG | {"tie_word_embeddings": True}, tensors())
    )

    assert not facts.tied


@pytest.mark.parametrize(
    ("generation", "wanted"),
    [({"eos_token_id": [5, 3]}, (5, 3)), ({"eos_token_id": 4}, (4,)), ({}, (5,))],
)
def test_end_tokens_come_from_the_generation_config_then_from_the_config(
    tmp_path, generation, wanted
):
    model = write_model(tmp_path / "m", CONFIG, tensors())
    (model / "generation_config.json").write_text(json.dumps(generation))

    assert read_facts(model).eos_token_ids == wanted


@pytest.mark.parametrize(
    ("config", "weights", "message"),
    [
        ({"model_type": "gpt"}, tensors(), "no part of it has hidden_size"),
        (
            {"a": CONFIG, "b": CONFIG | {"vocab_size": 7}},
            tensors(),
            r"several language models \(a: .*vocab_size 6; b: .*vocab_size 7\)",
        ),
        (CONFIG, tensors() | {"x.embed_tokens.weight": torch.zeros(6, 4)}, "2 tensors end in it"),
        (CONFIG, tensors() | {"x.lm_head.weight": torch.zeros(6, 4)}, "2 tensors end in it"),
        (CONFIG, {"lm_head.weight": torch.zeros(6, 4)}, "embed_tokens.weight, but none does"),
        (CONFIG | {"vocab_size": 8}, tensors(), r"shape \[6, 4\], the config says \[8, 4\]"),
        (CONFIG, tensors() | {"model.norm.bias": torch.zeros(4)}, "LayerNorm"),
        (CONFIG, tensors() | {"lm_head.bias": torch.zeros(6)}, "lm_head.bias"),
        (
            CONFIG,
            tensors(head=False) | {"lm_head.weight_packed": torch.zeros(6, 1)},
            "lm_head.weight_packed: a quantized head",
        ),
        (
            CONFIG,
            tensors() | {"lm_head.weight": torch.zeros(6, 4).to(torch.float8_e4m3fn)},
            "stored as F8_E4M3",
        ),
        (CONFIG | {"final_logit_softcapping": 30.0}, tensors(), "final_logit_softcapping = 30.0"),
        (CONFIG | {"logit_scale": 0.0625}, tensors(), "logit_scale = 0.0625"),
        (CONFIG | {"logits_scaling": 8.0}, tensors(), "logits_scaling = 8.0"),
        (CONFIG | {"model_type": "gemma3n"}, tensors(), "gemma3n: its norm or logits have a form"),
        (CONFIG | {"rms_norm_eps": None}, tensors(), "rms_norm_eps"),
    ],
)  # fmt: skip
def test_what_cannot_be_used_is_refused_with_the_reason(tmp_path, config, weights, message):
    model = write_model(tmp_path / "m", config, weights)

    with pytest.raises(VerifierError, match=message):
        read_facts(model)


def test_transforms_that_do_nothing_are_accepted(tmp_path):
    config = CONFIG | {"logits_scaling": 1.0, "final_logit_softcapping": None}

    assert read_facts(write_model(tmp_path / "m", config, tensors())).vocab_size == 6


def test_missing_and_damaged_files_are_named(tmp_path):
    with pytest.raises(VerifierError, match="no model directory"):
        read_facts(tmp_path / "absent")
    (tmp_path / "empty").mkdir()
    with pytest.raises(VerifierError, match=r"no config\.json"):
        read_facts(tmp_path / "empty")
    model = write_model(tmp_path / "m", CONFIG, tensors(), files=2)
    part = model / "part-1.safetensors"
    whole = part.read_bytes()
    for damaged, message in (
        (whole[:-1], f"part-1.safetensors is cut off: it has {len(whole) - 1} bytes"),
        (whole[:20], "is cut off"),
        (whole[:3], "is cut off"),
        (whole[:8] + b"x" * (len(whole) - 8), "no readable safetensors header"),
    ):
        part.write_bytes(damaged)
        with pytest.raises(VerifierError, match=message):
            read_facts(model)
    part.unlink()
    with pytest.raises(VerifierError, match=r"1 of them are not there \(first: part-1"):
        read_facts(model)
    (model / "model.safetensors.index.json").rename(model / "pytorch_model.bin")
    with pytest.raises(VerifierError, match=r"no weights.*pytorch_model\.bin, which is not read"):
        read_facts(model)


def test_an_index_of_another_checkpoint_is_refused(tmp_path):
    model = write_model(tmp_path / "m", CONFIG, tensors(), files=2)
    save_file({"other.weight": torch.zeros(2)}, model / "part-1.safetensors")

    with pytest.raises(VerifierError, match=r"lies in part-1\.safetensors, which holds no such"):
        read_facts(model)


def test_identity_is_of_the_content_and_not_of_the_place(tmp_path):
    model = write_model(tmp_path / "m", CONFIG | {"_name_or_path": "/a"}, tensors(), files=2)
    before = identity(model)
    moved = tmp_path / "elsewhere"
    shutil.move(model, moved)
    (moved / "config.json").write_text(json.dumps(CONFIG | {"_name_or_path": "/b"}))

    assert identity(moved) == before


def change_one_weight(model: Path) -> None:
    weights = load_file(model / "part-0.safetensors")
    weights["model.norm.weight"][2] += 1e-3  # same size, same header: a fine-tune
    save_file(weights, model / "part-0.safetensors")


@pytest.mark.parametrize(
    "change",
    [
        change_one_weight,
        lambda m: save_file(
            load_file(m / "part-1.safetensors") | {"more": torch.ones(1)}, m / "part-1.safetensors"
        ),
        lambda m: (m / "config.json").write_text(json.dumps(CONFIG | {"rope_theta": 5.0})),
        lambda m: (m / "chat_template.jinja").write_text("{{ messages }}"),
        lambda m: (m / "modeling_own.py").write_text("x = 1"),
        lambda m: (m / "generation_config.json").write_text("{}"),
    ],
    ids=["weight", "file", "config", "template", "code", "generation"],
)
def test_identity_changes_with_whatever_the_model_is_made_of(tmp_path, change):
    model = write_model(tmp_path / "m", CONFIG, tensors(), files=2)
    before = identity(model)

    change(model)

    assert identity(model) != before


def test_facts_survive_json(tmp_path):
    facts = read_facts(write_model(tmp_path / "m", CONFIG, tensors()))

    assert type(facts).model_validate(json.loads(facts.model_dump_json())) == facts


def test_default_layers_follow_speculators():
    assert default_layer_ids(61) == [2, 30, 58]  # Kimi-K2.5
    assert default_layer_ids(7) == [2, 3, 4]
    with pytest.raises(ValueError, match=r"need 7 layers or more, the verifier has 6; name"):
        default_layer_ids(6)


@pytest.mark.parametrize("ids", [[], [2, 1], [1, 1], [-1, 2], [0, 8]])
def test_impossible_layer_ids_are_refused(ids):
    with pytest.raises(ValueError, match=r"capture\.layers"):
        check_layer_ids(ids, 8)


def test_layer_ids_reach_from_the_embedding_to_the_last_layers_input():
    def accepted(layer_id: int) -> bool:
        try:
            check_layer_ids([layer_id], 8)
        except ValueError:
            return False
        return True

    assert [i for i in range(-3, 12) if accepted(i)] == list(range(8))


def test_a_config_that_leaves_fields_to_its_class_gets_its_defaults(tmp_path):
    # as Gemma-3 is published: no vocabulary, no heads, no epsilon
    text = {"model_type": "gemma3_text", "hidden_size": 8, "num_hidden_layers": 2}
    config = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    rows = torch.zeros(262208, 8, dtype=torch.bfloat16)
    norm = {"language_model.model.norm.weight": torch.zeros(8)}
    weights = norm | {"language_model.model.embed_tokens.weight": rows}

    facts = read_facts(write_model(tmp_path / "m", config | {"text_config": text}, weights))

    assert facts.config_path == ("text_config",)
    assert (facts.vocab_size, facts.norm_eps, facts.max_position_embeddings) == (
        262208,
        1e-6,
        131072,
    )
    assert (facts.tied, facts.transform.norm) == (True, "rms_plus_one")
    assert facts.text_config["num_attention_heads"] == 8


def test_a_config_that_its_class_refuses_is_refused_with_the_reason(tmp_path):
    config = {k: v for k, v in CONFIG.items() if k != "num_attention_heads"}

    with pytest.raises(VerifierError, match=r"no llama config .* not a multiple of the number"):
        read_facts(write_model(tmp_path / "m", config, tensors()))


@pytest.mark.parametrize("eos", [6, -1, True, "x", [5, None]])
def test_an_end_token_beyond_the_vocabulary_is_refused(tmp_path, eos):
    with pytest.raises(VerifierError, match=r"eos_token_id .* is no token of the vocabulary of 6"):
        read_facts(write_model(tmp_path / "m", CONFIG | {"eos_token_id": eos}, tensors()))


@pytest.mark.parametrize("eps", [float("nan"), float("inf"), 0, 1e3])
def test_an_epsilon_that_no_norm_has_is_refused(tmp_path, eps):
    with pytest.raises(VerifierError, match="rms_norm_eps"):
        read_facts(write_model(tmp_path / "m", CONFIG | {"rms_norm_eps": eps}, tensors()))


@pytest.mark.parametrize(
    ("changes", "context"),
    [
        ({}, 32),
        (
            {
                "rope_scaling": {
                    "rope_type": "yarn",
                    "factor": 4.0,
                    "original_max_position_embeddings": 32,
                }
            },
            128,
        ),
        (
            {
                "rope_parameters": {
                    "rope_type": "llama3",
                    "factor": 2.0,
                    "original_max_position_embeddings": 16,
                }
            },
            32,
        ),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, 32),
    ],
)
def test_the_context_is_what_config_or_stretched_rope_allow(
    tmp_path: Path, changes: dict[str, Any], context: int
) -> None:
    model = write_model(tmp_path / "m", CONFIG | changes, tensors())
    assert read_facts(model).context_tokens == context
