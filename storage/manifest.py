"""The file that makes an artifact: what it is, what it was made of, and the digest of every file.

Two digests matter. `key` says what was asked for (stage, version, settings, inputs) and can be
computed before the work. `content` says what came out (the files' digests and the row count); a
later stage names its inputs by it, so that an artifact rebuilt with equal data keeps everything
after it valid.
"""

import hashlib
import json
import math
import platform
import re
import subprocess
from collections.abc import Mapping
from functools import lru_cache
from importlib import metadata
from pathlib import Path, PurePosixPath
from typing import Any

import xxhash
from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, model_validator

KEY_DIGITS = 24
DIGEST = "digest"
"""Entry of a manifest's file: SHA-256 of the canonical JSON of all others."""
_DIGEST_CHUNK_BYTES = 4 << 20
_PACKAGES = ("outrider", "torch", "transformers", "speculators", "pyarrow")


def canonical_json(value: Any, *, name: str = "value") -> str:
    """The one JSON text of a value: sorted keys, no spaces, ASCII. `name` is what errors call it.

    Raises:
        ValueError: NaN, infinity, a key that is no string, or a type JSON does not have; the place
        is named.
    """
    _check_json(value, name)
    return json.dumps(
        value, sort_keys=True, separators=(",", ":"), ensure_ascii=True, allow_nan=False
    )


def canonical_digest(value: Any) -> str:
    """SHA-256 of a value's canonical JSON, as 64 hexadecimal digits."""
    return hashlib.sha256(canonical_json(value).encode()).hexdigest()


def digest_bytes(data: bytes) -> str:
    """xxh3 (128 bits) of some bytes, as 32 hexadecimal digits."""
    return xxhash.xxh3_128_hexdigest(data)


