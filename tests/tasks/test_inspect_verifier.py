import json
import re
import secrets
from pathlib import Path
from typing import ClassVar

import fsspec
import pytest

from flows.cli import main
from tasks.hardware import Machine
from tasks.inspect_text import render_inspection
from tasks.inspect_verifier import inspect_verifier
from tasks.verifier_sources import VerifierSettings
from tests.synthetic_checkpoints import (
    CONFIG,
    PLAIN,
    SCHEMES,
    quantized_module,
    write_checkpoint,
    write_weights,
)

EIGHT_GPUS = Machine(ram_bytes=10**12, gpu_bytes=(141 * 10**9,) * 8, native_bf16=True)


def inspect(model: Path | str, **settings: object) -> dict:
    found = VerifierSettings(model=str(model), **settings)
    return inspect_verifier(found, EIGHT_GPUS)


def write_nested(directory: Path) -> Path:
    """A checkpoint laid out as Kimi-K2.5's, with 4-bit experts, in three files."""
    scheme = SCHEMES["int4 of compressed-tensors"]
    text = CONFIG | {"quantization_config": scheme.stated, "num_hidden_layers": 61}
    config = {
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "text_config": text,
        "vision_config": {"hidden_size": 8},
    }
    tensors = PLAIN | quantized_module("model.layers.3.mlp.experts.11.up_proj", scheme)
    nested = {f"language_model.{key}": entry for key, entry in tensors.items()}
    write_checkpoint(directory, config, nested, files=3)
    (directory / "chat_template.jinja").write_text("{{ messages }}")
    (directory / "generation_config.json").write_text('{"eos_token_id": [7, 9]}')
    return directory


def test_a_nested_quantized_checkpoint_is_understood(tmp_path):
    found = inspect(write_nested(tmp_path / "kimi"))

    recommended = found.pop("recommended")
    assert recommended["engine"] == "transformers"
    assert recommended["where"] == "one GPU of this machine's"
    assert found == {
        "model": str(tmp_path / "kimi"),
        "directory": str(tmp_path / "kimi"),
        "model_type": "kimi_k25",
        "architectures": ["KimiK25ForConditionalGeneration"],
        "config_path": ["text_config"],
        "hidden_size": 64,
        "num_hidden_layers": 61,
        "vocab_size": 96,
        "context_length": 512,
        "tensors": {
            "embedding": {
                "key": "language_model.model.embed_tokens.weight",
                "file": "model-00001-of-00003.safetensors",
                "dtype": "BF16",
                "shape": [96, 64],
            },
            "final_norm": {
                "key": "language_model.model.norm.weight",
                "file": "model-00002-of-00003.safetensors",
                "dtype": "BF16",
                "shape": [64],
            },
            "head": {
                "key": "language_model.lm_head.weight",
                "file": "model-00003-of-00003.safetensors",
                "dtype": "BF16",
                "shape": [96, 64],
            },
        },
        "tied": False,
        "head_transform": {"norm": "rms", "logit_scale": 1.0, "logit_softcap": None},
        "quantization": {
            "scheme": "compressed-tensors pack-quantized, 4 bits int, groups of 32",
            "modules": ("language_model.model.layers.*.mlp.experts.*.up_proj",),
            "bytes": 96 * 8 * 4 + 96 * 2 * 2 + 2 * 8,
        },
        "default_layers": [2, 30, 58],
        # 3 captured layers and the last state, 64 values of 2 bytes
        "bytes_per_token": 4 * 64 * 2,
        # 1 byte a value, and 2 for a state's scale
        "bytes_per_token_fp8": 4 * (64 + 2),
        "weight_files": 3,
        "weight_bytes": sum(f.stat().st_size for f in (tmp_path / "kimi").glob("*.safetensors")),
        "parameters": 96 * 64 * 2 + 64 + 96 * 8 + 96 * 2 + 2,
        "eos_token_ids": [7, 9],
        "chat_template": True,
    }


def test_the_text_says_the_same_in_a_line_a_fact(tmp_path):
    lines = render_inspection(inspect(write_nested(tmp_path / "kimi"))).splitlines()

    for line in (
        "family          kimi_k25 (KimiK25ForConditionalGeneration)",
        "language model  config.json: text_config",
        "sizes           61 layers, hidden size 64, vocabulary 96, context 512 tokens",
        "final norm      language_model.model.norm.weight  BF16 [64]  in model-00002-of-00003.safetensors",
        "quantization    compressed-tensors pack-quantized, 4 bits int, groups of 32",
        "                  language_model.model.layers.*.mlp.experts.*.up_proj",
        "captured        layers [2, 30, 58] by default: the inputs of decoder layers 2, 30, 58,",
        "                and the last state: the output of layer 60, before the final norm",
        "a token takes   512 bytes = (3 layers + 1) x 64 values x 2 bytes (bf16)",
        "ends a text     token 7 or 9",
        "chat template   there",
    ):
        assert line in lines


