"""Every quantization scheme that people serve, as its checkpoints are laid out."""

from pathlib import Path
from typing import Any

import pytest

from tasks.eagle3.model_files import LocalFiles
from tasks.eagle3.quantization import Quantization, read_quantization
from tasks.eagle3.verifier import VerifierError, read_facts
from tasks.eagle3.weight_files import read_weight_files
from tests.synthetic_checkpoints import CONFIG, PLAIN, SCHEMES, quantized_module, write_checkpoint


def read(directory: Path, config: dict[str, Any]) -> Quantization | None:
    files = read_weight_files(LocalFiles(directory))
    return read_quantization(config, config, {k: e for f in files for k, e in f.tensors.items()})


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_with_a_plain_embedding_and_head_is_accepted_and_named(tmp_path, name):
    scheme = SCHEMES[name]
    layers = {}
    for layer in (0, 1):
        layers |= quantized_module(f"model.layers.{layer}.self_attn.q_proj", scheme)
        layers |= quantized_module(f"model.layers.{layer}.mlp.experts.7.up_proj", scheme)
    config = CONFIG | {"quantization_config": scheme.stated}
    directory = write_checkpoint(tmp_path / "m", config, PLAIN | layers)

    facts = read_facts(directory)

    assert facts.head_key == "lm_head.weight"
    assert read(directory, config) == Quantization(
        scheme.words,
        ("model.layers.*.mlp.experts.*.up_proj", "model.layers.*.self_attn.q_proj"),
        4 * scheme.bytes,
    )


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_that_quantizes_the_head_is_refused(tmp_path, name):
    scheme = SCHEMES[name]
    plain = {key: entry for key, entry in PLAIN.items() if key != "lm_head.weight"}
    config = CONFIG | {"quantization_config": scheme.stated}

    with pytest.raises(VerifierError, match=r"lm_head\.\w+.*a quantized head .*is not supported"):
        read_facts(
            write_checkpoint(tmp_path / "m", config, plain | quantized_module("lm_head", scheme))
        )


@pytest.mark.parametrize("name", SCHEMES)
def test_a_scheme_that_quantizes_the_embedding_is_refused(tmp_path, name):
    scheme = SCHEMES[name]
    embed = quantized_module("model.embed_tokens", scheme)
    plain = {key: entry for key, entry in PLAIN.items() if "embed_tokens" not in key}
    config = CONFIG | {"quantization_config": scheme.stated}

    with pytest.raises(VerifierError, match=r"embed_tokens\.weight"):
        read_facts(write_checkpoint(tmp_path / "m", config, plain | embed))


def test_the_fused_experts_of_gpt_oss_are_found(tmp_path):
    experts = {
        "model.layers.0.mlp.experts.down_proj_blocks": ("U8", (4, 64, 2, 16)),
        "model.layers.0.mlp.experts.down_proj_scales": ("U8", (4, 64, 2)),
        "model.layers.0.mlp.experts.down_proj_bias": ("BF16", (4, 64)),
    }
    config = CONFIG | {"quantization_config": {"quant_method": "mxfp4"}}

    found = read(write_checkpoint(tmp_path / "m", config, PLAIN | experts), config)

    assert found == Quantization(
        "mxfp4", ("model.layers.*.mlp.experts.down_proj",), 4 * 64 * 2 * (16 + 1)
    )


def test_a_plain_checkpoint_is_not_quantized(tmp_path):
    assert read(write_checkpoint(tmp_path / "m"), CONFIG) is None
