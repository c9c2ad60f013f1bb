"""verify beside a live run: what that lets go of meanwhile is not wrong."""

import threading
from pathlib import Path

import torch

from storage.artifacts import Identity
from storage.checkpoints import Checkpoint, Checkpoints
from storage.store import Store
from tasks.verify import verify_store

LOOKS = 150


def test_a_checkpoint_that_a_live_training_prunes_meanwhile_is_no_problem(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    checkpoints = Checkpoints(store, Identity("checkpoints", 1, {}, {}))
    ended = threading.Event()

    def train() -> None:
        step = 0
        while not ended.is_set():
            step += 1
            checkpoints.save(Checkpoint(step, {"w": torch.ones(8)}, {}))
            checkpoints.prune(keep=2)

    training = threading.Thread(target=train)
    training.start()
    try:
        while not checkpoints.steps():
            pass
        problems = [verify_store(store.url, deep=True)[1] for _ in range(LOOKS)]
    finally:
        ended.set()
        training.join()
    assert problems == [[]] * LOOKS
