"""The files of a model, wherever they lie: their names and sizes, and any range of their bytes.

Facts are read through this alone, so a model in a bucket or on the hub is understood from its config and
the headers of its weight files, without its weights being fetched.
"""

import json
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

CONFIG_FILE = "config.json"
GENERATION_FILE = "generation_config.json"
TOKENIZER_CONFIG_FILE = "tokenizer_config.json"

SMALL_FILES = ("*.json", "*.txt", "*.model", "*.tiktoken", "*.jinja")
"""Config, tokenizer, chat template and weight index."""
CODE_FILES = "*.py"
WEIGHT_FILES = "*.safetensors"


class VerifierError(ValueError):
    """A verifier that cannot be used as it is; the message says why and what to do."""


class ModelFiles(Protocol):
    """The files directly in a model's directory."""

    @property
    def directory(self) -> str:
        """The directory as a person names it: a path or a URL."""

    @property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file, by name."""

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file, by default all; fewer when the file ends before."""


class LocalFiles:
    """The files of a directory of this machine."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @property
    def directory(self) -> str:
        """The path."""
        return str(self.path)

    @cached_property
    def sizes(self) -> Mapping[str, int]:
        """Bytes of each file; VerifierError when there is no such directory."""
        if not self.path.is_dir():
            raise VerifierError(f"there is no model directory {self.path}; correct verifier.model")
        return {path.name: path.stat().st_size for path in self.path.iterdir() if path.is_file()}

    def read(self, name: str, start: int = 0, stop: int | None = None) -> bytes:
        """Bytes [start, stop) of a file."""
        with (self.path / name).open("rb") as file:
            file.seek(start)
            return file.read(-1 if stop is None else stop - start)


def open_files(model: Path | ModelFiles) -> ModelFiles:
    """Return the files of a model that is named by its local directory, or that is open already."""
    return LocalFiles(model) if isinstance(model, Path) else model


def small_files(files: ModelFiles, *, code: bool) -> list[str]:
    """Return the sorted names of all that a model needs besides its weights; `code` adds its Python files."""
    patterns = (*SMALL_FILES, CODE_FILES) if code else SMALL_FILES
    return sorted(
        name for name in files.sizes if any(fnmatch(name, pattern) for pattern in patterns)
    )


Stamp = tuple[int, int]
"""Bytes and time of change of a file."""


def file_stamps(directory: Path) -> dict[str, Stamp]:
    """Return the stamp of each file that a model is loaded from, by name."""
    patterns = (*SMALL_FILES, CODE_FILES, WEIGHT_FILES)
    found = {path.name: path.stat() for path in directory.iterdir() if path.is_file()}
    return {
        name: (stat.st_size, stat.st_mtime_ns)
        for name, stat in sorted(found.items())
        if any(fnmatch(name, pattern) for pattern in patterns)
    }


def check_stamps(directory: Path, stamps: Mapping[str, Sequence[int]]) -> None:
    """Raise VerifierError when a file of the model has changed since its stamp was taken, has come or has gone."""
    now = {name: list(stamp) for name, stamp in file_stamps(directory).items()}
    before = {name: list(stamp) for name, stamp in stamps.items()}
    changed = sorted(n for n in now.keys() | before.keys() if now.get(n) != before.get(n))
    if changed:
        raise VerifierError(
            f"{directory} changed during the run ({', '.join(changed[:3])}): what was computed may be of another "
            "model and is not kept; leave the directory as it is and run again"
        )


def read_json_object(files: ModelFiles, name: str) -> dict[str, Any]:
    """Return the JSON object in a file; VerifierError names the file when it holds none."""
    place = f"{files.directory}/{name}"
    try:
        value = json.loads(files.read(name))
    except (ValueError, OSError, RecursionError) as error:
        raise VerifierError(f"{place} is not readable JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise VerifierError(f"{place} holds a JSON {type(value).__name__}, not an object")
    return value
