"""Artifacts: results with an identity, complete when their manifest is there and never before.

The files of an artifact lie in a directory of the attempt that wrote them; the manifest, written
last and in one step, points at them. Two runs that make the same artifact at once never touch each
other's files, the last manifest wins and is complete, and nothing published is ever overwritten in
place.

This module looks artifacts up and opens them; `storage.writing` makes them and is part of this
module's names.
"""

import logging
import shutil
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from contextvars import copy_context
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar

from storage.identity import Identity
from storage.layout import MANIFEST_NAME
from storage.manifest import Manifest, digest_file
from storage.store import Store, StoreError
from storage.writing import Writer, abandoned, remove_garbage, write

__all__ = [
    "ArtifactError",
    "Identity",
    "Writer",
    "abandoned",
    "check_digests",
    "find",
    "find_all",
    "list_manifests",
    "local_directory",
    "location",
    "open_directory",
    "open_file",
    "peek",
    "read_manifest",
    "remove",
    "remove_all",
    "remove_garbage",
    "require",
    "set_aside",
    "side_by_side",
    "verify",
    "write",
]

logger = logging.getLogger(__name__)

LOOKUP_THREADS = 16

_checked_files: set[tuple[str, str, str, str]] = set()

Item = TypeVar("Item")
Found = TypeVar("Found")


class ArtifactError(RuntimeError):
    """An artifact that must be there is missing, short or corrupt.

    Running its stage again rebuilds it.
    """


def find(store: Store, identity: Identity) -> Manifest | None:
    """The complete artifact of this identity, or None when it has to be made.

    One that is short or unreadable is set aside with a warning. One of another identity in the same
    directory is left alone: publishing replaces it.
    """
    manifest = read_manifest(store, identity.path)
    if manifest is not None and manifest.key != identity.key:
        logger.info("%s holds the key %s, not %s", identity.path, manifest.key, identity.key)
        return None
    return manifest


def find_all(store: Store, identities: Iterable[Identity]) -> list[Manifest | None]:
    """`find` for many identities at once, in their order."""
    return side_by_side(lambda identity: find(store, identity), identities)


def read_manifest(store: Store, path: str) -> Manifest | None:
    """The manifest at `path` when every file it names is there in full length.

    None, and set aside, otherwise.
    """
    text = _manifest_text(store, path)
    if text is None:
        return None
    manifest, problems = _parsed(text, path), ["its manifest is unreadable"]
    if manifest is not None:
        sizes: dict[str, int] = {}
        for attempt in {entry.path.split("/", 1)[0] for entry in manifest.files.values()}:
            found = store.sizes(f"{path}/{attempt}")
            sizes.update({f"{attempt}/{name}": size for name, size in found.items()})
        problems = manifest.short_files(sizes)
        if not problems:
            return manifest
    _set_aside(store, path, text=text, problems=problems)
    return None


def peek(store: Store, path: str) -> Manifest:
    """The manifest at `path` as it is, its files not looked at and nothing set aside.

    ArtifactError when there is none or it is unreadable.
    """
    text = _manifest_text(store, path)
    manifest = None if text is None else _parsed(text, path)
    if manifest is None:
        raise ArtifactError(f"{store.url}/{path} has no readable manifest")
    return manifest


def location(store: Store, manifest: Manifest) -> str:
    """Where an artifact's files lie, for a person or a server: a directory or a URL."""
    attempts = {entry.path.removesuffix(f"/{name}") for name, entry in manifest.files.items()}
    return "/".join([store.url, manifest.path, *attempts])


def require(store: Store, path: str) -> Manifest:
    """The complete artifact at `path`; ArtifactError when there is none."""
    manifest = read_manifest(store, path)
    if manifest is None:
        raise ArtifactError(
            f"no complete artifact at {store.url}/{path}; run its stage again to rebuild it"
        )
    return manifest


def list_manifests(store: Store, parent: str) -> list[Manifest]:
    """The complete artifacts directly below `parent`, sorted by path; meant for thousands.

    One listing answers for the files of all; only the manifests are read one by one, side by side.
    """
    sizes = store.sizes(parent)
    paths = sorted(
        f"{parent}/{name.rsplit('/', 1)[0]}"
        for name in sizes
        if name.endswith(f"/{MANIFEST_NAME}") and name.count("/") == 1
    )

    def read(path: str) -> Manifest | None:
        text = _manifest_text(store, path)
        manifest = None if text is None else _parsed(text, path)
        name = path.rsplit("/", 1)[-1]
        if manifest is None or manifest.short_files(sizes, prefix=f"{name}/"):
            # unreadable, short, or published after the listing: look again, with all consequences
            return read_manifest(store, path)
        return manifest

    return [manifest for manifest in side_by_side(read, paths) if manifest is not None]


def verify(store: Store, manifest: Manifest, *, deep: bool) -> list[str]:
    """What is wrong with an artifact's files, one sentence each; empty when all is well.

    `deep` reads every byte and compares digests; otherwise existence and sizes are checked.
    """
    sizes = {
        entry.path: store.size(f"{manifest.path}/{entry.path}") for entry in manifest.files.values()
    }
    problems = manifest.short_files(
        {path: size for path, size in sizes.items() if size is not None}
    )
    for name, entry in sorted(manifest.files.items()):
        if deep and sizes[entry.path] == entry.bytes:
            with store.reading(f"{manifest.path}/{entry.path}") as file:
                digest = digest_file(file)
            if digest != entry.xxh3:
                problems.append(_wrong_digest(name, digest, entry.xxh3))
    return problems


