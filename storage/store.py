"""One place for everything a run keeps: a directory or a bucket, named by one URL.

A path in a store is relative, with "/" between its parts. Every write is published in one step.
Object stores are asked again after a transient error. Whatever fails for good is a `StoreError`
that names store, path and cause; only reading what does not exist is a `FileNotFoundError`.
Credentials and endpoints come from the environment alone.
"""

import errno
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

from storage import retries
from storage.backends import (
    Backend,
    LocalBackend,
    RemoteBackend,
    open_filesystem,
    removed_afterwards,
)
from storage.retries import StoreError

__all__ = ["Store", "StoreError"]

Result = TypeVar("Result")

NOTHING_LEFT_BYTES = 1_000_000
"""Free bytes below which a disk counts as full: some libraries fail there without saying why."""


class Store:
    """A tree of files behind one URL. Other processes make their own of `url`: pickling does.

    Args:
        url: "./runs", "/abs/dir", "file:///abs/dir", "s3://bucket/prefix", "gs://...", "az://...",
            or
            "memory://name" (lives and dies with this process).

    Raises:
        ValueError: the URL is empty, of an unknown kind, or its file system is not installed.
    """

    def __init__(self, url: str) -> None:
        self.url, self.is_local = _normalised(url)
        self._backend: Backend | None = None
        self._process = os.getpid()
        self._files()  # a bad URL is refused here, not at the first write

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def __reduce__(self) -> tuple[type["Store"], tuple[str]]:
        return Store, (self.url,)

    def _files(self) -> Backend:
        # a forked child must not use its parent's connections
        if self._backend is None or self._process != os.getpid():
            self._backend = (
                LocalBackend(Path(self.url)) if self.is_local else RemoteBackend(self.url)
            )
            self._process = os.getpid()
        return self._backend

    def local_path(self, path: str) -> Path | None:
        """The file or directory of this machine behind `path`; None for object stores."""
        return self._files().local_path(_checked(path))

    def check_writable(self) -> None:
        """Write and remove a probe.

        Raises:
            StoreError: it cannot be written; with the cause and what to do about it.
        """
        probe = f".outrider-probe-{secrets.token_hex(4)}"
        try:
            self._files().write(probe, b"probe")
            self._files().delete(probe)
        except Exception as error:
            raise StoreError(
                f"the store {self.url} cannot be written: {retries.cause(error)}; {retries.way_out(error)}"
            ) from error

    def free_bytes(self) -> int | None:
        """Bytes free on the disk of a local store; None where it has no meaning."""
        if not self.is_local:
            return None
        directory = Path(self.url)
        while not directory.is_dir():
            directory = directory.parent
        return shutil.disk_usage(directory).free

    def read_bytes(self, path: str) -> bytes:
        """The content of a file; FileNotFoundError when missing."""
        return self._call(
            "read", path, lambda: self._files().read(_checked(path)), missing=FileNotFoundError
        )

    def read_parts(self, path: str, read: Callable[[BinaryIO], Result]) -> Result:
        """What `read` makes of the open file: of an object only the parts it reads are fetched.

        FileNotFoundError when missing. `read` is called again after transient errors.
        """

        def open_and_read() -> Result:
            with self._files().open(_checked(path)) as file:
                return read(file)

        return self._call("read", path, open_and_read, missing=FileNotFoundError)

    def read_json(self, path: str) -> Any:
        """The content of a JSON file.

        FileNotFoundError when missing, ValueError when it is no JSON.
        """
        content = self.read_bytes(path)
        try:
            return json.loads(content)
        except ValueError as error:
            raise ValueError(f"{self.url}/{path} is not JSON: {error}") from error

    def write_bytes(self, path: str, data: bytes) -> None:
        """Replace the content of a file in one step."""
        self._call("write", path, lambda: self._files().write(_checked(path), data))

    def write_json(self, path: str, value: Any) -> None:
        """Replace the content of a JSON file in one step.

        ValueError for NaN, TypeError for what JSON cannot hold.
        """
        text = json.dumps(value, indent=2, sort_keys=True, allow_nan=False)
        self.write_bytes(path, text.encode() + b"\n")

    @contextmanager
    def writing(self, path: str) -> Iterator[Path]:
        """A local path to write to; at the end of the block it becomes the content of `path`.

        The file is published in one step, and thrown away when the block raises.
        """
        with self.scratch(path) as directory:
            file = directory / path.rsplit("/", 1)[-1]
            yield file
            self.publish(file, path)

    @contextmanager
    def scratch(self, path: str) -> Iterator[Path]:
        """A new local directory, removed after the block, cheap to publish to `path` from.

        Libraries write into it in their own ways: a disk that gets full becomes a StoreError here.
        """
        made = self._call("prepare", path, lambda: self._files().scratch(_checked(path)))
        with removed_afterwards(made) as directory:
            try:
                yield directory
            except Exception as error:
                nothing_left = shutil.disk_usage(directory).free < NOTHING_LEFT_BYTES
                if isinstance(error, StoreError) or not (retries.is_full(error) or nothing_left):
                    raise
                raise StoreError(
                    f"could not write {self.url}/{path}: {retries.cause(error)}; {retries.FULL_WAY_OUT}"
                ) from error

    def publish(self, source: Path, path: str) -> None:
        """Make a local file the content of `path` in one step.

        From a `scratch` directory it is moved.
        """
        self._call("write", path, lambda: self._files().publish(source, _checked(path)))

    @contextmanager
    def reading(self, path: str) -> Iterator[Path]:
        """A local path with the content of `path` during the block; FileNotFoundError when missing.

        On a local store it is the file itself: do not write to it.
        """
        local = self.local_path(path)
        if local is not None:
            if not local.is_file():
                raise FileNotFoundError(errno.ENOENT, "no such file in the store", str(local))
            yield local
            return
        with self.scratch(path) as directory:
            file = directory / path.rsplit("/", 1)[-1]
            self._call(
                "read",
                path,
                lambda: self._files().fetch(_checked(path), file),
                missing=FileNotFoundError,
            )
            yield file

    def is_there(self) -> bool:
        """Whether the store exists: a directory, even an empty one; of an object store anything in it."""
        local = self.local_path("")
        return self.exists("") if local is None else local.is_dir()

    def exists(self, path: str) -> bool:
        """Whether there is a file at `path`, or anything below it."""
        return self.size(path) is not None or bool(self._entries(path))

    def size(self, path: str) -> int | None:
        """Bytes of a file; None when there is no such file."""
        return self._call("look up", path, lambda: self._files().size(_checked(path)))

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of every file below a directory, by path relative to it.

        Empty when missing. One listing.
        """
        return self._call("list", path, lambda: self._files().sizes(_checked(path)))

    def directories(self, path: str) -> list[str]:
        """Sorted names of the directories in a directory; empty when missing."""
        return sorted(entry.name for entry in self._entries(path) if entry.is_directory)

    def files(self, path: str) -> list[str]:
        """Sorted names of the files in a directory; empty when missing."""
        return sorted(entry.name for entry in self._entries(path) if not entry.is_directory)

    def delete(self, path: str) -> None:
        """Remove a file, or a directory with all below it; nothing to remove is fine."""
        if not _checked(path):
            raise ValueError(f"refusing to delete the whole store {self.url}; name a path in it")
        self._call("delete", path, lambda: self._files().delete(path))

    def _entries(self, path: str) -> list[Any]:
        return self._call("list", path, lambda: self._files().entries(_checked(path)))

    def _call(
        self,
        action: str,
        path: str,
        function: Callable[[], Result],
        *,
        missing: type[Exception] | None = None,
    ) -> Result:
        """Run `function`, on an object store again after transient errors; `missing` passes through."""
        _checked(path)
        return retries.call(
            function,
            doing=f"{action} {self.url}/{path}",
            tries=1 if self.is_local else retries.TRIES,
            missing=missing,
        )


def _normalised(url: str) -> tuple[str, bool]:
    """(absolute path, True) for a local URL, (URL without trailing slash, False) for any other."""
    if not url or url != url.strip():
        raise ValueError(
            f"a store's URL is a path or a URL such as s3://bucket/prefix, not {url!r}"
        )
    if "://" in url and not url.startswith(("file://", "local://")):
        return url.rstrip("/"), False
    return open_filesystem(url)[1], True


def _checked(path: str) -> str:
    """`path`, when it is relative and stays below the root; "" is the root itself."""
    parts = path.split("/") if path else []
    if any(part in {"", ".", ".."} for part in parts) or "\\" in path or "\0" in path:
        raise ValueError(
            f"{path!r} is not a path in a store: relative, parts joined by one '/', no '.' or '..'"
        )
    return path