def test_what_is_not_there_is_said(tmp_path):
    tensors = {key: entry for key, entry in PLAIN.items() if key != "lm_head.weight"}
    config = CONFIG | {"num_hidden_layers": 4, "tie_word_embeddings": True}

    found = inspect(write_checkpoint(tmp_path / "m", config, tensors))

    assert found["tied"]
    assert found["default_layers"] == []
    assert found["bytes_per_token"] is None
    text = render_inspection(found)
    assert re.search(r"^head +the embedding \(tied\)$", text, re.MULTILINE)
    assert re.search(
        r"^captured +4 layers have no default: name ids in capture", text, re.MULTILINE
    )
    assert re.search(r"^chat template +NONE", text, re.MULTILINE)


def test_what_is_done_to_norm_and_logits_is_said(tmp_path):
    capped = CONFIG | {"model_type": "gemma2", "final_logit_softcapping": 30.0}
    scaled = CONFIG | {"model_type": "cohere", "logit_scale": 0.0625}
    for name, config, words in (
        ("gemma", capped, "RMS norm times 1 + w; logits capped at 30 by tanh"),
        ("cohere", scaled, "LayerNorm times w; logits times 0.0625"),
    ):
        text = render_inspection(inspect(write_checkpoint(tmp_path / name, config)))
        assert f"\nnorm and logits {words}\n" in text


class CountingMemory(fsspec.get_filesystem_class("memory")):
    """fsspec's memory that counts the bytes read of each file."""

    protocol = "counted"
    read: ClassVar[dict[str, int]] = {}

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return super()._strip_protocol(path.replace("counted://", "memory://"))

    def cat_file(self, path, start=None, end=None, **options):
        found = super().cat_file(path, start=start, end=end, **options)
        name = path.rsplit("/", 1)[-1]
        self.read[name] = self.read.get(name, 0) + len(found)
        return found


def test_of_a_remote_model_only_config_index_and_headers_are_read(tmp_path):
    fsspec.register_implementation("counted", CountingMemory, clobber=True)
    local = write_nested(tmp_path / "kimi")
    headers = {}
    for path in local.glob("*.safetensors"):
        length = int.from_bytes(path.read_bytes()[:8], "little")
        headers[path.name] = 8 + length
    remote = fsspec.filesystem("counted")
    directory = secrets.token_hex(4)
    for path in local.iterdir():
        remote.pipe_file(f"/{directory}/{path.name}", path.read_bytes())
    CountingMemory.read.clear()

    found = inspect(f"counted://{directory}")

    assert found | {"model": "", "directory": ""} == inspect(local) | {"model": "", "directory": ""}
    weights = {name: count for name, count in CountingMemory.read.items() if name in headers}
    assert weights == headers
    small = {"config.json", "generation_config.json", "model.safetensors.index.json"}
    assert set(CountingMemory.read) == small | headers.keys()


def test_the_command_line_prints_text_or_json(tmp_path, capsys):
    directory = str(write_nested(tmp_path / "kimi"))

    assert main(["inspect", directory]) == 0
    assert capsys.readouterr().out.startswith(
        f"model           {directory}\nfamily          kimi_k25"
    )
    assert main(["inspect", directory, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["tensors"]["head"]["key"] == "language_model.lm_head.weight"


def test_weights_that_are_no_part_of_the_checkpoint_do_not_count(tmp_path):
    directory = write_checkpoint(tmp_path / "m")
    write_weights(directory / "consolidated.safetensors", PLAIN)

    assert inspect(directory)["weight_files"] == 1


def remote_code(directory: Path, **config: object) -> Path:
    own = {"auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    return write_checkpoint(directory, CONFIG | own | config)


def test_code_of_the_models_own_needs_trust(tmp_path, capsys):
    directory = str(remote_code(tmp_path / "m", model_type="own_model"))

    assert main(["inspect", directory]) == 1
    error = capsys.readouterr().err
    assert "transformers has no model type 'own_model'" in error
    assert "--trust-remote-code" in error
    assert main(["inspect", directory, "--trust-remote-code"]) == 0


def test_a_model_that_transformers_knows_needs_no_code_of_its_own(tmp_path):
    assert inspect(remote_code(tmp_path / "m"))["model_type"] == "llama"
    # deepseek_v3 under a name of its own
    assert inspect(remote_code(tmp_path / "k", model_type="kimi_k2"))["model_type"] == "kimi_k2"


@pytest.mark.parametrize(
    ("model_type", "tokenizer", "refused"),
    [
        ("llama", {"tokenizer_class": "OwnTokenizer"}, True),
        ("llama", {"tokenizer_class": "PreTrainedTokenizerFast"}, False),
        ("kimi_k25", {"tokenizer_class": "OwnTokenizer"}, False),
    ],
)
def test_a_tokenizer_of_the_models_own_needs_trust(tmp_path, model_type, tokenizer, refused):
    directory = write_checkpoint(tmp_path / "m", CONFIG | {"model_type": model_type})
    own = {"auto_map": {"AutoTokenizer": ["tokenization_own.OwnTokenizer", None]}}
    (directory / "tokenizer_config.json").write_text(json.dumps(tokenizer | own))

    if refused:
        with pytest.raises(ValueError, match="transformers has no tokenizer 'OwnTokenizer'"):
            inspect(directory)
    inspect(directory, trust_remote_code=True)
    if not refused:
        inspect(directory)
