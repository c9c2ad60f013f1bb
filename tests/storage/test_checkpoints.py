import logging
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from storage.artifacts import Identity, find, peek, remove_all, verify, write
from storage.checkpoints import SEGMENT_ENTRIES, Checkpoint, CheckpointError, Checkpoints
from storage.layout import best_directory, checkpoint_directory
from storage.store import Store, StoreError

TRAINING = Identity(
    stage="checkpoints", version=1, settings={"train": {"lr": 0.1}}, inputs={"states": "ab"}
)
KEY = TRAINING.key
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


def make(step: int, **changes: Any) -> Checkpoint:
    return Checkpoint(
        step,
        **{"tensors": {"w": torch.full((64,), float(step))}, "state": {"epoch": step}} | changes,
    )


def best(step: int) -> dict[str, torch.Tensor]:
    return {"w": torch.full((8,), -float(step))}


def opened(store: Store) -> Checkpoints:
    """As another process would open them."""
    return Checkpoints(store, TRAINING)


def latest(store: Store, **options: Any) -> Checkpoint:
    found = opened(store).load_latest(**options)
    assert found is not None
    return found


def tensors_file(store: Store, directory: str) -> str:
    entry = peek(store, directory).files["tensors.safetensors"]
    return f"{directory}/{entry.path}"


def flip_bit(store: Store, path: str) -> None:
    content = bytearray(store.read_bytes(path))
    content[-1] ^= 1
    store.write_bytes(path, bytes(content))


def bests(store: Store) -> list[str]:
    return store.directories(f"checkpoints/{KEY}/best")


def test_a_checkpoint_comes_back_bit_for_bit_in_its_dtypes(store: Store) -> None:
    history = [{"step": 1, "loss": 0.1 + 0.2}, {"step": 2, "loss": None}]
    saved = Checkpoint(
        step=12345,
        tensors=TENSORS,
        state={"lr": 3.0000000000000004e-05, "order": [2, 0]},
        history=history,
        best_step=12000,
        best=best(12000),
    )
    opened(store).save(saved)
    found = latest(store)
    assert (found.step, found.best_step) == (12345, 12000)
    assert found.state == {"lr": 3.0000000000000004e-05, "order": [2, 0]}
    assert list(found.history) == history
    for mine, theirs in ((found.tensors, TENSORS), (found.best, best(12000))):
        assert set(mine) == set(theirs)
        for name, tensor in theirs.items():
            assert mine[name].dtype == tensor.dtype
            assert torch.equal(mine[name], tensor)


def test_without_checkpoints_there_is_none_to_load(store: Store) -> None:
    assert opened(store).load_latest() is None
    assert opened(store).load_latest(on_bad="older") is None


def test_a_loaded_checkpoint_may_be_trained_on_without_changing_the_stored_one(
    store: Store,
) -> None:
    manifest = opened(store).save(make(1))
    latest(store).tensors["w"].mul_(2)
    assert latest(store).tensors["w"].tolist() == [1.0] * 64
    assert verify(store, manifest, deep=True) == []


def test_the_latest_is_the_highest_complete_step(store: Store) -> None:
    for step in (9, 10, 100):
        opened(store).save(make(step))
    store.write_bytes(f"{checkpoint_directory(KEY, 1000)}/attempt-x/tensors.safetensors", b"half")
    assert latest(store).step == 100
    assert opened(store).steps() == [9, 10, 100]


def test_the_best_weights_are_written_once_for_all_checkpoints_that_share_them(
    store: Store,
) -> None:
    checkpoints = opened(store)
    checkpoints.save(make(10, best_step=8, best=best(8)))
    written = store.sizes(f"checkpoints/{KEY}/best")
    checkpoints.save(make(20, best_step=8))
    resumed = opened(store)
    assert resumed.load_latest() is not None
    resumed.save(make(30, best_step=8))
    assert store.sizes(f"checkpoints/{KEY}/best") == written
    assert latest(store).best["w"].tolist() == [-8.0] * 8
    with pytest.raises(ValueError, match="the best weights, of step 40, were neither stored"):
        resumed.save(make(50, best_step=40))
    assert resumed.steps() == [10, 20, 30]