@contextmanager
def open_file(store: Store, manifest: Manifest, name: str) -> Iterator[Path]:
    """A local path with one file of an artifact, for the length of the block; its digest is checked first.

    Raises:
        ArtifactError: the artifact has no such file, it has gone, or its bytes are not those that were published. In
            the last case the artifact is set aside, so that the next run makes it again.
    """
    entry = manifest.files.get(name)
    if entry is None:
        raise ArtifactError(f"{manifest.path} has no file {name!r}, only {sorted(manifest.files)}")
    with ExitStack() as stack:
        try:
            path = stack.enter_context(store.reading(f"{manifest.path}/{entry.path}"))
        except FileNotFoundError as error:
            raise ArtifactError(
                f"{name} of {store.url}/{manifest.path} has gone; run its stage again to rebuild it"
            ) from error
        _check_digest(store, manifest, name, path=path)
        yield path


@contextmanager
def open_directory(store: Store, manifest: Manifest) -> Iterator[Path]:
    """A local directory with an artifact's files under their names, for the length of the block."""
    local = local_directory(store, manifest)
    if local is not None:
        yield local
        return
    with store.scratch(manifest.path) as directory:
        for name in manifest.files:
            target = directory / name
            target.parent.mkdir(exist_ok=True)
            with open_file(store, manifest, name) as file:
                shutil.move(file, target)
        yield directory


def check_digests(store: Store, manifest: Manifest) -> None:
    """Compare every file of an artifact with its digest; ArtifactError, and set aside, when one is another."""
    for name in manifest.files:
        with open_file(store, manifest, name):
            pass


def local_directory(store: Store, manifest: Manifest) -> Path | None:
    """On a local store the directory with the artifact's files under their names, to use in place.

    Else None.
    """
    attempts = {entry.path.removesuffix(f"/{name}") for name, entry in manifest.files.items()}
    if len(attempts) != 1:
        return None
    return store.local_path(f"{manifest.path}/{attempts.pop()}")


def side_by_side(look_up: Callable[[Item], Found], items: Iterable[Item]) -> list[Found]:
    """Call `look_up` for all items in threads, in the caller's context: what they log is the caller's."""
    with ThreadPoolExecutor(LOOKUP_THREADS) as pool:
        # a context of its own for each: one cannot be entered twice at once
        found = [pool.submit(copy_context().run, look_up, item) for item in items]
        return [future.result() for future in found]


def set_aside(store: Store, path: str, *, problem: str) -> None:
    """Let an artifact count as not made, its manifest kept under another name; none there is fine."""
    text = _manifest_text(store, path)
    if text is not None:
        _set_aside(store, path, text=text, problems=[problem])


def remove(store: Store, path: str) -> None:
    """Delete an artifact, its manifest first: killed half-way, it is none rather than broken.

    What another process is writing at its place stays.
    """
    try:
        own = {entry.path.split("/", 1)[0] for entry in peek(store, path).files.values()}
    except ArtifactError:
        own = set()
    store.delete(f"{path}/{MANIFEST_NAME}")
    for attempt in own:
        store.delete(f"{path}/{attempt}")
    if not store.directories(path):
        store.delete(path)


def remove_all(store: Store, path: str) -> None:
    """Delete an artifact and those below it, all manifests first: killed half-way, each is whole or none.

    Those last in the alphabet go first: a training's steps before the metrics and the best weights that they refer to.
    """
    for name in sorted(store.sizes(path), reverse=True):
        if name.rsplit("/", 1)[-1] == MANIFEST_NAME:
            store.delete(f"{path}/{name}")
    store.delete(path)


def _check_digest(store: Store, manifest: Manifest, name: str, *, path: Path) -> None:
    """Compare a file with its manifest, once in a process: what is used twice is read for it once."""
    entry = manifest.files[name]
    checked = (store.url, manifest.path, entry.path, entry.xxh3)
    if checked in _checked_files:
        return
    digest = digest_file(path)
    if digest != entry.xxh3:
        set_aside(store, manifest.path, problem=_wrong_digest(name, digest, entry.xxh3))
        raise ArtifactError(f"{store.url}/{manifest.path} is corrupt; run again to rebuild it")
    _checked_files.add(checked)


def _wrong_digest(name: str, digest: str, expected: str) -> str:
    return f"{name} has the digest {digest}, its manifest says {expected}"


def _manifest_text(store: Store, path: str) -> bytes | None:
    try:
        return store.read_bytes(f"{path}/{MANIFEST_NAME}")
    except FileNotFoundError:
        return None


def _parsed(text: bytes, path: str) -> Manifest | None:
    """The manifest in `text`, found at `path`; None when it is none."""
    try:
        return Manifest.from_text(text, path=path)
    except ValueError:
        return None


def _set_aside(store: Store, path: str, *, text: bytes, problems: list[str]) -> None:
    """Take the manifest away, kept under another name, so that the artifact counts as not made."""
    logger.warning("%s/%s is set aside: %s", store.url, path, "; ".join(problems))
    if _manifest_text(store, path) != text:
        return  # another run has repaired it meanwhile
    moment = datetime.now(UTC).strftime("%Y%m%dT%H%M%S%f")
    try:
        store.write_bytes(f"{path}/set-aside-{moment}.json", text)
        store.delete(f"{path}/{MANIFEST_NAME}")
    except StoreError as error:
        logger.warning("its manifest stays, and stays unused: %s", error)
