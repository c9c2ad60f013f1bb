"""Planning a capture of millions of samples: seconds and peak memory.

`python tests/benchmarks/bench_plan.py [--samples 10000000] [--tokens 8] [--directory /dev/shm] [--record]`

The samples tables are synthetic: random ids and token ids, in parts. Lists of 8 tokens on average fit any disk; what a
plan does for a sample does not depend on its tokens but for copying them, which `--tokens 700` measures (10 million
of those take 40 GB of disk). Each step runs in a process of its own:

plan      nothing is captured yet: plan_capture
open      open_plan, as the sub-flow does
resume    all but the last shard is captured: plan_capture
check     all is captured: what `capture` returns at the end of the stage
"""

import argparse
import datetime as dt
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from storage import artifacts  # noqa: E402
from storage.artifacts import Identity  # noqa: E402
from storage.layout import CAPTURE_PLAN, ROWS_TABLE, SAMPLES, SAMPLES_TABLE, VERIFIER  # noqa: E402
from storage.shards import ROWS_SCHEMA  # noqa: E402
from storage.store import Store  # noqa: E402
from storage.tables import SAMPLES_SCHEMA, write_table  # noqa: E402
from tasks.capture import capture, open_plan, plan_capture  # noqa: E402
from tasks.capture_settings import CaptureSettings  # noqa: E402
from tasks.load_verifier import Verifier, load_verifier, open_verifier  # noqa: E402
from tasks.stage import StageResult, call  # noqa: E402

PARTS = 20
STEPS = ("plan", "open", "resume", "check")
SETTINGS = CaptureSettings(
    shard_megabytes=100_000
)  # 2,000 samples a shard, whatever the verifier's width


