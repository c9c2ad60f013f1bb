"""Checkpoints that cannot be used: `inspect` and `run` say so in the same line, before anything is read or captured."""

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from tests.synthetic_checkpoints import (
    CONFIG,
    PLAIN,
    SCHEMES,
    Tensors,
    quantized_module,
    write_checkpoint,
    write_weights,
)

FIRST = "model-00001-of-00003.safetensors"
INDEX = "model.safetensors.index.json"


def config(**changes: Any) -> Callable[[Path], None]:
    return lambda m: (m / "config.json").write_text(json.dumps(CONFIG | changes))


def index(name: str) -> Callable[[Path], None]:
    def change(model: Path) -> None:
        weight_map = json.loads((model / INDEX).read_text())["weight_map"]
        weight_map["lm_head.weight"] = name
        (model / INDEX).write_text(json.dumps({"weight_map": weight_map}))

    return change


def only_weights(tensors: Tensors) -> Callable[[Path], None]:
    """A single file goes before an index."""
    return lambda m: write_weights(m / "model.safetensors", tensors)


def cut_off(model: Path) -> None:
    with (model / FIRST).open("r+b") as file:
        file.truncate((model / FIRST).stat().st_size - 1)


def write_header(path: Path, header: dict[str, Any]) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text)


def quantized_head(name: str) -> Callable[[Path], None]:
    plain = {key: entry for key, entry in PLAIN.items() if key != "lm_head.weight"}
    return only_weights(plain | quantized_module("lm_head", SCHEMES[name]))


CASES: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no config": (
        lambda m: (m / "config.json").unlink(),
        "has no config.json; is it a model directory?",
    ),
    "config that is no JSON": (
        lambda m: (m / "config.json").write_text("{'model_type': 'llama'}"),
        "config.json is not readable JSON",
    ),
    "config nested without end": (
        lambda m: (m / "config.json").write_text('{"a": ' * 100_000),
        "config.json is not readable JSON",
    ),
    "quantization that is no object": (
        config(quantization_config="int4"),
        'quantization_config "int4" is of no known form',
    ),
    "quantization groups that are no objects": (
        config(quantization_config={"quant_method": "compressed-tensors", "config_groups": [1]}),
        "is of no known form",
    ),
    "config of no language model": (
        lambda m: (m / "config.json").write_text('{"model_type": "vit", "hidden_size": 64}'),
        "no part of it has hidden_size, num_hidden_layers, vocab_size",
    ),
    "no weights": (
        lambda m: (m / INDEX).unlink(),
        "has no weights: neither model.safetensors nor model.safetensors.index.json",
    ),
    "index that is no JSON": (
        lambda m: (m / INDEX).write_text("{"),
        "model.safetensors.index.json is not readable JSON",
    ),
    "index that names a missing file": (
        index("model-00004-of-00004.safetensors"),
        "names 3 weight files, 1 of them are not there (first: model-00004-of-00004.safetensors)",
    ),
    "index that leads out of the directory": (
        index("../model.safetensors"),
        "names '../model.safetensors', which is no file of its directory",
    ),
    "index of another checkpoint": (
        index(FIRST),
        f"says that lm_head.weight lies in {FIRST}, which holds no such tensor",
    ),
    "truncated file": (cut_off, f"{FIRST} is cut off: it has "),
    "empty file": (lambda m: (m / FIRST).write_bytes(b""), f"{FIRST} is cut off: it has 0 bytes"),
    "garbage in the place of a header": (
        lambda m: (m / FIRST).write_bytes(struct.pack("<Q", 64) + b"\xff" * 64),
        f"{FIRST} has no readable safetensors header",
    ),
    "header with impossible offsets": (
        lambda m: write_header(
            m / FIRST, {"a": {"dtype": "U8", "shape": [1], "data_offsets": [9, 1]}}
        ),
        "has no readable safetensors header (ValueError('data_offsets 9, 1",
    ),
    "header whose tensors share bytes": (
        lambda m: write_header(
            m / FIRST,
            {
                "a": {"dtype": "U8", "shape": [8], "data_offsets": [0, 8]},
                "b": {"dtype": "U8", "shape": [8], "data_offsets": [4, 12]},
            },
        ),
        "has no readable safetensors header (a and b share bytes)",
    ),
    "another kind of file": (
        lambda m: (m / FIRST).write_text("<!DOCTYPE html><html>404</html>"),
        "its first 8 bytes give the length",
    ),
    "git-lfs pointer": (
        lambda m: (m / FIRST).write_text("version https://git-lfs.github.com/spec/v1\n"),
        "is a git-lfs pointer, not the file: run `git lfs pull` there",
    ),
    "two embeddings": (
        only_weights(PLAIN | {"draft.embed_tokens.weight": ("BF16", (96, 64))}),
        "2 tensors end in it: draft.embed_tokens.weight, model.embed_tokens.weight",
    ),
    "shape that contradicts the config": (
        config(vocab_size=97),
        "has shape [96, 64], the config says [97, 64]; config and weights are of different models",
    ),
    "no head and not tied": (
        only_weights({k: entry for k, entry in PLAIN.items() if k != "lm_head.weight"}),
        "has no lm_head.weight although its config says tie_word_embeddings = false",
    ),
    "remote code": (
        config(model_type="own", auto_map={"AutoConfig": "configuration_own.OwnConfig"}),
        "transformers has no model type 'own'; its code lies beside the weights (configuration_own.OwnConfig)",
    ),
    **{
        f"head quantized by {name}": (
            quantized_head(name),
            "a quantized head or one with a bias is not supported",
        )
        for name in SCHEMES
    },
}

RUN = ("truncated file", "remote code", "two embeddings", "head quantized by gptq")
"""What `run` is tried with too; it asks the same functions."""


@pytest.fixture
def damaged(tmp_path, request) -> tuple[str, str]:
    """The directory of a checkpoint of one of the CASES, and what has to be said about it."""
    damage, words = CASES[request.param]
    model = write_checkpoint(tmp_path / "model", CONFIG, PLAIN, files=3)
    damage(model)
    return str(model), words


@pytest.mark.parametrize("damaged", CASES, indirect=True)
def test_inspect_refuses_it_in_one_line(damaged, capsys):
    model, words = damaged

    assert main(["inspect", model]) == 1

    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.startswith("outrider: ")
    assert words in captured.err
    assert model in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize("damaged", RUN, indirect=True)
def test_run_refuses_it_before_any_stage(damaged, refusal, plain):
    model, words = damaged

    assert words in refusal(verifier={"model": model})
    assert not (Path(plain["store"]) / "verifier").exists()
    assert not (Path(plain["store"]) / "conversations").exists()
