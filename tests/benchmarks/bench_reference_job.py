"""The reference job: a Kimi-K2.5-sized draft, 10 samples of up to 2,048 tokens, 3 epochs, a checkpoint an epoch.

`python tests/benchmarks/bench_reference_job.py [--tiny] [--directory DIR] [--output FILE]`

Makes a verifier directory of the three tensors and random captured states, then times what a run does with them: the
jobs of train and export, each in a process of its own, from the start of the first to the published speculator. Beside
it speculators' own command trains the same draft on the same samples and states, each from a fresh process, both with a
checkpoint an epoch. The published run of this job took "about a minute" on one GPU. `--tiny` is the same with small
sizes, for a try on a CPU, where speculators' Trainer does not run.
"""

import argparse
import datetime as dt
import json
import logging
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, replace
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from storage import artifacts  # noqa: E402
from storage.arrays import write_arrays  # noqa: E402
from storage.artifacts import Identity  # noqa: E402
from storage.layout import (  # noqa: E402
    CHECKPOINTS,
    SAMPLES,
    SAMPLES_TABLE,
    SPECULATOR,
    SPLIT,
    SPLIT_TABLE,
    STATES,
    VERIFIER,
    VOCAB_FILE,
    VOCAB_MAP,
    shard_directory,
)
from storage.manifest import Manifest  # noqa: E402
from storage.shards import ShardRows, write_shard  # noqa: E402
from storage.store import Store  # noqa: E402
from storage.tables import SAMPLES_SCHEMA, SPLIT_SCHEMA, write_table  # noqa: E402
from tasks.child import Child  # noqa: E402
from tasks.eagle3.draft_plan import plan_draft  # noqa: E402
from tasks.eagle3.draft_settings import DraftSettings  # noqa: E402
from tasks.eagle3.training_settings import TrainSettings  # noqa: E402
from tasks.eagle3.verifier import read_facts  # noqa: E402
from tasks.jobs.load_verifier import run as load_verifier_job  # noqa: E402
from tests.benchmarks import speculators_job  # noqa: E402

FIXTURE = REPOSITORY / "tests/fixtures/kimi_k2_5_config.json"
LAYER_IDS = [2, 30, 58]
EPOCHS, LR, TTT_STEPS, TOKENS = 3, 3e-5, 3, 2048
TINY = {"hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4, "num_key_value_heads": 4,
        "vocab_size": 512, "num_hidden_layers": 61}  # fmt: skip
LENGTHS = (2048, 1931, 1830, 1718, 1640, 1512, 1433, 1290, 1177, 1024)
TRAINED = 8
"""Samples that are trained on; the others are for validation."""


def make_verifier(directory: Path, *, tiny: bool) -> Path:
    """Kimi-K2.5's config with the three tensors a draft needs, random, and no other."""
    directory.mkdir()
    config = json.loads(FIXTURE.read_text())
    if tiny:
        config["text_config"] |= TINY
        for part in (config, config["text_config"]):
            part.update({key: 1 for key in part if key.endswith("token_id")})
    (directory / "config.json").write_text(json.dumps(config))
    vocabulary, hidden = (config["text_config"][k] for k in ("vocab_size", "hidden_size"))
    device = "cuda" if torch.cuda.is_available() else "cpu"
    head, embed = (
        torch.empty(vocabulary, hidden, dtype=torch.bfloat16, device=device).normal_(0, std).cpu()
        for std in (0.02, 1.0)
    )
    tensors = {
        "language_model.model.embed_tokens.weight": embed,
        "language_model.model.norm.weight": torch.rand(hidden).add_(0.5).bfloat16(),
        "language_model.lm_head.weight": head,
    }
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


@contextmanager
def artifact(
    store: Store, stage: str, made: dict[str, Manifest], *, directory: str = ""
) -> Iterator[Any]:
    """Write one artifact under some identity: what it is made of does not matter here."""
    wanted = Identity(stage=stage, version=1, settings={}, inputs={"job": "reference"})
    if directory:
        wanted = replace(wanted, directory=directory)
    with artifacts.write(store, wanted) as writer:
        yield writer
        made[stage] = writer.publish(rows=len(LENGTHS))


