"""Making an artifact: files first, in a directory of the attempt, then the manifest."""

import json
import logging
import os
import re
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import UTC, datetime, timedelta
from pathlib import Path
from secrets import token_hex
from typing import TYPE_CHECKING, Any

from storage.identity import Identity
from storage.layout import MANIFEST_NAME
from storage.manifest import (
    FileEntry,
    Manifest,
    canonical_json,
    content_digest,
    digest_file,
    git_commit,
    library_versions,
)
from storage.store import Store, StoreError
from storage.tensor_files import write_tensors

if TYPE_CHECKING:  # torch takes seconds to import and most readers of a store need none
    import torch

logger = logging.getLogger(__name__)

GARBAGE_AGE = timedelta(hours=24)
"""Attempts that no manifest refers to go past this age: younger ones may be in the making."""

_FLUSHED_BYTES = 64 << 20
_ATTEMPT = re.compile(r"attempt-(\d{8}T\d{12})-[0-9a-f]{8}")
_ATTEMPT_TIME = "%Y%m%dT%H%M%S%f"
_FILE_NAME = re.compile(r"[A-Za-z0-9_][A-Za-z0-9._-]*(/[A-Za-z0-9_][A-Za-z0-9._-]*)?")


@contextmanager
def write(store: Store, identity: Identity) -> Iterator["Writer"]:
    """A writer for one artifact.

    A block that ends without `publish`, or raises before it, leaves nothing.
    """
    writer = Writer(store, identity)
    try:
        yield writer
    finally:
        if not writer.published:
            writer.discard()


@contextmanager
def _flushing(path: Path) -> Iterator[None]:
    """Let the disk take a large file during the block: who makes it durable has less to wait for then."""
    if path.stat().st_size < _FLUSHED_BYTES:
        yield
        return
    with path.open("rb") as file, ThreadPoolExecutor(max_workers=1) as thread:
        flushed = thread.submit(os.fsync, file.fileno())
        yield
        flushed.result()