def test_best_weights_that_were_replaced_are_not_taken_for_those_of_the_checkpoint(
    store: Store,
) -> None:
    opened(store).save(make(10, best_step=8, best=best(8)))
    content = latest(store)
    opened(store).save(make(5, best_step=8, best=best(7)))  # another history of the same training
    assert torch.equal(content.best["w"], best(8)["w"])
    with pytest.raises(CheckpointError, match="does not hold the best weights that it was saved"):
        opened(store).load_latest()


def test_the_past_of_the_metrics_is_written_once_and_read_back_in_order(store: Store) -> None:
    history = [{"step": n, "loss": n / 7} for n in range(2 * SEGMENT_ENTRIES + 5)]
    checkpoints = opened(store)
    sizes = []
    for count in (SEGMENT_ENTRIES - 1, SEGMENT_ENTRIES + 3, len(history)):
        checkpoints.save(make(count, history=history[:count]))
        assert list(latest(store).history) == history[:count]
        manifest = peek(store, checkpoint_directory(KEY, count))
        sizes.append(manifest.files["state.json"].bytes)
    assert max(sizes[1:]) < sizes[0] / 50  # a few entries, not a thousand
    assert store.directories(f"checkpoints/{KEY}/metrics") == [
        "entries-000000000-000001000",
        "entries-000001000-000002000",
    ]


def test_a_training_that_went_back_writes_its_own_metrics_again(store: Store) -> None:
    first, second = (
        [{"step": n, "loss": loss} for n in range(SEGMENT_ENTRIES)] for loss in (1.0, 2.0)
    )
    opened(store).save(make(10, history=first[:10]))
    opened(store).save(make(1000, history=first))
    flip_bit(store, tensors_file(store, checkpoint_directory(KEY, 1000)))
    again = opened(store)
    found = again.load_latest(on_bad="older")
    assert found is not None
    assert list(found.history) == first[:10]
    again.save(make(1000, history=second))
    assert list(latest(store).history) == second


HARMS = {
    "a flipped bit": (flip_bit, "digest"),
    "cut off": (lambda store, path: store.write_bytes(path, b"short"), "5 bytes"),
    "missing": (lambda store, path: store.delete(path), "is missing"),
}


@pytest.mark.parametrize("shared", [False, True], ids=["its own tensors", "the best weights"])
@pytest.mark.parametrize("harm", HARMS)
def test_a_checkpoint_that_cannot_be_read_stops_with_its_name_and_the_way_out(
    store: Store, harm: str, shared: bool
) -> None:
    checkpoints = opened(store)
    checkpoints.save(make(10))
    checkpoints.save(make(20, best_step=15, best=best(15)))
    harmed = best_directory(KEY, 15) if shared else checkpoint_directory(KEY, 20)
    change, reason = HARMS[harm]
    change(store, tensors_file(store, harmed))
    for _ in range(2):  # the next try does not go on in silence either
        with pytest.raises(
            CheckpointError,
            match=rf"step-000000020 cannot be read \(.*({reason}).*on_bad_checkpoint .*step 10$",
        ):
            opened(store).load_latest()


def test_an_unreadable_manifest_is_an_unreadable_checkpoint(store: Store) -> None:
    opened(store).save(make(10))
    store.write_bytes(f"{checkpoint_directory(KEY, 10)}/manifest.json", b'{"key": ')
    with pytest.raises(
        CheckpointError, match=r"step-000000010 .*no readable manifest.*no older one: delete it"
    ):
        opened(store).load_latest()


