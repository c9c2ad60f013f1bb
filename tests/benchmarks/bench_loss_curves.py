"""Loss curves of 200 steps on a GPU: this project's step and speculators' on the same weights and batches.

`python tests/benchmarks/bench_loss_curves.py [--shape qwen3-8b] [--output FILE]`

The measure of what is equal is a second seed of this project: weights drawn anew, the same batches.
"""

import argparse
import datetime as dt
import gc
import json
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

REPOSITORY = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(REPOSITORY))

from tasks.eagle3.batches import PackedBatch, pack  # noqa: E402
from tasks.eagle3.draft import Eagle3DraftModel, trainable_parameters  # noqa: E402
from tests.benchmarks.gpu_sides import (  # noqa: E402
    DOCUMENT,
    SHAPES,
    Forward,
    make_draft,
    make_peer_draft,
    make_samples,
    our_forward,
    peer_forward,
)

STEPS, BATCHES = 200, 16


def losses(draft: Eagle3DraftModel, forward: Forward, batches: list[PackedBatch]) -> torch.Tensor:
    """Of STEPS steps, [STEPS] on the CPU; with a warm-up as trainings have."""
    parameters = list(trainable_parameters(draft).values())
    optimizer = torch.optim.AdamW(parameters, lr=1e-4, fused=True)
    warm_up = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=10)
    found = []
    for number in range(STEPS):
        loss = forward(batches[number % len(batches)], None)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        warm_up.step()
        optimizer.zero_grad(set_to_none=True)
        found.append(loss.detach())
    return torch.stack(found).float().cpu()


def main() -> None:
    """Parse, train thrice, compare."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=SHAPES, action="append")
    parser.add_argument(
        "--output", type=Path, default=REPOSITORY / "tests/benchmarks/results.jsonl"
    )
    arguments = parser.parse_args()
    for shape in arguments.shape or SHAPES:
        record = compare(shape)
        print(json.dumps(record), flush=True)
        with arguments.output.open("a") as results:
            results.write(json.dumps(record) + "\n")


def compare(shape: str) -> dict[str, Any]:
    """A line of results.jsonl."""
    sizes, tokens = SHAPES[shape]
    each = tokens // DOCUMENT
    samples = make_samples(sizes, BATCHES * each)
    batches = [pack(samples[n * each : (n + 1) * each], pinned=True) for n in range(BATCHES)]
    sides = {
        "ours": lambda: make_draft(sizes),
        "another seed": lambda: make_draft(sizes, seed=1),
        "speculators": lambda: make_peer_draft(sizes),
    }
    curves = {}
    for name, make in sides.items():
        draft = make()
        forward = peer_forward(draft) if name == "speculators" else our_forward(draft)
        curves[name] = losses(draft, forward, batches)
        print(shape, name, [round(float(x), 4) for x in curves[name][::20]], flush=True)
        del draft, forward
        gc.collect()
        torch.cuda.empty_cache()
    to_peer, to_seed = (
        (curves["ours"] - curves[name]).abs() for name in ("speculators", "another seed")
    )
    return {
        "date": dt.datetime.now(dt.UTC).isoformat(timespec="seconds"),
        "device": torch.cuda.get_device_name(),
        "versions": {n: version(n) for n in ("torch", "transformers", "speculators")},
        "command": "python tests/benchmarks/bench_loss_curves.py",
        "benchmark": f"loss curve, {shape} draft, {STEPS} steps of {tokens} tokens: mean distance to speculators'",
        "unit": "nats",
        "ours": float(f"{float(to_peer.mean()):.3g}"),
        "peer": float(f"{float(to_seed.mean()):.3g}"),
        "peer_name": "this project with another seed",
        "ratio": round(float(to_seed.mean() / to_peer.mean()), 2),
        "ceiling": None,
        "largest": {
            "to speculators": float(f"{float(to_peer.max()):.3g}"),
            "to another seed": float(f"{float(to_seed.max()):.3g}"),
        },
        "first_and_last": {
            n: [round(float(c[0]), 4), round(float(c[-1]), 4)] for n, c in curves.items()
        },
    }


if __name__ == "__main__":
    main()
