"""The reference case at full size: Kimi-K2.5's published config, and three tensors of its 554 GB.

The weight files are sparse: their 4.7 GB are zeros that take no disk, but are read as any others.
"""

import json
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig

from tasks.eagle3.draft import DraftSettings, Eagle3SpeculatorConfig, draft_config
from tasks.eagle3.verifier import default_layer_ids, read_facts

CONFIG = Path(__file__).parents[2] / "fixtures" / "kimi_k2_5_config.json"
ROOT = Path(__file__).parents[3]
SHARD = "model-00062-of-000064.safetensors"
TENSORS = {
    "language_model.lm_head.weight": (163_840, 7168),
    "language_model.model.embed_tokens.weight": (163_840, 7168),
    "language_model.model.norm.weight": (7168,),
}
TENSOR_BYTES = 2 * sum(math.prod(shape) for shape in TENSORS.values())
TRAINABLE = 910_192_640
"""fc 3 x 7168^2; q, k, v of 2 x 7168 inputs and o: 7 x 7168^2; the MLP 3 x 7168 x 18,432; four norms of 7,168."""


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    directory = tmp_path_factory.mktemp("kimi-k2.5")
    shutil.copyfile(CONFIG, directory / "config.json")
    write_sparse(directory / SHARD, TENSORS)
    index = {"metadata": {"total_size": TENSOR_BYTES}, "weight_map": dict.fromkeys(TENSORS, SHARD)}
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    yield directory
    (directory / SHARD).unlink()


def write_sparse(path: Path, shapes: dict[str, tuple[int, ...]]) -> None:
    """Write a safetensors file of bf16 zeros that takes no disk."""
    header: dict[str, Any] = {}
    end = 0
    for name, shape in shapes.items():
        start, end = end, end + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with path.open("wb") as file:
        file.write(struct.pack("<Q", len(encoded)) + encoded)
        file.truncate(file.tell() + end)


def config_of(directory: Path) -> Eagle3SpeculatorConfig:
    facts = read_facts(directory)
    return draft_config(
        facts.text_config,
        draft_vocab_size=32_000,
        layer_ids=default_layer_ids(facts.num_hidden_layers),
        settings=DraftSettings(),
        verifier_name_or_path=str(directory),
        verifier_architectures=facts.architectures,
        draft_tokens=3,
    )


