"""Training step on a GPU against speculators' own, on drafts of Qwen3-8B's and Kimi-K2.5's size.

`python tests/benchmarks/bench_train_gpu.py [--shape qwen3-8b] [--profile FILE] [--record]`

Both sides do the same on the same weights and batches: forward, backward, gradient norm, fused AdamW, in bf16 with fp32
masters. speculators runs as its Trainer runs it: bf16 autocast, flex attention, torch.compile of the whole forward,
and the eager loss (its fused one does not compile with torch 2.11). Each side runs alone: its peak memory is its own.
"""

import argparse
import datetime as dt
import gc
import json
import sys
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tasks.eagle3.batch_feed import BatchFeed  # noqa: E402
from tasks.eagle3.batches import PackedBatch, TrainingSample, pack  # noqa: E402
from tasks.eagle3.draft import Eagle3DraftModel, trainable_parameters  # noqa: E402
from tasks.eagle3.step_plan import StepPlan  # noqa: E402
from tasks.eagle3.training import Training  # noqa: E402
from tasks.eagle3.training_settings import TrainSettings  # noqa: E402
from tests.benchmarks.gpu_sides import (  # noqa: E402
    DOCUMENT,
    SHAPES,
    TTT_STEPS,
    Forward,
    make_draft,
    make_peer_draft,
    make_samples,
    our_forward,
    peer_forward,
    planner,
)

WARM_STEPS, STEPS = 8, 40
LOOP_STEPS = 200
"""Of the training loop, for the share of time it waits; its first ones are timed."""


def measure(
    draft: Eagle3DraftModel,
    forward: Forward,
    samples: list[TrainingSample],
    *,
    tokens: int,
    training_loop: bool,
    profile: Path | None = None,
) -> dict[str, Any]:
    """Time to the first step, a step with batches copied in its stream and made ready aside, peak memory, losses."""
    torch.cuda.reset_peak_memory_stats()
    parameters = list(trainable_parameters(draft).values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    losses = []
    each = tokens // DOCUMENT
    planned = [list(range(start, start + each)) for start in range(0, len(samples), each)]
    batches = [pack([samples[i] for i in indices], pinned=True) for indices in planned]

    def step(batch: PackedBatch, plan: StepPlan | None = None) -> None:
        loss = forward(batch, plan)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.detach())

    started = time.perf_counter()
    step(batches[0])
    torch.cuda.synchronize()
    first = time.perf_counter() - started
    clock = Clock()
    for number in range(WARM_STEPS + STEPS):
        step(batches[number % len(batches)])
        clock.tick()
    in_stream = clock.seconds()
    clock, waited = Clock(), 0.0
    if training_loop:
        del optimizer
        waited = run_training(draft, samples, tokens=each * (DOCUMENT + 1), clock=clock)
    else:
        feed = BatchFeed(samples, torch.device("cuda"), planner(draft))
        order = (planned[n % len(planned)] for n in range(WARM_STEPS + STEPS))
        for ready in feed.batches(order):
            step(ready.batch, ready.plan)
            clock.tick()
    seconds = {"in stream": in_stream, "aside": clock.seconds()}
    peak = torch.cuda.max_memory_allocated()
    if profile is not None:
        optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
        write_profile(lambda: step(batches[0]), profile)
    return {
        "first_step_seconds": round(first, 2),
        "milliseconds": {name: round(value * 1e3, 2) for name, value in seconds.items()},
        "tokens_per_second": {name: round(tokens / value) for name, value in seconds.items()},
        "waited": round(waited, 4),
        "peak_gb": round(peak / 1e9, 2),
        "losses": [round(float(loss), 5) for loss in losses[: 1 + WARM_STEPS + STEPS]],
    }