class Writer:
    """Writes the files of one artifact, then its manifest. Made by `write`."""

    def __init__(self, store: Store, identity: Identity) -> None:
        now = datetime.now(UTC)
        self.store = store
        self.identity = identity
        self.attempt = f"attempt-{now.strftime(_ATTEMPT_TIME)}-{token_hex(4)}"
        self._key = identity.key  # settings that are no JSON are refused before any work
        self._started_at = now.isoformat(timespec="seconds")
        self._start_seconds = time.monotonic()
        self._files: dict[str, FileEntry] = {}
        self.published = False

    @property
    def attempt_path(self) -> str:
        """The attempt's directory in the store."""
        return f"{self.identity.path}/{self.attempt}"

    @contextmanager
    def file(self, name: str, *, in_content: bool = True) -> Iterator[Path]:
        """A local path to write one file to; digested and stored at the end of the block.

        One that is not `in_content` may differ from one making to the next: later stages do not
        depend on it.

        Raises:
            ValueError: `name` is no plain name (one "/" is allowed), or was written before.
        """
        with self._writing(name) as path:
            yield path
            local = self.store.local_path(self.attempt_path) is not None
            with _flushing(path) if local else nullcontext():
                entry = self._entry(name, path, digest_file(path), in_content=in_content)
        self._files[name] = entry

    def add_tensors(
        self,
        name: str,
        tensors: Mapping[str, "torch.Tensor"],
        *,
        metadata: Mapping[str, str] | None = None,
        abandoned: Callable[[], bool] = lambda: False,
    ) -> None:
        """Store a safetensors file of contiguous CPU tensors; they may share memory.

        AbandonedError when `abandoned` has become true before it is written.
        """
        with self._writing(name) as path:
            digest = write_tensors(path, tensors, metadata=metadata, abandoned=abandoned)
            entry = self._entry(name, path, digest)
        self._files[name] = entry

    def add_bytes(self, name: str, data: bytes) -> None:
        """Store one small file."""
        with self.file(name) as path:
            path.write_bytes(data)

    @contextmanager
    def directory(self, name: str = "") -> Iterator[Path]:
        """A local directory to write any files to; stored at the end of the block as "name/<file>".

        Without a name they become files of the artifact itself. On a local store they are moved,
        not copied.
        """
        with self.store.scratch(f"{self.attempt_path}/files") as directory:
            yield directory
            for source in sorted(path for path in directory.rglob("*") if path.is_file()):
                relative = source.relative_to(directory).as_posix()
                with self.file(f"{name}/{relative}" if name else relative) as target:
                    shutil.move(source, target)

    def publish(self, *, rows: int, facts: Mapping[str, Any] | None = None) -> Manifest:
        """Write the manifest: from here on the artifact exists.

        Args:
            rows: rows of the artifact, in its own unit (samples, tokens, tensors).
            facts: results worth reading without opening a file, as plain JSON types.

        Raises:
            StoreError: a file of this attempt has gone meanwhile.
            ValueError: `facts` are no JSON, or it was published before.
        """
        if self.published:
            raise ValueError(
                f"{self.identity.path} was published before; an artifact is published once"
            )
        manifest = self._manifest(rows, facts or {})
        self._check_files(manifest)
        self.store.write_bytes(f"{manifest.path}/{MANIFEST_NAME}", manifest.to_text())
        self.published = True
        try:
            remove_garbage(self.store, manifest.path)
        except StoreError as error:
            logger.warning("abandoned attempts at %s stay for now: %s", manifest.path, error)
        return manifest

    def discard(self) -> None:
        """Delete what this attempt wrote.

        A failure is logged, and the files are garbage for a later run.
        """
        try:
            self.store.delete(self.attempt_path)
        except StoreError as error:
            logger.warning("the unpublished files of %s stay for now: %s", self.attempt_path, error)

    def _writing(self, name: str) -> AbstractContextManager[Path]:
        if _FILE_NAME.fullmatch(name) is None:
            raise ValueError(
                f"{name!r} cannot name a file of an artifact: 'name' or 'directory/name'"
            )
        if name in self._files:
            raise ValueError(f"{name} was written before; each file of an artifact is written once")
        return self.store.writing(f"{self.attempt_path}/{name}")

    def _entry(self, name: str, path: Path, digest: str, *, in_content: bool = True) -> FileEntry:
        size = path.stat().st_size
        return FileEntry(
            path=f"{self.attempt}/{name}", bytes=size, xxh3=digest, in_content=in_content
        )

    def _manifest(self, rows: int, facts: Mapping[str, Any]) -> Manifest:
        identity = self.identity
        return Manifest(
            path=identity.path,
            stage=identity.stage,
            version=identity.version,
            key=self._key,
            content=content_digest(
                stage=identity.stage, version=identity.version, files=self._files, rows=rows
            ),
            # through JSON, so that the manifest returned equals the one read back
            settings=json.loads(canonical_json(identity.settings, name="settings")),
            inputs=identity.inputs,
            files=dict(sorted(self._files.items())),
            rows=rows,
            facts=json.loads(canonical_json(dict(facts), name="facts")),
            versions=library_versions(),
            git_commit=git_commit(),
            started_at=self._started_at,
            seconds=round(time.monotonic() - self._start_seconds, 3),
        )

    def _check_files(self, manifest: Manifest) -> None:
        """Never point at what is not there: a clean-up elsewhere may take a very old attempt."""
        sizes = self.store.sizes(self.attempt_path) if self._files else {}
        problems = manifest.short_files({f"{self.attempt}/{name}": n for name, n in sizes.items()})
        if problems:
            raise StoreError(
                f"{self.store.url}/{self.attempt_path} changed before it was published "
                f"({'; '.join(problems)}); run the stage again"
            )


def remove_garbage(store: Store, path: str) -> list[str]:
    """Delete what killed attempts left in an artifact's directory; returns the attempts removed.

    Kept are the attempt its manifest refers to and all younger than `GARBAGE_AGE`.
    """
    removed = abandoned(store, path)
    for name in removed:
        store.delete(f"{path}/{name}")
    if removed:
        logger.info("%s: removed %d abandoned attempts", path, len(removed))
    return removed


def abandoned(store: Store, path: str, *, age: timedelta = GARBAGE_AGE) -> list[str]:
    """Attempts in an artifact's directory that its manifest does not refer to and that began longer ago than `age`."""
    found = [name for name in store.directories(path) if _is_older(name, age)]
    if not found:
        return []
    try:
        manifest_text = store.read_bytes(f"{path}/{MANIFEST_NAME}").decode(errors="replace")
    except FileNotFoundError:
        manifest_text = ""
    return [name for name in found if name not in manifest_text]


def _is_older(name: str, age: timedelta) -> bool:
    """Whether it is the name of an attempt that began more than `age` ago."""
    match = _ATTEMPT.fullmatch(name)
    if match is None:
        return False
    began = datetime.strptime(match[1], _ATTEMPT_TIME).replace(tzinfo=UTC)
    return began < datetime.now(UTC) - age
