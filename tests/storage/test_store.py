import errno
import logging
import os
import pickle  # noqa: TID251 - that stores can be pickled is tested
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest

from storage import retries
from storage.store import Store, StoreError
from tests.storage.faulty_s3 import FaultyS3


def test_what_is_written_is_read_back_and_replaced_as_a_whole(store: Store) -> None:
    store.write_bytes("a/b.bin", b"first, and longer")
    store.write_bytes("a/b.bin", b"second")
    store.write_json("a/c.json", {"rows": [1, 2], "name": "ü"})
    assert store.read_bytes("a/b.bin") == b"second"
    assert store.read_json("a/c.json") == {"rows": [1, 2], "name": "ü"}
    assert store.size("a/b.bin") == 6


def test_listings_tell_files_from_directories_and_see_new_ones_at_once(store: Store) -> None:
    assert store.directories("a") == store.files("a") == []
    assert store.sizes("a") == {}
    assert not store.exists("a")
    store.write_bytes("a/x", b"1")
    assert store.files("a") == ["x"]
    other = Store(store.url)
    other.write_bytes("a/sub/y", b"22")
    other.write_bytes("ab", b"not in a")
    assert store.directories("a") == ["sub"]
    assert store.files("a") == ["x"]
    assert store.directories("") == ["a"]
    assert store.files("") == ["ab"]
    assert store.sizes("a") == {"x": 1, "sub/y": 2}
    assert store.exists("a")
    assert store.exists("a/sub/y")
    assert not store.exists("a/su")
    assert store.size("a") is None


def test_what_another_machine_writes_to_a_bucket_is_seen_at_once(s3_store: Store) -> None:
    s3_store.write_bytes("a/x", b"1")
    assert (s3_store.files("a"), s3_store.sizes("a")) == (["x"], {"x": 1})
    bucket, prefix = s3_store.url.removeprefix("s3://").split("/")
    client = boto3.client("s3")
    client.put_object(Bucket=bucket, Key=f"{prefix}/a/y", Body=b"22")
    client.put_object(Bucket=bucket, Key=f"{prefix}/a/x", Body=b"333")
    client.close()
    assert (s3_store.files("a"), s3_store.sizes("a")) == (["x", "y"], {"x": 3, "y": 2})
    assert s3_store.size("a/x") == 3


def test_deleting_removes_a_file_or_a_tree_and_nothing_else(store: Store) -> None:
    for path in ("a/1", "a/b/2", "ab/3"):
        store.write_bytes(path, b"x")
    store.delete("a/1")
    assert store.sizes("") == {"a/b/2": 1, "ab/3": 1}
    store.delete("a")
    store.delete("a")
    assert store.sizes("") == {"ab/3": 1}
    with pytest.raises(ValueError, match="refusing to delete the whole store"):
        store.delete("")


def test_a_file_in_the_making_is_invisible_and_an_exception_removes_it(store: Store) -> None:
    with pytest.raises(KeyError), store.writing("d/file.bin") as path:  # noqa: PT012
        path.write_bytes(b"half")
        assert store.sizes("") == {}
        assert store.files("d") == []
        raise KeyError
    assert not store.exists("d/file.bin")
    assert not path.exists()
    with store.writing("d/file.bin") as path:
        path.write_bytes(b"whole")
    with store.reading("d/file.bin") as path:
        assert path.read_bytes() == b"whole"
    assert store.is_local or not path.exists()


def test_large_files_go_up_and_down_in_parts(s3_store: Store) -> None:
    content = bytes(range(256)) * (110 * 4096)  # 110 MiB: above s3fs' limit for one put
    with s3_store.writing("big.bin") as path:
        path.write_bytes(content)
    with s3_store.reading("big.bin") as path:
        assert path.read_bytes() == content


def test_reading_what_is_missing_is_a_file_not_found_error(store: Store) -> None:
    with pytest.raises(FileNotFoundError):
        store.read_bytes("none")
    with pytest.raises(FileNotFoundError), store.reading("none"):
        pass