def test_an_older_checkpoint_is_taken_when_that_is_allowed_and_the_bad_ones_are_set_aside(
    store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    for step in (10, 20, 30):
        opened(store).save(make(step))
    for step in (20, 30):
        flip_bit(store, tensors_file(store, checkpoint_directory(KEY, step)))
    with caplog.at_level(logging.WARNING):
        assert latest(store, on_bad="older").step == 10
    assert "step-000000030 is set aside: " in caplog.text
    assert "step-000000020 is set aside: " in caplog.text
    assert opened(store).steps() == [10]


def test_when_no_checkpoint_can_be_read_training_does_not_start_anew_in_silence(
    store: Store,
) -> None:
    for step in (10, 20):
        opened(store).save(make(step))
        flip_bit(store, tensors_file(store, checkpoint_directory(KEY, step)))
    for _ in range(2):
        with pytest.raises(
            CheckpointError, match=r"none of .*step 20: .*step 10: .*delete that directory"
        ):
            opened(store).load_latest(on_bad="older")
    assert opened(store).steps() == [10, 20]


def test_pruning_keeps_the_newest_and_the_best_weights_that_they_name(store: Store) -> None:
    checkpoints = opened(store)
    for step, best_step in ((10, 10), (20, 20), (30, 20), (40, 20), (50, 50)):
        checkpoints.save(make(step, best_step=best_step, best=best(best_step)))
    assert checkpoints.prune(keep=2) == [10, 20, 30]
    assert checkpoints.steps() == [40, 50]
    assert store.directories(f"checkpoints/{KEY}/steps") == ["step-000000040", "step-000000050"]
    assert bests(store) == ["step-000000020", "step-000000050"]
    assert checkpoints.prune(keep=9) == []
    assert latest(store).best["w"].tolist() == [-50.0] * 8
    assert checkpoints.prune(keep=1) == [40]
    assert bests(store) == ["step-000000050"]
    with pytest.raises(ValueError, match="keep must be 1 or more, not 0"):
        checkpoints.prune(keep=0)


def test_pruning_removes_what_a_killed_save_left_behind_long_ago(store: Store) -> None:
    checkpoints = opened(store)
    checkpoints.save(make(10))
    directories = [checkpoint_directory(KEY, 5), best_directory(KEY, 5)]
    for directory in directories:
        store.write_bytes(f"{directory}/attempt-20200101T000000000000-0123abcd/x", b"half")
    checkpoints.prune(keep=2)
    assert [store.sizes(directory) for directory in directories] == [{}, {}]


def test_a_save_that_is_abandoned_on_the_way_leaves_nothing(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    checkpoints = opened(store)
    checkpoints.save(make(10))
    large = make(20, tensors={"w": torch.ones(1 << 28)})  # 1 GB
    with ThreadPoolExecutor(1) as thread:
        saving = thread.submit(checkpoints.save, large)
        directory = tmp_path / checkpoint_directory(KEY, 20)
        while not list(directory.glob("attempt-*/*")):
            assert not saving.done()
        checkpoints.abandon()
        assert saving.result() is None
    assert [path for path in directory.rglob("*") if path.is_file()] == []
    assert checkpoints.save(make(30)) is None
    assert latest(store).step == 10


def test_what_another_run_is_writing_is_not_pruned(store: Store) -> None:
    mine = opened(store)
    mine.save(make(10, best_step=10, best=best(10)))
    mine.save(make(20, best_step=20, best=best(20)))
    attempt = f"{checkpoint_directory(KEY, 10)}/attempt-29990101T000000000000-0123abcd/x"
    store.write_bytes(attempt, b"half")  # it is behind, and its best weights are to come
    ahead = Identity("checkpoint.best", 1, {"step": 30}, {}, directory=best_directory(KEY, 30))
    with write(store, ahead) as writer:
        writer.add_tensors("tensors.safetensors", best(30))
        writer.publish(rows=1)
    mine.prune(keep=1)
    assert opened(store).steps() == [20]
    assert store.exists(attempt)
    assert bests(store) == ["step-000000020", "step-000000030"]


def test_a_save_that_fails_because_another_run_has_completed_the_training_is_no_failure(
    tmp_path: Path,
) -> None:
    store = Store(str(tmp_path))
    mine = opened(store)
    mine.save(make(10))
    (tmp_path / checkpoint_directory(KEY, 20)).write_bytes(b"in the way")
    with pytest.raises(StoreError):
        mine.save(make(20))
    with write(store, TRAINING) as writer:
        writer.add_tensors("draft.safetensors", best(10))
        writer.publish(rows=20)
    assert mine.save(make(20)) is None
    assert mine.save(make(30)) is None


def test_where_the_best_weights_are_bad_no_older_checkpoint_with_them_is_named(
    store: Store,
) -> None:
    for step in (5, 10, 20):
        made = 10 if step > 5 else None
        opened(store).save(make(step, best_step=made, best=best(10)))
    flip_bit(store, tensors_file(store, best_directory(KEY, 10)))
    with pytest.raises(CheckpointError, match="older to go on from step 5"):
        opened(store).load_latest()
    store.delete(checkpoint_directory(KEY, 5))
    with pytest.raises(CheckpointError, match="no older one can be read either: delete"):
        opened(store).load_latest()


def test_other_directories_beside_the_checkpoints_are_passed_over(store: Store) -> None:
    opened(store).save(make(10))
    store.write_bytes(f"checkpoints/{KEY}/steps/old copy/manifest.json", b"{}")
    assert latest(store).step == 10


def test_of_a_completed_training_no_checkpoint_is_kept(store: Store) -> None:
    checkpoints = opened(store)
    history = [{"step": n} for n in range(SEGMENT_ENTRIES)]
    checkpoints.save(make(10, best_step=10, best=best(10), history=history))
    with write(store, TRAINING) as writer:
        writer.add_tensors("draft.safetensors", best(10))
        writer.publish(rows=20)
    checkpoints.remove_all()
    names = {name.rsplit("/", 1)[-1] for name in store.sizes(f"checkpoints/{KEY}")}
    assert names == {"manifest.json", "draft.safetensors"}
    assert opened(store).load_latest() is None


def test_saving_a_step_again_replaces_it_and_leaves_nothing_of_the_first(store: Store) -> None:
    first = opened(store).save(make(10))
    second = opened(store).save(make(10))
    assert first is not None
    assert second is not None
    assert first.content == second.content
    assert opened(store).steps() == [10]
    assert len(store.directories(first.path)) == 1
    assert latest(store).step == 10


def test_a_state_that_is_no_json_is_refused_before_anything_is_written(store: Store) -> None:
    for part in ("state", "history"):
        bad: Any = {"loss": float("nan")}
        with pytest.raises(ValueError, match=rf"{part}.*\.loss is nan"):
            opened(store).save(make(1, **{part: bad if part == "state" else [bad]}))
    assert store.sizes("") == {}


def test_a_checkpoint_of_another_format_is_not_read(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as other:
        other.setattr("storage.checkpoints.VERSION", 1)
        opened(store).save(make(10))
    with pytest.raises(CheckpointError, match="of format 1, this version of Outrider reads 2"):
        opened(store).load_latest()


class _Dies(BaseException):
    """Ends a removal as a signal would."""


class _DyingStore(Store):
    """Dies after so many deletions."""

    deletions = 0

    def delete(self, path: str) -> None:
        if self.deletions == 0:
            raise _Dies
        self.deletions -= 1
        super().delete(path)


@pytest.mark.parametrize("deletions", range(7))
def test_a_training_whose_removal_is_killed_at_any_moment_can_be_read_or_is_none(
    tmp_path: Path, deletions: int
) -> None:
    store = Store(str(tmp_path))
    history = [{"step": n} for n in range(SEGMENT_ENTRIES)]
    for step in (10, 20):
        opened(store).save(make(step, best_step=5, best=best(5), history=history))
    with write(store, TRAINING) as writer:
        writer.add_bytes("draft.safetensors", b"weights")
        trained = writer.publish(rows=1)
    dying = _DyingStore(str(tmp_path))
    dying.deletions = deletions

    with pytest.raises(_Dies) if deletions < 6 else nullcontext():
        remove_all(dying, trained.path)

    found = opened(store).load_latest()
    assert (found.step if found else None) == {0: 20, 1: 10}.get(deletions)
    assert (find(store, TRAINING) is not None) == (deletions < 4)
    assert (store.sizes("") == {}) == (deletions == 6)