def digest_file(path: Path) -> str:
    """xxh3 (128 bits) of a file, as 32 hexadecimal digits, read in pieces."""
    digest = xxhash.xxh3_128()
    buffer = memoryview(bytearray(_DIGEST_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            digest.update(buffer[:count])
    return digest.hexdigest()


def artifact_key(
    *, stage: str, version: int, settings: Mapping[str, Any], inputs: Mapping[str, str]
) -> str:
    """The name of what these settings make of these inputs: 24 hexadecimal digits of a SHA-256."""
    canonical_json(dict(settings), name="settings")  # its errors name the setting
    return canonical_digest([stage, version, dict(settings), dict(inputs)])[:KEY_DIGITS]


class FileEntry(BaseModel):
    """One file of an artifact."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """Relative to the artifact's directory."""
    bytes: NonNegativeInt
    xxh3: str = Field(pattern=r"^[0-9a-f]{32}$")
    in_content: bool = True
    """Whether later stages depend on it; False for what tells of the making, such as times."""

    @model_validator(mode="after")
    def _stays_inside(self) -> "FileEntry":
        parts = PurePosixPath(self.path).parts
        if not parts or self.path.startswith("/") or ".." in parts:
            raise ValueError(f"the path {self.path!r} leads out of the artifact's directory")
        return self


def content_digest(*, stage: str, version: int, files: Mapping[str, FileEntry], rows: int) -> str:
    """SHA-256 over what the artifact holds, without where, when and by what it was made."""
    listed = [
        [name, entry.bytes, entry.xxh3] for name, entry in sorted(files.items()) if entry.in_content
    ]
    return canonical_digest([stage, version, listed, rows])


class Manifest(BaseModel):
    """What one artifact is. Its key and content digest must follow from its other fields."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    path: str
    """The artifact's directory in its store.

    Where it was found, should the store have been moved.
    """
    stage: str
    version: int
    key: str
    content: str
    settings: dict[str, Any]
    inputs: dict[str, str]
    """Name of each input -> its content digest."""
    files: dict[str, FileEntry]
    rows: NonNegativeInt
    facts: dict[str, Any]
    """Results worth reading without opening a file (counts, scores); not part of `content`."""
    versions: dict[str, str]
    git_commit: str | None
    started_at: str
    """ISO 8601, UTC."""
    seconds: float

    @model_validator(mode="after")
    def _digests_follow(self) -> "Manifest":
        key = artifact_key(
            stage=self.stage, version=self.version, settings=self.settings, inputs=self.inputs
        )
        if key != self.key:
            raise ValueError(f"the key {self.key} is not that of its settings and inputs, {key}")
        content = content_digest(
            stage=self.stage, version=self.version, files=self.files, rows=self.rows
        )
        if content != self.content:
            raise ValueError(
                f"the content digest {self.content} is not that of its files, {content}"
            )
        return self

    def short_files(self, sizes: Mapping[str, int], *, prefix: str = "") -> list[str]:
        """Which files are missing or of another size, one sentence each.

        `sizes` holds the bytes of the files that are there, by `prefix` + path in the artifact's
        directory.
        """
        problems = []
        for name, entry in sorted(self.files.items()):
            size = sizes.get(prefix + entry.path)
            if size is None:
                problems.append(f"{name} is missing")
            elif size != entry.bytes:
                problems.append(f"{name} has {size} bytes, its manifest says {entry.bytes}")
        return problems

    def to_text(self) -> bytes:
        """The manifest as its file holds it: JSON, with a digest of all of it."""
        return _file_text(self.model_dump(mode="json"))

    @classmethod
    def from_text(cls, text: bytes, *, path: str) -> "Manifest":
        """The manifest in a file that was found at `path`.

        Raises:
            ValueError: it is none, or a bit of it has changed.
        """
        values = json.loads(text)
        if not isinstance(values, dict):
            raise ValueError(f"the manifest at {path} is no JSON object")
        sealed = (
            values.pop(DIGEST, None) is not None
        )  # those from before there were digests are not
        if sealed and text != _file_text(values):
            raise ValueError(f"the manifest at {path} is not as it was written")
        return cls.model_validate({**values, "path": path})

    @property
    def total_bytes(self) -> int:
        """Bytes of all files together."""
        return sum(entry.bytes for entry in self.files.values())


def _file_text(values: dict[str, Any]) -> bytes:
    whole = {**values, DIGEST: canonical_digest(values)}
    return json.dumps(whole, indent=2, sort_keys=True, allow_nan=False).encode() + b"\n"


@lru_cache(maxsize=1)
def library_versions() -> dict[str, str]:
    """Versions of Python and of the libraries that decide results.

    What is not installed is left out.
    """
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return versions


@lru_cache(maxsize=1)
def git_commit() -> str | None:
    """The commit this code was checked out from, "-dirty" added when files differ.

    None outside a checkout.
    """
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        done = subprocess.run(
            command,
            cwd=Path(__file__).parent,
            capture_output=True,
            text=True,
            timeout=10,
            check=False,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = done.stdout.strip()
    return (
        found if done.returncode == 0 and re.fullmatch(r"[0-9a-f]{40,64}(-dirty)?", found) else None
    )


def _check_json(value: Any, place: str) -> None:
    if value is None or isinstance(value, str | bool | int):
        return
    if isinstance(value, float):
        if not math.isfinite(value):
            raise ValueError(
                f"{place} is {value}, which JSON cannot hold; use a finite number or null"
            )
    elif isinstance(value, dict):
        for key, item in value.items():
            if not isinstance(key, str):
                raise ValueError(
                    f"{place} has the key {key!r}; keys must be strings, as JSON would make them"
                )
            _check_json(item, f"{place}.{key}")
    elif isinstance(value, list | tuple):
        for index, item in enumerate(value):
            if type(item) is not str:  # there are lists of millions of names
                _check_json(item, f"{place}[{index}]")
    else:
        raise ValueError(
            f"{place} is a {type(value).__name__}, which JSON cannot hold; convert it first "
            "(a pydantic model by model_dump(mode='json'), a path by str, a number by int or float)"
        )