def test_readers_at_once_each_get_the_whole_file(store: Store) -> None:
    content = os.urandom(300_000)
    store.write_bytes("x", content)
    wrong = []

    def read() -> None:
        for _ in range(5):
            with store.reading("x") as path:
                if path.read_bytes() != content:
                    wrong.append(path)

    threads = [threading.Thread(target=read) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@pytest.mark.parametrize("path", ["/abs", "a/../b", "..", "a//b", "a/", "./a", "a\\b"])
def test_paths_that_leave_the_store_are_refused(path: str) -> None:
    with pytest.raises(ValueError, match="is not a path in a store"):
        Store("memory://paths").write_bytes(path, b"")


def test_a_store_travels_to_another_process_as_its_url(store: Store) -> None:
    copy = pickle.loads(pickle.dumps(store))
    copy.write_bytes("a", b"1")
    assert store.read_bytes("a") == b"1"


def test_local_urls_become_absolute_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in ("./runs", "runs/", f"file://{tmp_path}/runs"):
        store = Store(url)
        assert store.url == str(tmp_path / "runs")
        assert store.is_local
    assert store.local_path("a/b") == tmp_path / "runs" / "a" / "b"
    assert (store.free_bytes() or 0) > 0  # its directory is not there yet
    assert Store("s3://bucket/x/").url == "s3://bucket/x"
    assert Store("memory://m").local_path("a") is None
    assert Store("memory://m").free_bytes() is None


@pytest.mark.parametrize("url", ["", " ./x", "nosuch://bucket/x"])
def test_a_url_of_no_known_kind_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="URL"):
        Store(url)


def test_a_writable_store_is_left_as_it_was(store: Store) -> None:
    store.check_writable()
    assert store.sizes("") == {}


def test_an_unwritable_directory_is_named_with_its_cause_and_a_way_out(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for url in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StoreError, match="file stands where a directory is needed") as caught:
            Store(str(url)).check_writable()
        assert str(url) in str(caught.value)
    with pytest.raises(StoreError, match="/proc/nothing cannot be written"):
        Store("/proc/nothing").check_writable()


def test_a_missing_bucket_and_an_unreachable_endpoint_are_named(
    s3_environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(StoreError, match=r"s3://no-such-bucket/x .*create the bucket"):
        Store("s3://no-such-bucket/x").check_writable()
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://127.0.0.1:{_free_port()}")
    with pytest.raises(StoreError, match="check that it is reachable"):
        Store("s3://bucket/x").check_writable()


def test_missing_credentials_are_named(
    s3_environment: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.delenv(name)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "none"))
    with pytest.raises(StoreError, match="set the credentials in the environment"):
        Store("s3://outrider-tests/x").check_writable()


def test_transient_errors_of_an_object_store_are_tried_again(
    s3_environment: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.01)
    with FaultyS3(s3_environment) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        store = Store("s3://outrider-tests/flaky")
        for fault in ("503", "drop"):
            proxy.spoil(fault, count=3)
            with caplog.at_level(logging.WARNING):
                store.write_bytes("a", fault.encode())
            proxy.spoil(fault, count=2)
            assert store.read_bytes("a") == fault.encode()
    assert "try 3 of 4" in caplog.text


def test_an_object_store_that_stays_broken_is_given_up_with_its_name(
    s3_environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.01)
    with FaultyS3(s3_environment) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        proxy.spoil("503", count=1000)
        with pytest.raises(StoreError, match=r"s3://outrider-tests/flaky/a in 4 tries: "):
            Store("s3://outrider-tests/flaky").write_bytes("a", b"1")


def test_a_full_disk_is_a_store_error_and_leaves_the_old_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = Store(str(tmp_path))
    store.write_bytes("a", b"old")

    def full(descriptor: int) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StoreError, match=r"No space left.*free some space"):
        store.write_bytes("a", b"new")
    assert store.read_bytes("a") == b"old"
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


def test_a_writer_killed_half_way_leaves_nothing_to_be_seen(tmp_path: Path) -> None:
    code = """
import sys
from storage.store import Store
with Store(sys.argv[1]).writing("a/file.bin") as path:
    with path.open("wb") as file:
        file.write(b"half")
        file.flush()
        print("half-way", flush=True)
        sys.stdin.read()
"""
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(retries.__file__).parents[1],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"half-way\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    store = Store(str(tmp_path))
    assert list(tmp_path.rglob("file.bin"))  # the half file is there, out of sight
    assert store.files("a") == store.directories("a") == []
    assert store.sizes("") == {}


def _free_port() -> int:
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def test_a_disk_that_gets_full_under_a_library_is_named_with_its_store(tmp_path):
    store = Store(str(tmp_path))

    def by_python(path: Path) -> None:
        path.symlink_to("/dev/full")  # every write to it fails with ENOSPC
        path.write_bytes(b"x" * 100_000)

    def by_a_library_that_says_it_in_words(path: Path) -> None:
        path.write_bytes(b"x")
        raise RuntimeError("I/O error: No space left on device (os error 28)")

    for write in (by_python, by_a_library_that_says_it_in_words):
        with pytest.raises(StoreError) as caught, store.writing("a/file") as path:
            write(path)
        assert str(caught.value).startswith(f"could not write {tmp_path}/a/file: ")
        assert "No space left on device" in str(caught.value)
        assert str(caught.value).endswith("choose another store, then run again to go on")
    assert list((tmp_path / "a").iterdir()) == []
