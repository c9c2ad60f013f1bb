import logging

import pytest
import torch

from storage.artifacts import verify
from storage.checkpoints import (
    CheckpointError,
    latest_checkpoint,
    list_checkpoints,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from storage.layout import checkpoint_directory
from storage.manifest import Manifest
from storage.store import Store

KEY = "0123456789abcdef01234567"
WEIGHT = torch.tensor([[1.0, 1e-30], [0.1, -3.0]])
TENSORS = {
    "weight": WEIGHT,
    "tied": WEIGHT,
    "transposed": WEIGHT.T,
    "adam.step": torch.tensor(12345.0),
    "rng": torch.arange(256, dtype=torch.int64).to(torch.uint8),
    "empty": torch.empty(0, 3),
    "half": torch.tensor([1.5], dtype=torch.bfloat16),
}


def save(store: Store, step: int) -> Manifest:
    return save_checkpoint(
        store, KEY, step=step, tensors={"w": torch.full((64,), float(step))}, state={"epoch": step}
    )


def test_tensors_and_state_come_back_bit_for_bit_in_their_dtypes(store: Store) -> None:
    save_checkpoint(
        store,
        KEY,
        step=12345,
        tensors=TENSORS,
        state={"lr": 3.0000000000000004e-05, "order": [2, 0]},
    )
    found = latest_checkpoint(store, KEY)
    assert found is not None
    step, manifest = found
    tensors, state = load_checkpoint(store, manifest)
    assert step == 12345
    assert state == {"lr": 3.0000000000000004e-05, "order": [2, 0]}
    assert set(tensors) == set(TENSORS)
    for name, tensor in TENSORS.items():
        assert tensors[name].dtype == tensor.dtype
        assert torch.equal(tensors[name], tensor)


def test_a_loaded_checkpoint_may_be_trained_on_without_changing_the_stored_one(
    store: Store,
) -> None:
    manifest = save(store, 1)
    tensors, _ = load_checkpoint(store, manifest)
    tensors["w"].mul_(2)
    assert load_checkpoint(store, manifest)[0]["w"].tolist() == [1.0] * 64
    assert verify(store, manifest, deep=True) == []


def test_the_latest_is_the_highest_complete_step(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    assert latest_checkpoint(store, KEY) is None
    for step in (9, 10, 100):
        save(store, step)
    store.write_bytes(f"{checkpoint_directory(KEY, 1000)}/attempt-x/tensors.safetensors", b"half")
    found = latest_checkpoint(store, KEY)
    assert found is not None
    assert found[0] == 100
    store.write_bytes(f"{found[1].path}/{found[1].files['tensors.safetensors'].path}", b"short")
    with caplog.at_level(logging.WARNING):
        found = latest_checkpoint(store, KEY)
    assert found is not None
    assert found[0] == 10
    assert "step-000000100 is set aside: tensors.safetensors has 5 bytes" in caplog.text
    assert list_checkpoints(store, KEY) == [9, 10]


def test_a_corrupt_checkpoint_is_an_error_that_names_it_and_the_older_one(store: Store) -> None:
    older, newer = save(store, 10), save(store, 20)
    path = f"{newer.path}/{newer.files['tensors.safetensors'].path}"
    content = bytearray(store.read_bytes(path))
    content[-1] ^= 1
    store.write_bytes(path, bytes(content))
    with pytest.raises(
        CheckpointError, match=r"step-000000020 .*digest.*go on from .*step-000000010$"
    ):
        load_checkpoint(store, newer)
    store.write_bytes(f"{older.path}/{older.files['tensors.safetensors'].path}", b"truncated")
    with pytest.raises(CheckpointError, match=r"step-000000010 .*9 bytes.*no older one"):
        load_checkpoint(store, older)


def test_pruning_keeps_the_newest_and_the_protected(store: Store) -> None:
    for step in (10, 20, 30, 40, 50):
        save(store, step)
    assert prune_checkpoints(store, KEY, keep=2, protect=[20]) == [10, 30]
    assert list_checkpoints(store, KEY) == [20, 40, 50]
    assert store.directories(f"checkpoints/{KEY}/steps") == [
        "step-000000020",
        "step-000000040",
        "step-000000050",
    ]
    assert prune_checkpoints(store, KEY, keep=9) == []
    with pytest.raises(ValueError, match="keep must be 1 or more, not 0"):
        prune_checkpoints(store, KEY, keep=0)


def test_pruning_removes_what_a_killed_save_left_behind_long_ago(store: Store) -> None:
    save(store, 10)
    directory = checkpoint_directory(KEY, 5)
    store.write_bytes(f"{directory}/attempt-20200101T000000000000-0123abcd/x", b"half")
    prune_checkpoints(store, KEY)
    assert store.sizes(directory) == {}


def test_saving_a_step_again_replaces_it_and_equal_tensors_have_equal_content(
    store: Store,
) -> None:
    assert save(store, 10).content == save(store, 10).content
    assert list_checkpoints(store, KEY) == [10]


def test_a_state_that_is_no_json_is_refused_before_anything_is_written(store: Store) -> None:
    with pytest.raises(ValueError, match=r"state\.loss is nan"):
        save_checkpoint(store, KEY, step=1, tensors={}, state={"loss": float("nan")})
    assert store.sizes("") == {}
