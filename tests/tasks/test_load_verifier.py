"""What load_verifier reads of a checkpoint, and what it takes for another model."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import pytest

from storage.artifacts import Identity
from storage.store import Store
from tasks.eagle3.verifier import identity
from tasks.load_verifier import load_verifier
from tasks.stage import call
from tests.synthetic_checkpoints import CONFIG, PLAIN, write_checkpoint
from tests.tiny_runs import ROOT

MB = 1 << 20

READ = """
import json, sys
from pathlib import Path
from tasks.jobs.load_verifier import run

def peak_bytes():
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) << 10 for line in lines if line.startswith("VmHWM"))

small, large = json.loads(sys.argv[1])
run(small, lambda _: None)  # what the job imports is not what it reads
before = peak_bytes()
run(large, lambda _: None)
print(peak_bytes() - before)
"""


def test_the_peak_memory_is_that_of_the_three_tensors_whatever_else_there_is(tmp_path):
    vocab, hidden = 1 << 14, 1 << 10
    tensors = {
        "model.embed_tokens.weight": ("BF16", (vocab, hidden)),
        "model.norm.weight": ("BF16", (hidden,)),
        "lm_head.weight": ("BF16", (vocab, hidden)),
    }
    three_bytes = 2 * (2 * vocab * hidden + hidden)
    for layer in range(16):  # 1 GiB more
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = ("BF16", (1 << 15, hidden))
    config = CONFIG | {"vocab_size": vocab, "hidden_size": hidden}
    directory = write_checkpoint(tmp_path / "m", config, tensors, files=2)
    requests = [
        {
            "directory": str(model),
            "store": str(tmp_path / "store"),
            "identity": asdict(Identity("verifier", 1, {}, {"model": str(model)})),
        }
        for model in (write_checkpoint(tmp_path / "small"), directory)
    ]

    done = subprocess.run(
        [sys.executable, "-c", READ, json.dumps(requests)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert three_bytes == 64 * MB + 2 * hidden
    assert 0.9 * three_bytes < int(done.stdout) < three_bytes + 24 * MB


@pytest.fixture(scope="module")
def large(tmp_path_factory) -> Path:
    """A checkpoint with one file of 1 GiB and a little more, most of it in one tensor."""
    tensors = PLAIN | {"model.layers.0.mlp.up_proj.weight": ("U8", (1 << 30,))}
    return write_checkpoint(tmp_path_factory.mktemp("large") / "m", CONFIG, tensors)


def flip_one_byte(model: Path) -> None:
    """Change a byte of the large tensor, away from its middle where the sample is taken."""
    weights = model / "model.safetensors"
    with weights.open("r+b") as file:
        file.seek(weights.stat().st_size - 1000)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


def test_one_byte_of_a_large_file_counts_when_all_are_digested(large):
    sampled, full = identity(large), identity(large, full_digests=True)

    flip_one_byte(large)

    assert identity(large) == sampled
    assert identity(large, full_digests=True) != full
    # which kind of digest it is belongs to the identity
    assert sampled != full


def test_of_a_small_file_every_byte_counts_either_way(tmp_path):
    model = write_checkpoint(tmp_path / "m")
    before = identity(model)

    assert identity(model, full_digests=True) == before
    flip_one_byte(model)
    assert identity(model) != before


def test_the_stage_digests_all_bytes_with_progress_when_asked(tmp_path, caplog):
    model = write_checkpoint(tmp_path / "m")
    store = Store(str(tmp_path / "store"))

    with caplog.at_level(logging.INFO):
        loaded = call(load_verifier, store, str(model), full_digests=True)

    assert "digest weights: 0 of 0 MB (100 %)" in caplog.text
    assert loaded.parts[0].inputs["model"] == identity(model, full_digests=True)