def run_training(
    draft: Eagle3DraftModel, samples: list[TrainingSample], *, tokens: int, clock: "Clock"
) -> float:
    """This project's training loop, as a run has it; returns the share of time after its first step that it waited
    for data.
    """
    lengths = [len(sample.input_ids) for sample in samples]
    steps = sum(lengths) // tokens
    settings = TrainSettings(
        epochs=-(-LOOP_STEPS // steps),
        lr=1e-4,
        ttt_steps=TTT_STEPS,
        tokens_per_batch=tokens,
        checkpoint_seconds=1e6,
        epoch_checkpoints=False,
    )
    training = Training(
        draft,
        samples,
        [],
        settings=settings,
        precision="bf16",
        train_lengths=lengths,
        val_lengths=[],
    )
    started = waited = 0.0

    def on_step(step: int, *_: Any) -> None:
        nonlocal started, waited
        clock.tick()
        if step == 1:
            started, waited = time.perf_counter(), training.waited_seconds

    training.run(on_checkpoint=lambda *_: None, on_step=on_step)
    return (training.waited_seconds - waited) / (time.perf_counter() - started)


class Clock:
    """Mean seconds of STEPS steps after WARM_STEPS, with nothing waiting between them."""

    def __init__(self) -> None:
        self._ticks = 0
        self._begun = self._ended = 0.0

    def tick(self) -> None:
        """A step was launched."""
        self._ticks += 1
        if self._ticks == WARM_STEPS:
            torch.cuda.synchronize()
            self._begun = time.perf_counter()
        if self._ticks == WARM_STEPS + STEPS:
            torch.cuda.synchronize()
            self._ended = time.perf_counter()

    def seconds(self) -> float:
        """Of one step."""
        return (self._ended - self._begun) / STEPS


def write_profile(step: Callable[[], None], file: Path) -> None:
    """The kernels of three steps, by their time."""
    activities = [torch.profiler.ProfilerActivity.CUDA, torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) as profiler:
        for _ in range(3):
            step()
        torch.cuda.synchronize()
    table = profiler.key_averages().table(sort_by="cuda_time_total", row_limit=60)
    file.write_text(table)


def matmul_ceiling(size: int = 8192) -> float:
    """TFLOP/s of a large bf16 product."""
    a, b = (torch.randn(size, size, device="cuda", dtype=torch.bfloat16) for _ in range(2))
    for _ in range(3):
        a @ b
    torch.cuda.synchronize()
    started = time.perf_counter()
    for _ in range(10):
        a @ b
    torch.cuda.synchronize()
    return 10 * 2 * size**3 / (time.perf_counter() - started) / 1e12


def main() -> None:
    """Parse, measure, report."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument("--profile", type=Path, help="directory for tables of kernels")
    parser.add_argument("--ours-only", action="store_true")
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / "tests/benchmarks/results.jsonl"
    )
    arguments = parser.parse_args()
    for shape in arguments.shape or SHAPES:
        sizes, tokens = SHAPES[shape]
        samples = make_samples(sizes, 4 * tokens // DOCUMENT)
        found: dict[str, dict[str, Any]] = {}
        sides: dict[str, tuple[Callable[[Any], Any], Callable[[Any], Forward]]] = {
            "ours": (make_draft, our_forward),
            "speculators": (make_peer_draft, peer_forward),
        }
        for name, (make, make_forward) in sides.items():
            if arguments.ours_only and name != "ours":
                continue
            draft = make(sizes)
            gc.collect()
            torch.cuda.empty_cache()
            profile = arguments.profile / f"{shape}-{name}.txt" if arguments.profile else None
            found[name] = measure(
                draft,
                make_forward(draft),
                samples,
                tokens=tokens,
                training_loop=name == "ours",
                profile=profile,
            )
            print(shape, name, {k: v for k, v in found[name].items() if k != "losses"}, flush=True)
            print("   losses", found[name]["losses"], flush=True)
            del draft
            gc.collect()
            torch.cuda.empty_cache()
        record = make_record(shape, tokens, found)
        print(json.dumps(record), flush=True)
        with arguments.output.open("a") as results:
            results.write(json.dumps(record) + "\n")


def make_record(shape: str, tokens: int, found: dict[str, dict[str, Any]]) -> dict[str, Any]:
    """A line of results.jsonl: each side with its own loader, ours aside and speculators' in the stream."""
    ours, peer = found["ours"], found.get("speculators")
    losses = zip(ours["losses"], peer["losses"] if peer else [], strict=False)
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": {n: version(n) for n in ("torch", "transformers", "speculators")},
        "command": "python tests/benchmarks/bench_train_gpu.py",
        "benchmark": f"train step, {shape} draft, {tokens} packed tokens, TTT {TTT_STEPS}, 70 % supervised",
        "ours": ours["tokens_per_second"]["aside"],
        "peer": peer and peer["tokens_per_second"]["in stream"],
        "ratio": peer
        and round(peer["milliseconds"]["in stream"] / ours["milliseconds"]["aside"], 2),
        "unit": "tokens/s",
        "ceiling": f"{matmul_ceiling():.0f} TFLOP/s",
        "peer_name": "speculators, compiled, flex attention",
        "ratio_same_loader": peer
        and {
            name: round(peer["milliseconds"][name] / ours["milliseconds"][name], 2)
            for name in ours["milliseconds"]
        },
        "first_step_seconds": {name: side["first_step_seconds"] for name, side in found.items()},
        "peak_gb": {name: side["peak_gb"] for name, side in found.items()},
        "waiting_for_data": ours["waited"],
        "largest_loss_difference": max((abs(a / b - 1) for a, b in losses), default=None),
    }


if __name__ == "__main__":
    main()