def make_data(store: Store, verifier: Path, peer: Path) -> dict[str, Manifest]:
    """Samples, states, split and vocabulary map, as the stages before training leave them; the same for speculators."""
    facts = read_facts(verifier)
    draft_size = min(32_000, facts.vocab_size // 2)
    generator = torch.Generator().manual_seed(0)
    texts = [torch.randint(draft_size, (n,), generator=generator).tolist() for n in LENGTHS]
    masks = [[place >= 0.3 * n for place in range(n)] for n in LENGTHS]
    names = [f"{n:064x}" for n in range(len(texts))]
    rows = [{"conversation_id": name, "source": "random"} for name in names]
    made: dict[str, Manifest] = {}
    with artifact(store, SAMPLES, made) as writer, writer.file(SAMPLES_TABLE) as path:
        samples = [
            row
            | {
                "sample_id": row["conversation_id"],
                "input_ids": text,
                "loss_mask": mask,
                "truncated": False,
            }
            for row, text, mask in zip(rows, texts, masks, strict=True)
        ]
        write_table(path, samples, schema=SAMPLES_SCHEMA)
    with artifact(store, SPLIT, made) as writer, writer.file(SPLIT_TABLE) as path:
        sides = [row | {"side": "train" if n < TRAINED else "val"} for n, row in enumerate(rows)]
        write_table(path, sides, schema=SPLIT_SCHEMA)
    with artifact(store, VOCAB_MAP, made) as writer, writer.file(VOCAB_FILE) as path:
        t2d = np.arange(facts.vocab_size) < draft_size
        write_arrays(path, {"d2t": np.zeros(draft_size, np.int64), "t2d": t2d.astype(np.uint8)})
    place = shard_directory("reference", "job")
    with artifact(store, STATES, made, directory=place) as writer:
        tokens, hidden = sum(LENGTHS), facts.hidden_size
        aux = torch.randn(tokens, len(LAYER_IDS) * hidden, generator=generator).bfloat16()
        last = torch.randn(tokens, hidden, generator=generator).bfloat16()
        write_shard(
            writer,
            aux=aux,
            last=last,
            rows=ShardRows.from_lists(names, texts),
            layer_ids=LAYER_IDS,
        )
    states = list(zip(aux.split(LENGTHS), last.split(LENGTHS), strict=True))
    speculators_job.write_data(peer, texts, masks, states, t2d)
    return made


def load_verifier(store: Store, verifier: Path) -> Manifest:
    """The stage's own job, in this process: the timed ones start with no seed to fork from."""
    wanted = Identity(stage=VERIFIER, version=1, settings={}, inputs={"model": "reference"})
    request = {
        "store": store.url,
        "identity": asdict(wanted),
        "directory": str(verifier),
        "trust_remote_code": False,
    }
    load_verifier_job(request, lambda *_: None)
    return artifacts.require(store, wanted.path)


def run_job(
    store: Store, verifier: Path, made: dict[str, Manifest]
) -> tuple[dict[str, float], dict[str, Any]]:
    """Train and export as a run does; returns the seconds of each and the facts of the training."""
    parts = {
        "verifier": made[VERIFIER].path,
        "directory": str(verifier),
        "vocab_map": made[VOCAB_MAP].path,
        "layer_ids": LAYER_IDS,
        "draft": plan_draft(DraftSettings(), read_facts(verifier).text_config).model_dump(
            mode="json"
        ),
    }
    settings = TrainSettings(
        epochs=EPOCHS,
        lr=LR,
        ttt_steps=TTT_STEPS,
        tokens_per_batch=TOKENS,
        checkpoint_seconds=1e6,
        precision="bf16",
        device="auto",
    )
    trained = Identity(stage=CHECKPOINTS, version=1, settings={}, inputs={"job": "reference"})
    exported = Identity(stage=SPECULATOR, version=1, settings={}, inputs={"job": "reference"})
    seconds = {}
    started = time.perf_counter()
    with Child("tasks.jobs.train") as child:
        child.request(
            {
                "store": store.url,
                "identity": asdict(trained),
                "states": [made[STATES].path],
                "quarantined": [],
                "samples": [made[SAMPLES].path],
                "split": made[SPLIT].path,
                "draft_parts": parts,
                "settings": settings.model_dump(mode="json"),
                "initial": None,
            }
        )
    seconds["train"] = time.perf_counter() - started
    with Child("tasks.jobs.export") as child:
        child.request(
            {
                "store": store.url,
                "identity": asdict(exported),
                "draft": parts | {"seed": 0, "weights": trained.path},
                "dtype": "bfloat16",
                "verifier_path": str(verifier),
                "draft_tokens": 3,
                "trust_remote_code": False,
            }
        )
    seconds["all"] = time.perf_counter() - started
    seconds["export"] = seconds["all"] - seconds["train"]
    artifacts.require(store, exported.path)
    return seconds, artifacts.require(store, trained.path).facts


def run_peer_job(directory: Path, verifier: Path) -> float:
    """Seconds of speculators' own command."""
    plan = plan_draft(DraftSettings(), read_facts(verifier).text_config)
    return speculators_job.run_job(
        directory,
        verifier,
        draft_layer=plan.layer,
        layer_ids=LAYER_IDS,
        settings={"epochs": EPOCHS, "lr": LR, "ttt_steps": TTT_STEPS, "total_seq_len": TOKENS},
        train_share=TRAINED / len(LENGTHS),
    )


def disk_speed(directory: Path) -> float:
    """GB/s that the disk takes past the page cache, or memory where it is no disk, by 4 GB of dd."""
    file, size = directory / "speed", 4 << 30
    command = ["dd", "if=/dev/zero", f"of={file}", "bs=64M", f"count={size >> 26}"]
    seconds = []
    for flags in (["oflag=direct"], ["conv=fsync"]):
        started = time.perf_counter()
        if subprocess.run([*command, *flags], capture_output=True, check=False).returncode == 0:
            seconds.append(time.perf_counter() - started)
        file.unlink(missing_ok=True)
    return size / min(seconds) / 1e9


def main() -> None:
    """Parse, prepare, time, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--tiny", action="store_true", help="small sizes, not recorded")
    parser.add_argument("--directory", type=Path, help="where to work: 60 GB for the full size")
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / "tests/benchmarks/results.jsonl"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
        verifier = make_verifier(Path(scratch, "verifier"), tiny=arguments.tiny)
        store = Store(str(Path(scratch, "store")))
        peer = Path(scratch, "speculators")
        made = make_data(store, verifier, peer) | {VERIFIER: load_verifier(store, verifier)}
        disk = disk_speed(Path(scratch))
        seconds, facts = run_job(store, verifier, made)
        shutil.rmtree(Path(scratch, "store"))  # speculators' checkpoints take 50 GB
        peer_seconds = run_peer_job(peer, verifier) if torch.cuda.is_available() else None
    record = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "CPU",
        "versions": {n: version(n) for n in ("torch", "transformers", "speculators")},
        "command": "python tests/benchmarks/bench_reference_job.py",
        "benchmark": "reference job: Kimi-K2.5 draft, 10 samples, 3 epochs, process start to speculator",
        "unit": "seconds",
        "ours": round(seconds["all"], 1),
        "peer": peer_seconds and round(peer_seconds, 1),
        "peer_name": "speculators' own command, without an export",
        "ratio": peer_seconds and round(peer_seconds / seconds["all"], 2),
        "ceiling": 40,
        "disk_gb_per_second": round(disk, 2),
        "seconds": {name: round(value, 1) for name, value in seconds.items()},
        "steps": facts["steps"],
        "parameters_million": round(facts["parameters"] / 1e6, 2),
        "seconds_per_step": facts["seconds_per_step"],
    }
    print(json.dumps(record))
    if not arguments.tiny:
        with arguments.output.open("a") as results:
            results.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
