"""A store on a disk of a few MB, filled up before a run or on its way."""

import re
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from flows.cli import main
from storage.store import Store
from tasks.disk_space import DiskSpaceError, check_training_space
from tasks.verify import verify_store
from tests.tiny_runs import TinyRun, computed, manifests, run_flow, wait_for, write_settings

AFTER_SPLIT = ("capture", "train", "evaluate", "export")
DISK_BYTES = 48_000_000


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    """An empty disk that is full after DISK_BYTES."""
    directory = tmp_path / "disk"
    directory.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={DISK_BYTES}", "tmpfs", str(directory)]
    try:
        subprocess.run(mount, check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a small disk cannot be mounted here: {error}")
    yield directory
    subprocess.run(["umount", "--lazy", str(directory)], check=True)


def leave(disk: Path, free_bytes: int) -> Path:
    """Fill the disk up, but for some bytes; returns the file that does."""
    ballast = disk / "ballast"
    store = Store(str(disk))
    ballast.write_bytes(b"")
    taken = (store.free_bytes() or 0) - free_bytes
    with ballast.open("wb") as file:
        file.write(bytes(taken))
    assert (store.free_bytes() or 0) <= free_bytes
    return ballast


@pytest.fixture
def command(prefect_api, capsys, own_loggers) -> Callable[..., tuple[int, str, list[str]]]:
    """Run the command line here; returns its status, its output and the lines of its errors."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    def run(*arguments: str) -> tuple[int, str, list[str]]:
        with temporary_settings(updates={PREFECT_API_URL: prefect_api}):
            status = main(arguments)
        said = capsys.readouterr()
        assert "Traceback" not in said.err
        return status, said.out, [x for x in said.err.splitlines() if x.startswith("outrider: ")]

    return run


def test_states_that_do_not_fit_are_refused_before_the_capture_and_shown_by_the_estimate(
    tiny: TinyRun, disk, tmp_path, command, prefect_api
):
    run = tiny.copy(disk, without=AFTER_SPLIT)
    file = str(write_settings(run.values, tmp_path / "settings.yaml"))
    _, out, _ = command("estimate", file)
    assert "TOO LITTLE" not in out
    ballast = leave(disk, 300_000)

    status, _, errors = command("run", file)

    assert status == 1
    (error,) = errors
    assert error.startswith("outrider: capture: the states of 24 samples take ")
    assert "tokens x 512 bytes), but" in error
    assert f"{run.store} has " in error
    assert "set capture.codec to fp8" in error
    assert not (run.store / "states").exists()
    status, out, _ = command("estimate", file)
    assert status == 0
    free = re.compile(r"has [^ ]+ [KM]B free")  # which changes a little with every manifest
    said, refused = (free.sub("", text) for text in (out.splitlines()[-1], error))
    assert said == refused.replace("outrider: ", "TOO LITTLE ")

    ballast.unlink()
    assert computed(run_flow(run.values, prefect_api)) == list(AFTER_SPLIT)


def test_a_disk_that_gets_full_in_capture_ends_in_one_line_and_the_next_run_goes_on(
    tiny: TinyRun, disk, tmp_path, command, prefect_api
):
    copy = tiny.copy(disk, without=AFTER_SPLIT)
    run = replace(copy, values=copy.changed(capture={"rows_per_shard": 1}))
    file = str(write_settings(run.values, tmp_path / "settings.yaml"))
    stopped = threading.Event()

    def fill_up() -> None:
        wait_for(lambda: len(manifests(run.store, "capture")) >= 2 or stopped.is_set(), every=0.002)
        with suppress(OSError):  # the capture takes some of it meanwhile
            leave(disk, 0)

    filler = threading.Thread(target=fill_up)
    filler.start()
    status, _, errors = command("run", file)
    stopped.set()
    filler.join()

    assert status == 1
    (error,) = errors
    assert "No space left on device" in error
    assert error.endswith("or choose another store, then run again to go on")
    before = manifests(run.store, "capture")
    assert 2 <= len(before) < 24
    attempts = {path.parent for path in run.store.glob("states/*/*/attempt-*")}
    assert attempts == {(run.store / path).parent for path in before}  # nothing half-written

    (disk / "ballast").unlink()
    assert computed(run_flow(run.values, prefect_api)) == list(AFTER_SPLIT)
    after = manifests(run.store, "capture")
    assert len(after) == 24
    assert {path: after[path] for path in before} == before
    assert verify_store(str(run.store), deep=True)[1] == []


def test_a_training_without_room_for_its_checkpoints_is_refused_before_its_first_step(
    tiny: TinyRun, disk, tmp_path, command, prefect_api
):
    run = tiny.copy(disk, without=("train", "evaluate", "export"))
    file = str(write_settings(run.values, tmp_path / "settings.yaml"))
    ballast = leave(disk, 1_000_000)

    status, _, errors = command("run", file)

    assert status == 1
    (error,) = errors
    assert error.startswith("outrider: train: the checkpoints take ")
    assert "trainable parameters x (3 checkpoints x 12 bytes + 2 best weights x 4)" in error
    assert "lower train.keep_checkpoints" in error
    assert not (run.store / "tensorboard").exists() or not manifests(run.store, "train")

    ballast.unlink()
    assert computed(run_flow(run.values, prefect_api)) == ["train", "evaluate", "export"]


def test_what_a_training_has_stored_already_is_no_more_room_to_find(disk):
    store = Store(str(disk / "store"))
    needed = 100_000 * (12 * 3 + 4 * 2)
    store.write_bytes("checkpoints/key/steps/x", bytes(needed - 1_500_000))
    leave(disk, 1_600_000)  # whole pages are taken
    room = {"trainable": 100_000, "kept_checkpoints": 2}
    check_training_space(store, "checkpoints/key", **room)
    with pytest.raises(DiskSpaceError, match=r"take 4\.4 MB .*free some space \(outrider prune\)"):
        check_training_space(store, "checkpoints/other", **room)
    check_training_space(Store("memory://endless"), "checkpoints/other", **room)