def make_samples(store: Store, samples: int, mean_tokens: int) -> None:
    """Publish parts of random samples of `mean_tokens` on average, half of it to one and a half."""
    random = np.random.default_rng(0)
    for part in range(PARTS):
        rows = samples // PARTS
        lengths = random.integers(mean_tokens // 2, mean_tokens * 3 // 2 + 1, rows)
        identity = Identity(SAMPLES, 1, {}, {"part": str(part)})
        with artifacts.write(store, identity) as writer:
            with writer.file(SAMPLES_TABLE) as path:
                write_table(path, _samples_table(random, lengths), schema=SAMPLES_SCHEMA)
            writer.publish(rows=rows, facts={"tokens": int(lengths.sum())})


def _samples_table(random: np.random.Generator, lengths: "np.ndarray[Any, Any]") -> pa.Table:
    rows, tokens = len(lengths), int(lengths.sum())
    offsets = pa.array(np.concatenate([[0], np.cumsum(lengths)]), pa.int32())
    hexadecimal = np.frombuffer(b"0123456789abcdef", np.uint8)[random.integers(0, 16, rows * 24)]
    starts = np.arange(0, rows * 24 + 1, 24, dtype=np.int32)
    ids = pa.StringArray.from_buffers(rows, pa.py_buffer(starts), pa.py_buffer(hexadecimal))
    columns = {
        "sample_id": ids,
        "conversation_id": ids,
        "source": pa.repeat(pa.scalar("synthetic"), rows),
        "input_ids": pa.ListArray.from_arrays(
            offsets, pa.array(random.integers(0, 150_000, tokens), pa.int32())
        ),
        "loss_mask": pa.ListArray.from_arrays(offsets, pa.array(random.random(tokens) < 0.7)),
        "truncated": pa.repeat(pa.scalar(False), rows),
    }
    return pa.table(columns)


def make_shards(store: Store, *, all_of_them: bool) -> None:
    """Publish what planning reads of captured shards, their tables of rows; the last shard only if `all_of_them`."""
    from storage.plans import read_samples

    plan = open_plan(store, first_plan(store))
    for rows in plan.ranges if all_of_them else plan.ranges[:-1]:
        if artifacts.find(store, plan.identity(rows)) is not None:
            continue
        table = read_samples(store, plan.manifest, rows)
        ends = np.cumsum(table["input_ids"].combine_chunks().value_lengths().to_numpy())
        starts = np.concatenate([[0], ends[:-1]])
        table = table.append_column("start", pa.array(starts)).append_column("stop", pa.array(ends))
        with artifacts.write(store, plan.identity(rows)) as writer:
            with writer.file(ROWS_TABLE) as file:
                write_table(file, table, schema=ROWS_SCHEMA)
            writer.publish(rows=len(rows))


def step(name: str, store: Store, verifier: Verifier) -> dict[str, Any]:
    """Do one step; returns its figures."""
    samples = StageResult(tuple(artifacts.list_manifests(store, SAMPLES)), reused=True)
    before = peak_gb()
    began, cpu_began = time.perf_counter(), time.process_time()
    if name == "open":
        shards = len(open_plan(store, first_plan(store)).ranges)
    elif name == "check":
        shards = len(call(capture, store, samples, verifier, SETTINGS, 0.01, reused=False).parts)
    else:
        plan = plan_capture(store, samples, verifier, SETTINGS, 0.01)
        assert plan is not None
        shards = len(open_plan(store, plan.path).ranges)
    return {
        "seconds": round(time.perf_counter() - began, 1),
        "cpu_seconds": round(time.process_time() - cpu_began, 1),
        "peak_gb": round(peak_gb(), 2),
        "before_gb": round(before, 2),
        "shards": shards,
    }


def first_plan(store: Store) -> str:
    """Path of the plan that holds all samples."""
    return max(artifacts.list_manifests(store, CAPTURE_PLAN), key=lambda plan: plan.rows).path


def peak_gb() -> float:
    """Largest resident set of this process so far; getrusage's would hold that of the process that started it."""
    status = Path("/proc/self/status").read_text()
    return int(status.split("VmHWM:")[1].split()[0]) * 1024 / 1e9


def steps(directory: Path, samples: int, mean_tokens: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Make the tables, then do each step in a process of its own."""
    from tests.tiny_models import make_llama

    store = Store(str(directory / "store"))
    call(load_verifier, store, str(make_llama(directory / "verifier")))
    make_samples(store, samples, mean_tokens)
    for name in STEPS:
        if name in {"resume", "check"}:
            make_shards(store, all_of_them=name == "check")
        command = [sys.executable, __file__, "--directory", str(directory), "--step", name]
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True)
        figures = json.loads(done.stdout.splitlines()[-1])
        print(name, figures, flush=True)
        yield name, figures


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=10_000_000)
    parser.add_argument("--tokens", type=int, default=8, help="tokens of a sample on average")
    parser.add_argument("--directory", type=Path, help="where the tables are made")
    parser.add_argument("--record", action="store_true", help="append to results.jsonl")
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.step:
        store = Store(str(options.directory / "store"))
        (loaded,) = artifacts.list_manifests(store, VERIFIER)
        verifier = open_verifier(store, str(options.directory / "verifier"), loaded)
        print(json.dumps(step(options.step, store, verifier)))
        return
    with tempfile.TemporaryDirectory(dir=options.directory) as directory:
        figures = dict(steps(Path(directory), options.samples, options.tokens))
    record = {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": f"{platform.machine()}, {os.cpu_count()} cores",
        "versions": {name: version(name) for name in ("pyarrow", "numpy")},
        "command": f"python tests/benchmarks/bench_plan.py --samples {options.samples} --tokens {options.tokens}",
        "benchmark": f"planning a capture of {options.samples:,} samples of {options.tokens} tokens",
        "unit": "seconds",
        "ours": figures["plan"]["seconds"],
        "peer": None,
        "ratio": None,
        "ceiling": 60,
        "peak_gb": max(found["peak_gb"] for found in figures.values()),
        "steps": figures,
    }
    print(json.dumps(record))
    if options.record:
        with (REPOSITORY / "tests/benchmarks/results.jsonl").open("a") as results:
            results.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
