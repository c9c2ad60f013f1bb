"""The user's own data: which files some URLs mean, whether they changed, and their records."""

import gzip
import json
import zlib
from collections.abc import Iterable, Iterator
from io import BytesIO
from typing import Any, BinaryIO

import fsspec
import pyarrow as pa
import pyarrow.parquet as pq
import xxhash

from storage.backends import open_filesystem
from storage.remote_files import VERSION_FIELDS

SUFFIXES = (".jsonl", ".jsonl.gz", ".json", ".json.gz", ".parquet")

Record = dict[str, Any]

_PARQUET_BATCH_ROWS = 1024
_DIGEST_CHUNK_BYTES = 4 << 20

_CUT_SHORT = (EOFError, gzip.BadGzipFile, zlib.error)
"""What a damaged .gz gives; other errors of reading are the machine's, and worth another try."""


class SourceError(ValueError):
    """A source file cannot be read as records; the message names file and line."""


def expand_sources(urls: Iterable[str]) -> list[str]:
    """The files that paths, directories and wildcards mean, each once, sorted.

    A directory means the files with a known suffix directly in it.

    Raises:
        ValueError: a path does not exist, a wildcard matches nothing, a directory holds no such
        file, or a file
            has another suffix.
    """
    found: set[str] = set()
    for url in urls:
        found.update(_expand(url))
    return sorted(found)


def fingerprint_source(url: str) -> str:
    """A text that changes when the file's content does.

    Files of this machine are digested; for objects it is their size and the version (ETag or time)
    that the store keeps of them, so that nothing is downloaded to find out that nothing changed.

    Raises:
        ValueError: there is no such file.
    """
    filesystem, path, size, version = _look_at(url)
    if version is None or _is_local(filesystem):
        return f"xxh3:{_digest(filesystem, path)}"
    return _stamp(size, version)


def stamp_source(url: str) -> str:
    """Size and version (ETag or time of change) of a file: a look at it that reads none of its content.

    Raises:
        ValueError: there is no such file.
    """
    filesystem, path, size, version = _look_at(url)
    if version is None:  # a kind of file system that keeps neither
        version = f"xxh3:{_digest(filesystem, path)}"
    return _stamp(size, version)


def read_records(url: str) -> Iterator[tuple[int, Record]]:
    """The records of one file, each with its line or row counted from 1; none for an empty file.

    JSON Lines (.jsonl), a JSON list or {"data": [...]} (.json), each also with .gz, and Parquet.

    Raises:
        SourceError: a line is no JSON, a record is no object, or the file is cut short.
    """
    filesystem, path = open_filesystem(url)
    name = path.lower()
    compression = "gzip" if name.endswith(".gz") else None
    name = name.removesuffix(".gz")
    opened = fsspec.core.OpenFile(filesystem, path, compression=compression)
    with opened as file:
        if name.endswith(".parquet"):
            yield from _parquet_rows(url, file)
        elif name.endswith(".json"):
            yield from _json_items(url, file)
        else:
            yield from _json_lines(url, file)


def _expand(url: str) -> list[str]:
    filesystem, path = open_filesystem(url)
    if filesystem.isdir(path):
        children = [
            child["name"] for child in filesystem.ls(path, detail=True) if child["type"] == "file"
        ]
        files = [child for child in children if child.lower().endswith(SUFFIXES)]
        problem = f"the directory holds no file that ends in {', '.join(SUFFIXES)}"
    elif filesystem.exists(path):
        files, problem = [path], ""
    elif any(mark in path for mark in "*?["):
        files = [match for match in filesystem.glob(path) if filesystem.isfile(match)]
        problem = "no file matches"
    else:
        files, problem = [], "there is no such file or directory"
    if not files:
        raise ValueError(f"the source {url}: {problem}; correct data.sources")
    strange = [file for file in files if not file.lower().endswith(SUFFIXES)]
    if strange:
        raise ValueError(f"the source {strange[0]} does not end in one of {', '.join(SUFFIXES)}")
    if _is_local(filesystem):
        return files
    protocol = fsspec.utils.get_protocol(url)
    return [f"{protocol}://{file.lstrip('/')}" for file in files]


def _look_at(url: str) -> tuple[Any, str, int, object | None]:
    """File system, path in it, size, and version where one is kept; ValueError when there is no such file."""
    filesystem, path = open_filesystem(url)
    try:
        info = filesystem.info(path)
    except FileNotFoundError as error:
        raise ValueError(f"the source {url} does not exist") from error
    version = next((info[name] for name in VERSION_FIELDS if info.get(name)), None)
    return filesystem, path, info["size"], version


def _stamp(size: int, version: object) -> str:
    return f"bytes:{size} version:{str(version).strip(chr(34))}"


def _is_local(filesystem: Any) -> bool:
    return isinstance(filesystem, fsspec.implementations.local.LocalFileSystem)


def _digest(filesystem: Any, path: str) -> str:
    digest = xxhash.xxh3_128()
    with filesystem.open(path, "rb") as file:
        while chunk := file.read(_DIGEST_CHUNK_BYTES):
            digest.update(chunk)
    return digest.hexdigest()


def _json_lines(url: str, file: BinaryIO) -> Iterator[tuple[int, Record]]:
    number = 0
    try:
        for number, line in enumerate(file, start=1):
            text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
            if text.strip():
                yield number, _object(_loads(text, f"{url} line {number}"), f"{url} line {number}")
    except _CUT_SHORT as error:
        raise SourceError(f"{url} breaks off after line {number}: {error}") from error


def _json_items(url: str, file: BinaryIO) -> Iterator[tuple[int, Record]]:
    try:
        content = file.read().removeprefix(b"\xef\xbb\xbf")
    except _CUT_SHORT as error:
        raise SourceError(f"{url} breaks off: {error}") from error
    if not content.strip():
        return
    first_line = content.lstrip().split(b"\n", 1)[0]
    if (
        first_line.lstrip().startswith(b"{")
        and first_line.rstrip().endswith(b"}")
        and (content.strip() != first_line.strip())
    ):
        # JSON Lines by another name, as data set exports often have it
        yield from _json_lines(url, BytesIO(content))
        return
    items = _loads(content, url)
    if isinstance(items, dict):
        items = items.get("data")
    if not isinstance(items, list):
        raise SourceError(
            f'{url}: a .json file holds a list of records, {{"data": [...]}} or one record a line'
        )
    for number, item in enumerate(items, start=1):
        yield number, _object(item, f"{url} item {number}")


def _loads(text: bytes, place: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise SourceError(f"{place}: not JSON ({error}); mend or remove it") from error


def _object(value: Any, place: str) -> Record:
    if not isinstance(value, dict):
        raise SourceError(f"{place}: a record is a JSON object, not a {type(value).__name__}")
    return value


def _parquet_rows(url: str, file: BinaryIO) -> Iterator[tuple[int, Record]]:
    if not file.read(1):
        return
    file.seek(0)
    number = 0
    try:
        for batch in pq.ParquetFile(file).iter_batches(batch_size=_PARQUET_BATCH_ROWS):
            for row in batch.to_pylist():
                number += 1
                yield number, row
    except pa.ArrowInvalid as error:
        raise SourceError(f"{url} is no complete Parquet file: {error}") from error
