"""Where bytes live: a directory of this machine, or anything fsspec can reach.

Both kinds answer the same few questions, with paths relative to their root, and both publish in one
step: a path holds its complete old content or its complete new content, never a part. Nothing here
retries, checks a path or words an error; that is `storage.store`.
"""

import os
import secrets
import shutil
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO, Protocol

import fsspec

TEMPORARY_PREFIX = ".tmp-"
"""Unpublished files beside their destination; listings leave them out."""


_CLIENT_VARIABLES = ("AWS_", "FSSPEC_", "GOOGLE_", "GCS", "AZURE_")


@dataclass(frozen=True)
class Entry:
    """One child of a directory."""

    name: str
    is_directory: bool


class Backend(Protocol):
    """What a store needs from the place it lives in."""

    def local_path(self, path: str) -> Path | None:
        """The file of this machine behind `path`, or None where there is none."""

    def read(self, path: str) -> bytes:
        """The whole content; FileNotFoundError when missing."""

    def open(self, path: str) -> BinaryIO:
        """The file, to read parts of it; FileNotFoundError when missing."""

    def write(self, path: str, data: bytes) -> None:
        """Replace the content in one step."""

    def scratch(self, path: str) -> Path:
        """A new local directory from which `publish` to `path` is cheap; the caller removes it."""

    def publish(self, source: Path, path: str) -> None:
        """Make the local file `source` the content of `path` in one step.

        `source` may be gone afterwards.
        """

    def fetch(self, path: str, target: Path) -> None:
        """Copy the content to a local file; FileNotFoundError when missing."""

    def size(self, path: str) -> int | None:
        """Bytes of the file, None when there is no such file."""

    def entries(self, path: str) -> list[Entry]:
        """Children of a directory, in any order; empty when missing."""

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of every file below a directory, by path relative to it."""

    def delete(self, path: str) -> None:
        """Remove a file or a whole directory; nothing to remove is fine."""


def open_filesystem(url: str) -> tuple[Any, str]:
    """The fsspec file system of a URL and the path in it; credentials come from the environment.

    Listings are never cached: other machines write to the same store. Clients are shared, being
    slow to make (0.4 s for S3), within a process and while the environment stays as it is.

    Raises:
        ValueError: the protocol is unknown or its file system is not installed.
    """
    protocol = fsspec.utils.get_protocol(url)
    try:
        kind = fsspec.get_filesystem_class(protocol)
    except ImportError as error:
        raise ValueError(f"{url}: its file system is not installed here ({error})") from error
    except ValueError as error:
        raise ValueError(
            f"{url}: not a URL of a known kind ({error}); use a path, s3://, gs:// or az://"
        ) from error
    options = kind._get_kwargs_from_urls(url)
    environment = tuple(
        sorted(item for item in os.environ.items() if item[0].startswith(_CLIENT_VARIABLES))
    )
    filesystem = _client(protocol, tuple(sorted(options.items())), environment, os.getpid())
    return filesystem, filesystem._strip_protocol(url)


@lru_cache(maxsize=32)
def _client(
    protocol: str, options: tuple[tuple[str, Any], ...], _environment: object, _process: int
) -> Any:
    uncached = {} if protocol in {"file", "local", "memory"} else {"use_listings_cache": False}
    return fsspec.filesystem(protocol, skip_instance_cache=True, **uncached, **dict(options))


class LocalBackend:
    """A directory of this machine; a crash or a power cut leaves old or new content."""

    def __init__(self, root: Path) -> None:
        self.root = root

    def local_path(self, path: str) -> Path | None:
        """The file itself."""
        return self.root / path

    def read(self, path: str) -> bytes:
        """The whole content."""
        return (self.root / path).read_bytes()

    def open(self, path: str) -> BinaryIO:
        """The file."""
        return (self.root / path).open("rb")

    def write(self, path: str, data: bytes) -> None:
        """Write beside the destination, then rename over it."""
        target = self.root / path
        _make_directories(target.parent)
        temporary = target.parent / f"{TEMPORARY_PREFIX}{secrets.token_hex(4)}-{target.name}"
        try:
            temporary.write_bytes(data)
            self.publish(temporary, path)
        finally:
            temporary.unlink(missing_ok=True)

    def scratch(self, path: str) -> Path:
        """A hidden directory beside the destination: the same disk, so that a rename suffices."""
        parent = (self.root / path).parent
        _make_directories(parent)
        return Path(tempfile.mkdtemp(prefix=TEMPORARY_PREFIX, dir=parent))

    def publish(self, source: Path, path: str) -> None:
        """Flush the file, rename it, flush the directory."""
        target = self.root / path
        _make_directories(target.parent)
        _flush(source)
        source.replace(target)
        _flush(target.parent)

    def fetch(self, path: str, target: Path) -> None:
        """A plain copy."""
        shutil.copyfile(self.root / path, target)

    def size(self, path: str) -> int | None:
        """Bytes of the file."""
        try:
            found = (self.root / path).stat()
        except (FileNotFoundError, NotADirectoryError):
            return None
        return found.st_size if stat.S_ISREG(found.st_mode) else None

    def entries(self, path: str) -> list[Entry]:
        """Children, temporary files left out."""
        try:
            with os.scandir(self.root / path) as children:
                return [
                    Entry(child.name, child.is_dir())
                    for child in children
                    if not child.name.startswith(TEMPORARY_PREFIX)
                ]
        except (FileNotFoundError, NotADirectoryError):
            return []

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of every file below, temporary ones left out."""
        found: dict[str, int] = {}
        top = self.root / path
        for directory, names, files in os.walk(top):
            names[:] = [name for name in names if not name.startswith(TEMPORARY_PREFIX)]
            for name in files:
                file = Path(directory, name).relative_to(self.root).as_posix()
                if not name.startswith(TEMPORARY_PREFIX):
                    size = self.size(file)  # None: another process has deleted it since
                    if size is not None:
                        found[Path(directory, name).relative_to(top).as_posix()] = size
        return found

    def delete(self, path: str) -> None:
        """Remove; another process that removes the same tree at once does no harm."""
        target = self.root / path
        while target.exists() or target.is_symlink():
            try:
                if target.is_dir() and not target.is_symlink():
                    shutil.rmtree(target)
                else:
                    target.unlink()
            except FileNotFoundError:
                continue