def measure(program: str, directory: Path) -> dict[str, Any]:
    """Run a program in a process of its own; returns what it says and its largest memory, in bytes."""
    ending = """
peak = next(line for line in open("/proc/self/status") if line.startswith("VmHWM"))
print(json.dumps({**said, "peak_bytes": int(peak.split()[1]) * 1024}))
"""
    done = subprocess.run(
        [sys.executable, "-c", program + ending, str(directory)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    said: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return said


READ = """
import json, sys
from pathlib import Path
import torch
from tasks.eagle3.head import read_head
from tasks.eagle3.verifier import read_facts

directory = Path(sys.argv[1])
head = read_head(directory, read_facts(directory))
for tensor in (head.embed, head.norm, head.head):  # every byte of them
    assert torch.aminmax(tensor).max == 0
said = {"tied": head.tied, "shape": list(head.head.shape)}
"""

BUILD = """
import json, sys, time
from pathlib import Path
import torch
from tasks.eagle3.draft import build_draft, trainable_parameters
from tasks.eagle3.head import read_head
from tasks.eagle3.verifier import read_facts
from tests.tasks.eagle3.test_kimi_k2_5 import config_of

directory = Path(sys.argv[1])
head = read_head(directory, read_facts(directory))
t2d = torch.zeros(163_840, dtype=torch.bool)
t2d[::5] = True  # 32,768: all but the first 768
t2d[: 768 * 5] = False
config = config_of(directory)
started = time.process_time()
draft = build_draft(
    config,
    embed=head.embed,
    norm=head.norm,
    head=head.head,
    t2d=t2d,
    d2t=t2d.nonzero()[:, 0] - torch.arange(32_000),
    seed=0,
)
said = {
    "cpu_seconds": time.process_time() - started,
    "parameters": sum(value.numel() for value in draft.parameters()),
    "trainable": sum(value.numel() for value in trainable_parameters(draft).values()),
    "deviation": float(draft.fc.weight.std()),
    "unfinished": [name for name, value in draft.state_dict().items() if value.is_meta],
}
"""


@pytest.mark.slow
def test_the_three_tensors_are_read_in_little_more_than_their_own_size(directory: Path) -> None:
    said = measure(READ, directory)
    assert (said["tied"], said["shape"]) == (False, [163_840, 7168])
    assert said["peak_bytes"] < TENSOR_BYTES + 1_000_000_000


@pytest.mark.slow
def test_the_draft_of_2_543_million_parameters_is_built_in_seconds(directory: Path) -> None:
    said = measure(BUILD, directory)
    # counted as speculators does: embedding, two heads and the verifier's norm besides
    assert said["parameters"] == TRAINABLE + 163_840 * 7168 + 2 * 32_000 * 7168 + 7168
    assert round(said["parameters"] / 1e6, 2) == 2543.36
    assert said["trainable"] == TRAINABLE
    assert said["deviation"] == pytest.approx(0.02, rel=0.01)
    assert said["unfinished"] == []
    assert said["cpu_seconds"] < 30
    # the stored tensors as they are mapped, the trainable part and one head in fp32, 1.5 GB of libraries
    assert said["peak_bytes"] < TENSOR_BYTES + 4 * (TRAINABLE + 32_000 * 7168) + 1_500_000_000


def test_its_draft_has_the_reference_shape(directory: Path) -> None:
    layer = config_of(directory).transformer_layer_config
    assert (layer.hidden_size, layer.intermediate_size) == (7168, 18_432)
    assert (layer.num_attention_heads, layer.num_key_value_heads, layer.head_dim) == (64, 64, 112)
    assert (layer.num_hidden_layers, layer.vocab_size) == (1, 163_840)
    assert (layer.rms_norm_eps, layer.max_position_embeddings) == (1e-5, 262_144)
    assert layer.rope_parameters == {
        "rope_type": "yarn",
        "rope_theta": 50_000.0,
        "factor": 64.0,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "attention_factor": 1.0,
    }


def test_its_drafts_config_is_read_back_and_says_what_vllm_reads(
    directory: Path, tmp_path: Path
) -> None:
    config = config_of(directory)
    config.save_pretrained(tmp_path)
    again = Eagle3SpeculatorConfig.from_pretrained(tmp_path)
    assert isinstance(again.transformer_layer_config, LlamaConfig)
    assert again.eagle_aux_hidden_state_layer_ids == [2, 30, 58]
    again.transformer_layer_config.validate_rope()
    # vLLM 0.32 takes the layer's values out of the file as they are (configs/speculators/base.py)
    layer = json.loads((tmp_path / "config.json").read_text())["transformer_layer_config"]
    expected = config.transformer_layer_config
    for field in (
        "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads", "head_dim",
        "num_hidden_layers", "vocab_size", "rms_norm_eps", "max_position_embeddings", "hidden_act",
        "rope_parameters", "num_aux_hidden_states", "attention_bias", "model_type",
    ):  # fmt: skip
        assert layer[field] == getattr(expected, field), field


def test_the_facts_of_its_checkpoint_are_found_under_its_nested_names(directory: Path) -> None:
    facts = read_facts(directory)
    assert (facts.model_type, facts.config_path) == ("kimi_k25", ("text_config",))
    assert facts.embed_key == "language_model.model.embed_tokens.weight"
    assert facts.norm_key == "language_model.model.norm.weight"
    assert facts.head_key == "language_model.lm_head.weight"
    assert (facts.num_hidden_layers, facts.dtype, facts.tied) == (61, "bfloat16", False)
