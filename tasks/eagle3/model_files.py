"""The files of a model, wherever they lie: their names and sizes, and any range of their bytes.

Facts are read through this alone, so a model in a bucket or on the hub is understood from its config and
the headers of its weight files, without its weights being fetched.
"""

import json
from collections.abc import Mapping
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


def read_json_object(files: ModelFiles, name: str) -> dict[str, Any]:
    """Return the JSON object in a file; VerifierError names the file when it holds none."""
    place = f"{files.directory}/{name}"
    try:
        value = json.loads(files.read(name))
    except (ValueError, OSError) as error:
        raise VerifierError(f"{place} is not readable JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise VerifierError(f"{place} holds a JSON {type(value).__name__}, not an object")
    return value
