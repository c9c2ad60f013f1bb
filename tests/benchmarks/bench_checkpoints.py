"""What checkpoints cost a training that writes one after the other, against the same training without any.

`python tests/benchmarks/bench_checkpoints.py [--shape smollm2|qwen3-8b|kimi-k2.5] [--record]`

smollm2 runs on the CPU, the others on a GPU. Both sides take the same steps; what a checkpoint adds is the difference
of their times, divided by the checkpoints, and is set against the seconds that writing one takes: what a training would
wait for each that is written in its stream.
"""

import argparse
import datetime as dt
import json
import statistics
import sys
import tempfile
import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from storage.artifacts import Identity  # noqa: E402
from storage.checkpoints import Checkpoints  # noqa: E402
from storage.store import Store  # noqa: E402
from tasks.eagle3.batches import TrainingSample  # noqa: E402
from tasks.eagle3.checkpoint_writer import HostCopies  # noqa: E402
from tasks.eagle3.draft import Eagle3DraftModel, trainable_parameters  # noqa: E402
from tasks.eagle3.training import Training  # noqa: E402
from tasks.eagle3.training_settings import TrainSettings  # noqa: E402
from tasks.eagle3.training_state import TrainingState  # noqa: E402
from tasks.jobs.train import checkpoint_saver  # noqa: E402
from tests.benchmarks import bench_train, bench_train_gpu  # noqa: E402

IDENTITY = Identity(stage="checkpoints", version=1, settings={}, inputs={})
STEPS = {"smollm2": 12, "qwen3-8b": 400, "kimi-k2.5": 600}
WARM_UP = 3
"""Steps that are not counted: the first ones compile, and page-lock memory."""


def make_case(shape: str) -> tuple[Eagle3DraftModel, list[TrainingSample], int]:
    """A draft, samples and the tokens of a step."""
    if shape == "smollm2":
        tokens, hidden = 256, int(bench_train.SMOLLM2["hidden_size"])
        samples = [
            TrainingSample(
                input_ids=torch.arange(129) + number,
                aux=torch.randn(129, 3 * hidden),
                last=torch.randn(129, hidden),
                loss_mask=torch.arange(129) >= 30,
            )
            for number in range(8)
        ]
        return bench_train.make_draft(8192), samples, tokens
    sizes, tokens = bench_train_gpu.SHAPES[shape]
    samples = bench_train_gpu.make_samples(sizes, 4 * tokens // bench_train_gpu.DOCUMENT)
    return bench_train_gpu.make_draft(sizes), samples, tokens


def train(shape: str, directory: Path | None) -> dict[str, Any]:
    """Seconds of the steps after the warm-up, and of each checkpoint; none are written without a directory."""
    draft, samples, tokens = make_case(shape)
    lengths = [len(sample.input_ids) for sample in samples]
    settings = TrainSettings(
        epochs=STEPS[shape] * tokens // sum(length - 1 for length in lengths),
        tokens_per_batch=tokens + tokens // 64,
        checkpoint_seconds=1e-9 if directory else 1e9,
        epoch_checkpoints=False,
    )
    on_gpu = shape != "smollm2"
    training = Training(
        draft,
        samples,
        [],
        settings=settings,
        precision="bf16" if on_gpu else "fp32",
        train_lengths=lengths,
        val_lengths=[],
    )
    save = checkpoint_saver(Checkpoints(Store(str(directory)), IDENTITY), keep=2)
    written: list[float] = []
    times: list[float] = []

    def write(state: TrainingState) -> None:
        began = time.perf_counter()
        save(state)
        written.append(time.perf_counter() - began)

    def on_step(step: int, *_: Any) -> None:
        if on_gpu and step == WARM_UP + 1:
            torch.cuda.synchronize()
        times.append(time.perf_counter())

    training.run(on_checkpoint=write, on_step=on_step)
    trainable = sum(value.numel() for value in trainable_parameters(draft).values())
    copy = copy_milliseconds(training, next(draft.parameters()).device)
    return {"times": times, "written": written, "trainable": trainable, "copy": copy}


def copy_milliseconds(training: Training, device: torch.device) -> dict[str, float]:
    """What taking a checkpoint keeps the host from, and the time until its copy is complete."""
    room, tensors = HostCopies(device), training.state().tensors
    room.start(tensors)  # gets the memory
    host, complete = [], []
    for _ in range(7):
        began = time.perf_counter()
        _, copied = room.start(tensors)
        host.append(time.perf_counter() - began)
        if copied is not None:
            copied.synchronize()
        complete.append(time.perf_counter() - began)
    return {
        "host_ms": round(statistics.median(host) * 1e3, 2),
        "copy_ms": round(statistics.median(complete) * 1e3, 2),
    }


def measure(shape: str, directory: Path) -> dict[str, Any]:
    """A line of results.jsonl."""
    without, with_them = train(shape, None), train(shape, directory)
    # the largest is one that holds its weights: of the best step they lie beside it
    files = directory.glob("checkpoints/*/steps/*/attempt-*/*.safetensors")
    largest = max(file.stat().st_size for file in files)
    seconds = [side["times"][-1] - side["times"][WARM_UP] for side in (without, with_them)]
    steps = [
        [b - a for a, b in zip(s["times"][WARM_UP:], s["times"][WARM_UP + 1 :], strict=False)]
        for s in (without, with_them)
    ]
    count = len(with_them["written"])
    write_seconds = statistics.median(with_them["written"])
    added = (seconds[1] - seconds[0]) / count
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": device_name(shape),
        "versions": {name: version(name) for name in ("torch", "safetensors")},
        "command": f"python tests/benchmarks/bench_checkpoints.py --shape {shape}",
        "benchmark": f"checkpoints behind the training, one after the other, {shape} draft",
        "ours": round(added, 4),
        "peer": round(write_seconds, 4),
        "ratio": round(write_seconds / added, 1) if added > 0 else None,
        "unit": "seconds a checkpoint adds",
        "ceiling": None,
        "peer_name": "written in the training's stream",
        **with_them["copy"],
        "checkpoints": count,
        "checkpoint_gb": round(largest / 1e9, 3),
        "bytes_per_trainable_parameter": round(largest / with_them["trainable"], 3),
        "median_step_ms": [round(statistics.median(found) * 1e3, 1) for found in steps],
        "longest_step_ms": [round(max(found) * 1e3, 1) for found in steps],
    }


def device_name(shape: str) -> str:
    """What it ran on."""
    if shape == "smollm2":
        return f"CPU, {torch.get_num_threads()} threads"
    return torch.cuda.get_device_name()


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=STEPS, default="smollm2")
    parser.add_argument("--record", action="store_true", help="append to results.jsonl")
    parser.add_argument("--directory", type=Path, help="where checkpoints are written to")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=arguments.directory) as directory:
        record = measure(arguments.shape, Path(directory))
    print(json.dumps(record))
    if arguments.record:
        with (REPOSITORY / "tests/benchmarks/results.jsonl").open("a") as results:
            results.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
