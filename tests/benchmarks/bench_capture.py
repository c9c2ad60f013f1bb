"""Capture against a plain transformers loop: tokens/s of real tokens, the files written included.

`python tests/benchmarks/bench_capture.py [--texts demo|mixed] [--rounds N] [--quick] [--record]`
`python tests/benchmarks/bench_capture.py --device cuda --texts long --record`

Ours is what a run does: the plan, a worker process for each core, the canary, shards published in a store. The plain
loop is one process with a thread for each core. It takes the same samples in the order given, as many to a batch as
fit `--tokens-per-batch` when padded, asks transformers for all hidden states and saves the wanted layers and the last
as safetensors, a file for each shard's worth of samples. It runs with the model's logits and, stronger, without. The
dtype and the size of a batch are the same for all. Rounds are interleaved, medians are compared, and the speed of plain
matrix products is measured in the same run. Seconds of CPU time stand beside those of the clock: others on the machine
disturb them less.

On a CPU the verifier is the demo's. On a GPU it is a random one of Qwen3-8B's shape, 16 GB, made in `--directory`,
and the plain loop, a quarter as fast, takes the first quarter of the samples.
"""

import argparse
import datetime as dt
import json
import logging
import math
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any, NamedTuple

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tasks.processes import DEFAULTS  # noqa: E402

os.environ.update(DEFAULTS)  # both sides' threads wait alike; read when torch is imported

import psutil  # noqa: E402
import torch  # noqa: E402
from torch import Tensor  # noqa: E402

from flows.settings import load_settings  # noqa: E402
from storage import artifacts  # noqa: E402
from storage.artifacts import Identity  # noqa: E402
from storage.layout import SAMPLES, SAMPLES_TABLE, STATES, capture_directory  # noqa: E402
from storage.shards import open_shard  # noqa: E402
from storage.store import Store  # noqa: E402
from storage.tables import SAMPLES_SCHEMA, read_table, write_table  # noqa: E402
from tasks.capture import (  # noqa: E402
    MODULE,
    bytes_per_token,
    capture_key,
    capture_shard,
    open_plan,
    plan_capture,
)
from tasks.capture_settings import CaptureSettings  # noqa: E402
from tasks.collect import collect  # noqa: E402
from tasks.engines.loading import load_verifier_model  # noqa: E402
from tasks.hardware import STORED, capture_dtype  # noqa: E402
from tasks.load_verifier import Verifier, load_verifier, open_verifier  # noqa: E402
from tasks.progress import ProgressMeter  # noqa: E402
from tasks.stage import StageResult, call  # noqa: E402
from tasks.tokenize_chats import tokenize_chats  # noqa: E402
from tasks.verifier_sources import VerifierSettings, find_model  # noqa: E402
from tasks.worker_pool import WorkerPool  # noqa: E402
from tests.benchmarks.plain_capture import (  # noqa: E402
    make_verifier,
    matmul_ceiling,
    plain_batches,
    plain_loop,
    random_samples,
    sustained_ceiling,
)

DEMO = REPOSITORY / "deployments/smollm2-demo.yaml"
TEXTS = {"demo": (256, 1, 128), "mixed": (128, 16, 1024), "long": (2000, 64, 2048)}
"""Samples, and the shortest and the longest; lengths are log-uniform between, the demo's are its own."""
QUICK_SHARE = 8
STATES_TOLERANCE = 0.02  # of bf16 states: two batches of different sizes round differently


def demo_samples(store: Store, verifier: Verifier, count: int) -> list[list[int]]:
    """Token ids of the demo's first conversations, as its stages make them."""
    settings = load_settings(DEMO)
    conversations = call(collect, store, settings.data)
    (part,) = call(tokenize_chats, store, conversations, verifier, settings.tokenize, 1.0).parts
    with artifacts.open_file(store, part, SAMPLES_TABLE) as path:
        found: list[list[int]] = read_table(path).column("input_ids").to_pylist()[:count]
    return found


def publish(store: Store, samples: Sequence[Sequence[int]], name: str) -> StageResult:
    """The samples as tokenize_chats leaves them."""
    rows = [
        {
            "sample_id": f"{number:064x}",
            "conversation_id": str(number),
            "source": name,
            "input_ids": list(ids),
            "loss_mask": [True] * len(ids),
            "truncated": False,
        }
        for number, ids in enumerate(samples)
    ]
    wanted = Identity(stage=SAMPLES, version=1, settings={}, inputs={"benchmark": name})
    with artifacts.write(store, wanted) as writer:
        with writer.file(SAMPLES_TABLE) as path:
            write_table(path, rows, schema=SAMPLES_SCHEMA)
        facts = {"tokens": sum(map(len, samples))}
        return StageResult((writer.publish(rows=len(rows), facts=facts),), reused=False)


