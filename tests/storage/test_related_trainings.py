from typing import Any

import torch

from storage.artifacts import Identity, write
from storage.checkpoints import Checkpoint, Checkpoints
from storage.related_trainings import related_trainings
from storage.store import Store


def training(*, draft: int = 1, states: str = "ab", version: int = 1, **train: Any) -> Identity:
    return Identity(
        stage="checkpoints",
        version=version,
        settings={"train": {"lr": 0.1, "epochs": 3, **train}, "draft": draft},
        inputs={"states": states},
    )


def save(store: Store, one: Identity, step: int) -> None:
    Checkpoints(store, one).save(Checkpoint(step, {"w": torch.ones(2)}, {}))


def test_trainings_that_differ_in_their_own_settings_alone_are_found_nearest_first(
    store: Store,
) -> None:
    here = training(lr=0.2)
    save(store, here, 99)
    save(store, training(), 10)
    save(store, training(), 20)
    save(store, training(lr=0.3, epochs=4), 7)
    save(store, training(lr=0.5, loss="ce"), 8)
    save(store, training(draft=2), 5)
    save(store, training(states="cd"), 5)
    save(store, training(version=2), 5)
    found = related_trainings(store, here, group="train")
    assert [(one.step, one.differences) for one in found] == [
        (20, {"lr": (0.1, 0.2)}),
        (8, {"lr": (0.5, 0.2), "loss": ("ce", None)}),
        (7, {"lr": (0.3, 0.2), "epochs": (4, 3)}),
    ]
    assert found[0].directory == f"checkpoints/{training().key}"


def test_a_completed_training_is_found_too(store: Store) -> None:
    done = training()
    with write(store, done) as writer:
        writer.add_bytes("draft", b"weights")
        writer.publish(rows=24)
    (found,) = related_trainings(store, training(epochs=4), group="train")
    assert (found.step, found.differences) == (24, {"epochs": (3, 4)})
    assert related_trainings(store, done, group="train") == []


def test_a_store_without_checkpoints_has_none(store: Store) -> None:
    assert related_trainings(store, training(), group="train") == []
