"""Copies of remote directories on this machine, made once, file by file, and gone on with when interrupted.

<mirror>/blobs/<digest of name, size and version>      a whole file of the remote directory
<mirror>/blobs/<the same>.part                         what has arrived of one
<mirror>/snapshots/<digest of its blobs>/<name>        links to the blobs: the directory as it was

A snapshot appears in one step when all its files are there, and never changes: a process that uses one is
not disturbed by another that copies a newer version. Files that did not change are not fetched again.
"""

import fcntl
import logging
import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from contextvars import copy_context
from pathlib import Path

from storage.backends import TEMPORARY_PREFIX
from storage.manifest import KEY_DIGITS, canonical_digest
from storage.remote_files import RemoteFile, RemoteFiles
from storage.retries import StoreError

logger = logging.getLogger(__name__)

CHUNK_BYTES = 32 << 20
FILES_AT_ONCE = 4

_Progress = Callable[[int], None]


class Mirror:
    """The copy of some files of a remote directory, below `root`."""

    def __init__(self, remote: RemoteFiles, names: Sequence[str], *, root: Path) -> None:
        self._remote = remote
        self._directory = root / canonical_digest(remote.directory)[:KEY_DIGITS]
        self._blobs = {name: _blob_name(remote.listing[name]) for name in sorted(names)}
        self._snapshot = self._directory / "snapshots" / canonical_digest(self._blobs)[:KEY_DIGITS]

    @property
    def missing_bytes(self) -> int:
        """Bytes that have not arrived yet."""
        return sum(self._remote.sizes[name] - self._arrived(name) for name in self._blobs)

    def fetch(self, progress: _Progress, *, chunk_bytes: int = CHUNK_BYTES) -> Path:
        """Copy what is missing, `chunk_bytes` at a time; returns the local directory with the files.

        `progress` gets the bytes of each piece that arrived, from several threads. Another process that
        copies the same directory is waited for.

        Raises:
            StoreError: the remote place cannot be read, a file changed while it was read, or this
            machine's disk has no room.
        """
        if self._is_complete():
            return self._snapshot
        (self._directory / "blobs").mkdir(parents=True, exist_ok=True)
        with _locked(self._directory / "lock"):
            check_room(self._directory, self.missing_bytes, variable="OUTRIDER_CACHE")
            self._fetch_files(progress, chunk_bytes)
            self._publish()
        return self._snapshot

    def _blob(self, name: str) -> Path:
        return self._directory / "blobs" / self._blobs[name]

    def _part(self, name: str) -> Path:
        return self._blob(name).with_suffix(".part")

    def _is_whole(self, name: str) -> bool:
        blob = self._blob(name)
        return blob.is_file() and blob.stat().st_size == self._remote.sizes[name]

    def _arrived(self, name: str) -> int:
        if self._is_whole(name):
            return self._remote.sizes[name]
        part = self._part(name)
        return part.stat().st_size if part.is_file() else 0

    def _is_complete(self) -> bool:
        links = all((self._snapshot / name).is_file() for name in self._blobs)
        return links and all(self._is_whole(name) for name in self._blobs)

    def _fetch_files(self, progress: _Progress, chunk_bytes: int) -> None:
        stopped = threading.Event()
        with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
            waiting = [name for name in self._blobs if not self._is_whole(name)]
            running = [  # in the caller's context: what they log is the caller's
                pool.submit(
                    copy_context().run, self._fetch_file, name, progress, chunk_bytes, stopped
                )
                for name in waiting
            ]
            try:
                for one in running:
                    one.result()
            finally:  # an error or Ctrl-C in one: the others end with the piece they are at
                stopped.set()
                pool.shutdown(cancel_futures=True)

    def _fetch_file(
        self, name: str, progress: _Progress, chunk_bytes: int, stopped: threading.Event
    ) -> None:
        blob, part, file = self._blob(name), self._part(name), self._remote.listing[name]
        with part.open("ab") as target:
            start = target.tell()
            if start > file.bytes:
                target.truncate(start := 0)
            while start < file.bytes and not stopped.is_set():
                piece = self._remote.read(name, start, start + chunk_bytes)
                if not piece:
                    raise StoreError(
                        f"{self._remote.directory}/{name} ended at {start} of {file.bytes} bytes; "
                        "run again to fetch what is there now"
                    )
                target.write(piece)
                target.flush()
                # a part is trusted by its length: its bytes must be on the disk before it grows
                os.fsync(target.fileno())
                start += len(piece)
                progress(len(piece))
        if stopped.is_set():
            return
        if not self._remote.is_unchanged(file):
            part.unlink()
            raise StoreError(
                f"{self._remote.directory}/{name} changed while it was copied; run again to fetch "
                "what is there now"
            )
        part.replace(blob)

    def _publish(self) -> None:
        """Make the snapshot appear with all its links; one that lacks some is mended."""
        for name, blob in self._blobs.items() if self._snapshot.is_dir() else ():
            if not (self._snapshot / name).is_file():
                (self._snapshot / name).unlink(missing_ok=True)
                (self._snapshot / name).symlink_to(Path("..", "..", "blobs", blob))
        if self._snapshot.is_dir():
            return
        self._snapshot.parent.mkdir(exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=self._snapshot.parent))
        try:
            for name, blob in self._blobs.items():
                (made / name).symlink_to(Path("..", "..", "blobs", blob))
            made.chmod(0o755)
            made.replace(self._snapshot)
        finally:
            shutil.rmtree(made, ignore_errors=True)


def check_room(directory: Path, wanted_bytes: int, *, variable: str) -> None:
    """Raise StoreError when the disk of `directory`, which `variable` names, has less free than is wanted."""
    while not directory.is_dir():
        directory = directory.parent
    free = shutil.disk_usage(directory).free
    if wanted_bytes > free:
        raise StoreError(
            f"the model needs {wanted_bytes:,} bytes more in {directory}, where {free:,} are free; free some "
            f"space or let {variable} name a directory on a larger disk"
        )


def _blob_name(file: RemoteFile) -> str:
    return canonical_digest([file.name, file.bytes, file.version])[:KEY_DIGITS]


@contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Hold a lock that the kernel gives back when its holder dies."""
    with path.open("w") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("waiting for another process that fills %s", path.parent)
            fcntl.flock(file, fcntl.LOCK_EX)
        yield
