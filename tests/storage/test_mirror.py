import logging
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path

import pytest

from storage.mirror import Mirror
from storage.remote_files import RemoteFiles
from storage.retries import StoreError
from storage.store import Store

ROOT = Path(__file__).parents[2]
SMALL, LARGE = b"a small file", os.urandom(1 << 20)
CHUNK_BYTES = 1 << 16


def fill(store: Store) -> str:
    """Put two files and others that are not wanted into the store; returns the URL of their directory."""
    for name, content in {"a.json": SMALL, "b.bin": LARGE, "c.txt": b"no", "sub/d": b"no"}.items():
        store.write_bytes(f"model/{name}", content)
    return f"{store.url}/model"


def mirror(url: str, root: Path) -> Mirror:
    return Mirror(RemoteFiles(url), ["a.json", "b.bin"], root=root)


def fetch(url: str, root: Path, progress: Callable[[int], None] = lambda _: None) -> Path:
    return mirror(url, root).fetch(progress, chunk_bytes=CHUNK_BYTES)


def contents(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.iterdir()}


def test_the_files_asked_for_are_copied_once(store: Store, tmp_path: Path) -> None:
    url = fill(store)
    arrived: list[int] = []

    assert mirror(url, tmp_path).missing_bytes == len(SMALL) + len(LARGE)
    first = fetch(url, tmp_path, arrived.append)

    assert contents(first) == {"a.json": SMALL, "b.bin": LARGE}
    assert sum(arrived) == len(SMALL) + len(LARGE)
    assert len(arrived) == 1 + len(LARGE) // CHUNK_BYTES
    assert mirror(url, tmp_path).missing_bytes == 0
    assert fetch(f"{url}/", tmp_path, arrived.append) == first
    assert sum(arrived) == len(SMALL) + len(LARGE)


def test_a_changed_file_is_fetched_again_and_that_one_only(store: Store, tmp_path: Path) -> None:
    url = fill(store)
    before = fetch(url, tmp_path)
    arrived: list[int] = []
    time.sleep(0.01)  # a file of this machine is told apart by its time of change

    store.write_bytes("model/a.json", SMALL.upper())
    after = fetch(url, tmp_path, arrived.append)

    assert arrived == [len(SMALL)]
    assert contents(after) == {"a.json": SMALL.upper(), "b.bin": LARGE}
    # whoever uses the version before is not disturbed
    assert contents(before) == {"a.json": SMALL, "b.bin": LARGE}


def test_a_file_that_changes_while_it_is_copied_is_refused_and_then_fetched_as_it_is(
    store: Store, tmp_path: Path
) -> None:
    url = fill(store)
    changed, pieces = LARGE[::-1], []

    def change_after_the_first_piece(count: int) -> None:
        if count == CHUNK_BYTES:  # of b.bin, whose pieces come one after another
            pieces.append(count)
            if len(pieces) == 1:
                time.sleep(0.01)
                store.write_bytes("model/b.bin", changed)

    with pytest.raises(StoreError, match=r"b\.bin changed while it was copied; run again"):
        fetch(url, tmp_path, change_after_the_first_piece)
    assert contents(fetch(url, tmp_path)) == {"a.json": SMALL, "b.bin": changed}


KILLED = """
import os, signal, sys
from pathlib import Path
from storage.mirror import Mirror
from storage.remote_files import RemoteFiles

arrived = []

def progress(count):
    arrived.append(count)
    if len(arrived) == 6:
        os.kill(os.getpid(), signal.SIGKILL)

url, root, chunk_bytes = sys.argv[1:]
Mirror(RemoteFiles(url), ["b.bin"], root=Path(root)).fetch(progress, chunk_bytes=int(chunk_bytes))
"""


def test_a_killed_copy_goes_on_where_it_was(s3_store: Store, tmp_path: Path) -> None:
    url = fill(s3_store)
    killed = subprocess.run(
        [sys.executable, "-c", KILLED, url, str(tmp_path), str(CHUNK_BYTES)],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        check=False,
    )
    assert killed.returncode == -signal.SIGKILL
    assert not list(tmp_path.glob("*/snapshots/*"))
    arrived: list[int] = []

    found = fetch(url, tmp_path, arrived.append)

    assert sum(arrived) == len(SMALL) + len(LARGE) - 6 * CHUNK_BYTES
    assert contents(found) == {"a.json": SMALL, "b.bin": LARGE}


def test_what_arrived_of_an_older_version_is_not_gone_on_with(
    s3_store: Store, tmp_path: Path
) -> None:
    url = fill(s3_store)

    def stop(_: int) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        fetch(url, tmp_path, stop)
    s3_store.write_bytes("model/b.bin", LARGE[::-1])

    assert contents(fetch(url, tmp_path))["b.bin"] == LARGE[::-1]


def test_a_copy_that_lost_bytes_is_fetched_again(s3_store: Store, tmp_path: Path) -> None:
    url = fill(s3_store)
    found = fetch(url, tmp_path)
    (found / "b.bin").resolve().write_bytes(LARGE[:100])

    assert contents(fetch(url, tmp_path)) == {"a.json": SMALL, "b.bin": LARGE}


def test_two_that_copy_the_same_at_once_share_one_copy(
    s3_store: Store, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = fill(s3_store)
    arrived: list[int] = []
    found: list[Path] = []

    def slowly(count: int) -> None:
        arrived.append(count)
        time.sleep(0.01)

    with caplog.at_level(logging.INFO):
        both = [
            threading.Thread(target=lambda: found.append(fetch(url, tmp_path, slowly)))
            for _ in range(2)
        ]
        for one in both:
            one.start()
        for one in both:
            one.join()

    assert found[0] == found[1]
    assert sum(arrived) == len(SMALL) + len(LARGE)
    assert "waiting for another process" in caplog.text


def test_a_disk_without_room_is_refused_before_anything_is_copied(
    s3_store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = fill(s3_store)
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage(1 << 20, 1 << 20, 1000))

    with pytest.raises(StoreError, match=r"needs 1,048,588 bytes more .* 1,000 are free.*OUTRIDER"):
        fetch(url, tmp_path)
    assert not list(tmp_path.rglob("*.part"))


def test_a_directory_without_files_is_not_there(store: Store) -> None:
    with pytest.raises((FileNotFoundError, StoreError), match="model"):
        RemoteFiles(f"{store.url}/model")


def test_any_range_of_a_remote_file_is_read(store: Store) -> None:
    files = RemoteFiles(fill(store))

    assert files.sizes == {"a.json": len(SMALL), "b.bin": len(LARGE), "c.txt": 2}
    assert files.read("b.bin") == LARGE
    assert files.read("b.bin", 7, 1000) == LARGE[7:1000]
    assert files.read("a.json", 8) == b"file"
    assert files.read("a.json", 8, 1000) == b"file"
    assert files.read("a.json", 12, 20) == b""


def test_a_snapshot_that_lost_a_link_is_mended(store: Store, tmp_path: Path) -> None:
    url = fill(store)
    directory = fetch(url, tmp_path)
    (directory / "a.json").unlink()

    assert fetch(url, tmp_path) == directory
    assert contents(directory) == {"a.json": SMALL, "b.bin": LARGE}
