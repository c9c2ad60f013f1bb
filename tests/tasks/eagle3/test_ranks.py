"""Processes that train together: a step of all of them is the step of one process on all their batches."""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.eagle3.ranks import Ranks
from tests.tasks.eagle3.test_training import make_samples, make_training, run

LENGTHS = (20,) * 8
ROOT = Path(__file__).parents[3]


def train_one_of(rank: int, count: int, directory: str, changes: dict[str, Any]) -> None:
    """What each process of the test does."""
    torch.set_num_threads(1)
    ranks = Ranks.join(rank, count, f"{directory}/meeting")
    training = make_training(train=make_samples(seed=1, lengths=LENGTHS), ranks=ranks, **changes)
    best = run(training)
    save_file(best, Path(directory, f"best-{rank}.safetensors"))
    Path(directory, f"history-{rank}.json").write_text(json.dumps(training.position.history))
    ranks.leave()


def train_together(directory: Path, count: int, **changes: Any) -> None:
    code = "import json, sys; from tests.tasks.eagle3.test_ranks import train_one_of as t; "
    code += "t(int(sys.argv[1]), int(sys.argv[2]), sys.argv[3], json.loads(sys.argv[4]))"
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    processes = [
        subprocess.Popen(
            [
                sys.executable,
                "-c",
                code,
                str(rank),
                str(count),
                str(directory),
                json.dumps(changes),
            ],
            cwd=ROOT,
            env=environment,
        )
        for rank in range(count)
    ]
    assert [process.wait(timeout=120) for process in processes] == [0] * count


@pytest.mark.parametrize(
    "changes",
    [{}, {"optimizer": "muon"}, {"noise": 0.3, "loss": "ce"}],
    ids=["adamw", "muon", "noise"],
)
def test_two_processes_train_what_one_does_with_twice_the_batch(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    # One step an epoch over all samples: the two have the same samples in each of their steps. Noise is drawn by
    # batch, so that with it only the two processes are alike.
    changes = {"epochs": 4, "ttt_steps": 3, **changes}
    alone = make_training(
        train=make_samples(seed=1, lengths=LENGTHS), tokens_per_batch=160, **changes
    )
    best = run(alone)
    train_together(tmp_path, 2, tokens_per_batch=80, **changes)

    weights = [load_file(tmp_path / f"best-{rank}.safetensors") for rank in range(2)]
    histories = [json.loads((tmp_path / f"history-{rank}.json").read_text()) for rank in range(2)]
    assert histories[0] == histories[1]
    for name, value in weights[0].items():
        assert torch.equal(value, weights[1][name]), name
    if changes.get("noise"):
        return
    assert len(histories[0]) == len(alone.position.history) == 8
    for ours, theirs in zip(histories[0], alone.position.history, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)
    for name, value in best.items():
        # fp32 sums in another order, through four steps; Muon rounds to bf16 on its way
        atol = 2e-3 if changes.get("optimizer") == "muon" else 1e-4
        assert torch.allclose(weights[0][name], value, atol=atol, rtol=1e-3), name


def test_a_process_without_a_batch_of_its_own_changes_nothing(tmp_path: Path) -> None:
    # One batch an epoch: the second process repeats it.
    changes = {"epochs": 3, "tokens_per_batch": 160}
    alone = make_training(train=make_samples(seed=1, lengths=LENGTHS), **changes)
    best = run(alone)
    train_together(tmp_path, 2, **changes)
    history = json.loads((tmp_path / "history-1.json").read_text())
    for ours, theirs in zip(history, alone.position.history, strict=True):
        assert ours == pytest.approx(theirs, rel=2e-4)
    weights = load_file(tmp_path / "best-1.safetensors")
    for name, value in best.items():
        assert torch.allclose(weights[name], value, atol=1e-4, rtol=1e-3), name


def test_each_batch_counts_once() -> None:
    for count in (1, 2, 3, 4, 9):
        for batches in ([[0], [1, 2], [3]], [[0], [1], [2], [3]], [[5]]):
            shares = [Ranks(rank, count).mine(batches) for rank in range(count)]
            assert len({len(share) for share in shares}) == 1
            counted = [
                batch
                for rank, share in enumerate(shares)
                for step, batch in enumerate(share)
                if not Ranks(rank, count).repeats(step, len(batches))
            ]
            assert sorted(counted) == sorted(batches)