class Ours:
    """A run's capture: plan, shards by worker processes, each checked and published."""

    def __init__(self, store: Store, verifier: Verifier, settings: CaptureSettings) -> None:
        self._store, self._verifier, self._settings = store, verifier, settings
        self.pool = WorkerPool(
            MODULE, processes=settings.processes, gpus_per_process=settings.gpus_per_process
        )

    def capture(self, samples: StageResult, **changes: int) -> None:
        """Capture all of the samples, by settings of which some are changed."""
        settings = self._settings.model_copy(update=changes)
        plan = plan_capture(self._store, samples, self._verifier, settings, 0.01)
        assert plan is not None, "these samples have their states already"
        work = open_plan(self._store, plan.path)
        meter = ProgressMeter("capture", work.tokens(work.ranges), "tokens")

        def one(rows: Any) -> None:
            capture_shard.fn(
                self._store,
                work,
                rows,
                verifier=self._verifier,
                settings=self._settings,
                pool=self.pool,
                meter=meter,
            )

        with ThreadPoolExecutor(max_workers=2 * self._settings.processes) as threads:
            list(threads.map(one, work.ranges))

    def cpu_seconds(self) -> float:
        """CPU time of the worker processes so far."""
        return sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in self.pool.pids)

    def forget(self) -> None:
        """Take away what was captured."""
        self._store.delete(STATES)

    def states(self, key: str) -> dict[str, tuple[Tensor, Tensor]]:
        """Sample id -> its aux and last, of all shards."""
        found = {}
        for manifest in artifacts.list_manifests(self._store, capture_directory(key)):
            with open_shard(self._store, manifest) as shard:
                places = shard.rows.offsets
                for i, sample in enumerate(shard.rows.sample_ids):
                    rows = int(places[i]), int(places[i + 1])
                    found[sample] = (shard.aux(*rows), shard.last(*rows))
        return found


def check_states(ours: dict[str, tuple[Tensor, Tensor]], plain: dict[int, Tensor]) -> float:
    """The largest relative error of any kept sample's aux, per token as the canary takes it."""
    worst = 0.0
    for number, state in plain.items():
        aux, _ = ours[f"{number:064x}"]
        own = state.float()
        error = torch.linalg.vector_norm(aux.float() - own, dim=-1)
        size = torch.linalg.vector_norm(own, dim=-1)
        worst = max(worst, float((error / size).mean()))
    if not worst <= STATES_TOLERANCE:
        raise SystemExit(f"the states of the two sides are {worst:.2%} apart")
    return worst


class Times(NamedTuple):
    """Seconds of one side's rounds."""

    wall: list[float]
    cpu: list[float]


def measure(
    sides: dict[str, Callable[[], object]],
    *,
    prepare: Callable[[], None],
    rounds: int,
    tokens: dict[str, int],
    cpu_seconds: Callable[[], float],
) -> dict[str, Times]:
    """Time each side in each round, one after the other; `cpu_seconds` is that of all processes so far."""
    times = {name: Times([], []) for name in sides}
    for number in range(rounds):
        for name, side in sides.items():
            prepare()
            started, cpu_before = time.perf_counter(), cpu_seconds()
            side()
            times[name].cpu.append(cpu_seconds() - cpu_before)
            times[name].wall.append(time.perf_counter() - started)
            print(
                f"round {number + 1}  {name:28s} {tokens[name] / times[name].wall[-1]:10,.0f} tokens/s"
                f" {tokens[name] / times[name].cpu[-1]:10,.0f} tokens per CPU second",
                flush=True,
            )
    return times


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--texts", choices=TEXTS, action="append")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dtype", choices=("auto", "float32", "bfloat16"), default="auto")
    parser.add_argument("--tokens-per-batch", type=int, help="default: 2048, on a GPU 8192")
    parser.add_argument("--processes", type=int, help="of ours; default: the cores, one GPU")
    parser.add_argument("--compile", action="store_true", help="capture.compile")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--quick", action="store_true", help="an eighth of the samples")
    parser.add_argument("--record", action="store_true", help="append to results.jsonl")
    parser.add_argument("--directory", type=Path, help="where to work: 50 GB on a GPU")
    parser.add_argument("--verifier", help="as verifier.model in a settings file")
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / "tests/benchmarks/results.jsonl"
    )
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    for name in arguments.texts or (["demo", "mixed"] if arguments.device == "cpu" else ["long"]):
        with tempfile.TemporaryDirectory(dir=arguments.directory) as scratch:
            record = compare(name, Path(scratch), arguments)
        print(json.dumps(record))
        if arguments.record:
            if arguments.quick:
                raise SystemExit("a quick run is not recorded; leave --quick out")
            with arguments.output.open("a") as results:
                results.write(json.dumps(record) + "\n")