class RemoteBackend:
    """An object store, or fsspec's in-memory file system: one put replaces one object."""

    def __init__(self, url: str) -> None:
        self.filesystem, root = open_filesystem(url)
        self.root = root.rstrip("/")
        self.in_memory = url.startswith("memory:")

    def _full(self, path: str) -> str:
        return f"{self.root}/{path}" if path else self.root

    def local_path(self, path: str) -> Path | None:
        """None: objects are not files."""
        del path
        return None

    def read(self, path: str) -> bytes:
        """One get."""
        return bytes(self.filesystem.cat_file(self._full(path)))

    def open(self, path: str) -> BinaryIO:
        """A look-up, then one get for each part that is read."""
        if self.in_memory:
            # its open files are shared: two readers at once would move each other's position
            return BytesIO(self.read(path))
        file: BinaryIO = self.filesystem.open(self._full(path), "rb", cache_type="none")
        return file

    def write(self, path: str, data: bytes) -> None:
        """One put."""
        self.filesystem.pipe_file(self._full(path), data)

    def scratch(self, path: str) -> Path:
        """A directory among the machine's temporary files (TMPDIR)."""
        del path
        return Path(tempfile.mkdtemp(prefix="outrider-"))

    def publish(self, source: Path, path: str) -> None:
        """One put, in parts when large; objects appear when the last part is confirmed."""
        if self.in_memory:
            # its put_file copies piece by piece into a file that readers already see
            self.write(path, source.read_bytes())
        else:
            self.filesystem.put_file(str(source), self._full(path))

    def fetch(self, path: str, target: Path) -> None:
        """One get, in ranges when large."""
        if self.in_memory:
            # see `open`
            target.write_bytes(self.read(path))
        else:
            self.filesystem.get_file(self._full(path), str(target))

    def size(self, path: str) -> int | None:
        """Bytes of the object."""
        try:
            found = self.filesystem.info(self._full(path))
        except FileNotFoundError:
            return None
        return int(found["size"]) if found["type"] == "file" else None

    def entries(self, path: str) -> list[Entry]:
        """Children by one listing."""
        full = self._full(path)
        try:
            children = self.filesystem.ls(full, detail=True)
        except (FileNotFoundError, NotADirectoryError):
            return []
        return [
            Entry(child["name"].rstrip("/").rsplit("/", 1)[-1], child["type"] == "directory")
            for child in children
            if child["name"].strip("/") != full.strip("/")
        ]

    def sizes(self, path: str) -> dict[str, int]:
        """Bytes of every object below, by one listing (a page per 1,000)."""
        full = self._full(path).strip("/")
        found = self.filesystem.find(self._full(path), detail=True)
        return {
            name.strip("/")[len(full) + 1 :]: int(info["size"])
            for name, info in found.items()
            if name.strip("/") != full
        }

    def delete(self, path: str) -> None:
        """Remove, then look: a bulk deletion reports refused keys nowhere else."""
        full = self._full(path)
        found = list(self.filesystem.find(full))
        if not found:
            return
        with suppress(FileNotFoundError):  # another process removed some of them first
            self.filesystem.rm(found)
        left = self.filesystem.find(full)
        if left:
            raise OSError(f"{len(left)} objects remain, {left[0]} among them")


@contextmanager
def removed_afterwards(directory: Path) -> Iterator[Path]:
    """Remove a local directory on the way out, whatever happened."""
    try:
        yield directory
    finally:
        shutil.rmtree(directory, ignore_errors=True)


def _make_directories(directory: Path) -> None:
    """Create a directory and its parents; each new name is flushed against a power cut."""
    missing = []
    while not directory.exists():
        missing.append(directory)
        directory = directory.parent
    for new in reversed(missing):
        new.mkdir(exist_ok=True)
        _flush(new.parent)
    if not missing and not directory.is_dir():
        raise NotADirectoryError(20, "a file is in the way", str(directory))


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