def compare(texts: str, scratch: Path, arguments: Any) -> dict[str, Any]:
    """Run both sides on one kind of texts; returns the line of results.jsonl."""
    device = arguments.device
    count, shortest, longest = TEXTS[texts]
    count = count // QUICK_SHARE if arguments.quick else count
    settings = CaptureSettings.model_validate(
        {
            "device": device,
            "dtype": arguments.dtype,
            "gpus": arguments.processes or ((os.cpu_count() or 1) if device == "cpu" else 1),
            "compile": arguments.compile,
            "tokens_per_batch": arguments.tokens_per_batch or (2048 if device == "cpu" else 8192),
        }
    )
    store = Store(str(scratch / "store"))
    if arguments.verifier is None and device == "cuda":
        directory = make_verifier(scratch / "verifier", device)
    else:
        model_name = arguments.verifier or load_settings(DEMO).verifier.model
        directory = find_model(VerifierSettings(model=model_name))
    (loaded,) = call(load_verifier, store, str(directory)).parts
    verifier = open_verifier(store, str(directory), loaded)
    layer_ids = settings.layer_ids(verifier.facts.num_hidden_layers)
    if texts == "demo":
        samples = demo_samples(store, verifier, count)
    else:
        samples = random_samples(count, shortest, longest, verifier.facts.vocab_size)
    tokens = sum(map(len, samples))
    theirs = samples[: len(samples) // 4] if device == "cuda" else samples
    counts = dict.fromkeys(("plain", "plain, without logits"), sum(map(len, theirs)))
    counts["ours"] = tokens
    if device == "cpu":  # few tokens: shards of equal size, one for each process
        size = tokens * bytes_per_token(verifier, settings) / settings.processes
        settings = settings.model_copy(update={"shard_megabytes": math.ceil(1.1 * size / 1e6)})
    dtype_name = capture_dtype(settings.dtype, device)
    dtype = torch.bfloat16 if dtype_name == STORED else getattr(torch, dtype_name)
    model = load_verifier_model(directory, device=device, dtype=dtype)
    weights = sum(p.numel() for p in model.base_model.layers.parameters())
    wanted, warm = (
        publish(store, samples, texts),
        publish(store, samples[: settings.processes], "warm"),
    )
    ours = Ours(store, verifier, settings)
    found: dict[str, Any] = {}

    def forget() -> None:
        ours.forget()
        shutil.rmtree(scratch / "plain", ignore_errors=True)
        (scratch / "plain").mkdir()

    def plain_side(*, logits: bool) -> None:
        found["plain"] = plain_loop(model, theirs, layer_ids, settings, scratch / "plain", logits)

    with ours.pool:
        ours.capture(warm, rows_per_shard=1)  # every worker loads the model
        plain_loop(model, samples[:2], layer_ids, settings, scratch, logits=True)
        times = measure(
            {
                "plain": lambda: plain_side(logits=True),
                "plain, without logits": lambda: plain_side(logits=False),
                "ours": lambda: ours.capture(wanted),
            },
            prepare=forget,
            rounds=arguments.rounds,
            tokens=counts,
            cpu_seconds=lambda: ours.cpu_seconds() + time.process_time(),
        )
    apart = check_states(ours.states(capture_key(verifier, settings)), found["plain"])
    ceiling = matmul_ceiling(dtype, device)
    sustained = sustained_ceiling(dtype, device) if device == "cuda" else None
    padded = sum(
        max(map(len, batch)) * len(batch)
        for batch in plain_batches(samples, settings.tokens_per_batch)
    )
    speed = {name: counts[name] / statistics.median(t.wall) for name, t in times.items()}
    cpu = {name: counts[name] / statistics.median(t.cpu) for name, t in times.items()}
    for name, value in speed.items():
        print(
            f"{name:28s} {value:10,.0f} tokens/s, {2 * weights * value / 1e9 / ceiling:.0%} of the ceiling"
        )
    ratios = {
        name: round(speed["ours"] / value, 2) for name, value in speed.items() if name != "ours"
    }
    cpu_ratios = {
        name: round(cpu["ours"] / value, 2) for name, value in cpu.items() if name != "ours"
    }
    print(f"ours against: {ratios}, in CPU seconds {cpu_ratios}; states {apart:.2%} apart")
    cuda = device == "cuda"
    flops = 2 * weights * speed["ours"] / 1e9
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name()
        if cuda
        else f"{platform.machine()}, {torch.get_num_threads()} threads",
        "versions": {n: version(n) for n in ("torch", "transformers")},
        "command": "python tests/benchmarks/bench_capture.py"
        + (f" --device cuda{' --compile' * arguments.compile}" if cuda else ""),
        "benchmark": f"capture, {'Qwen3-8B shape' if cuda else 'SmolLM2-135M'}, {texts} texts, "
        f"{str(dtype).removeprefix('torch.')}, {settings.tokens_per_batch} tokens a batch, files written",
        "unit": "tokens/s",
        "ours": round(speed["ours"], 1),
        "peer": round(speed["plain"], 1),
        "ratio": ratios["plain"],
        "ceiling": f"{ceiling:,.0f} GFLOP/s",
        "peer_name": "plain transformers loop",
        "ratio_without_logits": ratios["plain, without logits"],
        "ratios_of_cpu_seconds": cpu_ratios,
        "share_of_ceiling": round(flops / ceiling, 3),
        **({"share_of_sustained_ceiling": round(flops / sustained, 3)} if sustained else {}),
        "processes": settings.processes,
        "samples": len(samples),
        "tokens": tokens,
        "padding_of_plain": round(padded / tokens - 1, 3),
        "states_apart": round(apart, 5),
    }


if __name__ == "__main__":
    main()
