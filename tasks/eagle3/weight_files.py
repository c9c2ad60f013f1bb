"""The weight files of a checkpoint, known by their headers alone: names, shapes, places, digests.

A safetensors file is 8 bytes (little-endian header length), a JSON header, then the tensors' bytes.
"""

import hashlib
import json
import os
import struct
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tasks.eagle3.model_files import ModelFiles, VerifierError, read_json_object

__all__ = [
    "TensorEntry",
    "VerifierError",
    "WeightFile",
    "content_digest",
    "read_weight_files",
    "weight_file_names",
]

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_LENGTH_BYTES = 8
MAX_HEADER_BYTES = 100_000_000
"""The limit of the safetensors library itself; a larger number is not a length."""
LFS_POINTER = b"version "
"""How a git-lfs pointer begins, which a clone without git-lfs leaves in the place of a file."""
HEADER_THREADS = 16

SAMPLED_TENSORS_PER_FILE = 256
WHOLE_FILE_BYTES = 1 << 30
SAMPLE_BYTES = 4096
DIGEST_CHUNK_BYTES = 16 << 20


@dataclass(frozen=True)
class TensorEntry:
    """Where one stored tensor lies: bytes [start, stop) of `file`."""

    file: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class WeightFile:
    """One safetensors file: its size, the digest of its header, its tensors by key."""

    name: str
    file_bytes: int
    header_digest: str
    tensors: Mapping[str, TensorEntry]


def weight_file_names(files: ModelFiles) -> list[str]:
    """Return the sorted names of a checkpoint's weight files.

    Raises VerifierError when there are none, and when the index names what is not there.
    """
    return _file_names(files, _weight_map(files))


def read_weight_files(files: ModelFiles) -> tuple[WeightFile, ...]:
    """Return the headers of all weight files of a checkpoint, sorted by name.

    Two reads a file: the header's length and the header. Raises VerifierError when there are none, when
    the index names what is not there, and when a file is short or no safetensors file.
    """
    weight_map = _weight_map(files)
    names = _file_names(files, weight_map)
    with ThreadPoolExecutor(HEADER_THREADS) as pool:
        found = list(pool.map(lambda name: _read_header(files, name), names))
    headers = {file.name: file for file in found}
    for key, name in weight_map.items():
        if key not in headers[name].tensors:
            raise VerifierError(
                f"{files.directory}/{INDEX_FILE} says that {key} lies in {name}, which holds no such "
                "tensor; index and files are of different checkpoints: fetch it again"
            )
    return tuple(found)


def content_digest(
    directory: Path,
    weights: WeightFile,
    *,
    full: bool = False,
    progress: Callable[[int], None] | None = None,
) -> tuple[str, str]:
    """Digest a file's content; returns how ("whole" or "sample") and the digest.

    Up to WHOLE_FILE_BYTES, or with `full`, every byte counts. Of a larger file it takes SAMPLE_BYTES from
    the middle of SAMPLED_TENSORS_PER_FILE tensors at most, evenly spread over the file: fine-tunes of one
    model share sizes and headers. `progress` gets the bytes of each piece read.
    """
    with (directory / weights.name).open("rb", buffering=0) as file:
        if full or weights.file_bytes <= WHOLE_FILE_BYTES:
            digest = hashlib.sha256()
            buffer = memoryview(bytearray(min(DIGEST_CHUNK_BYTES, weights.file_bytes)))
            while count := file.readinto(buffer):
                digest.update(buffer[:count])
                if progress is not None:
                    progress(count)
            return "whole", digest.hexdigest()
        return "sample", _sample_digest(file.fileno(), weights)


def _sample_digest(descriptor: int, weights: WeightFile) -> str:
    entries = sorted(weights.tensors.values(), key=lambda entry: entry.start)
    count = min(len(entries), SAMPLED_TENSORS_PER_FILE)
    digest = hashlib.sha256()
    for place in range(count):
        entry = entries[place * len(entries) // count]
        middle = (entry.start + entry.stop) // 2
        start = max(entry.start, middle - SAMPLE_BYTES // 2)
        digest.update(os.pread(descriptor, min(SAMPLE_BYTES, entry.stop - start), start))
    return digest.hexdigest()


def _weight_map(files: ModelFiles) -> dict[str, str]:
    """Return key -> file as the index says; empty for a checkpoint of a single file."""
    # A single file goes before an index, the order in which transformers looks.
    if SINGLE_FILE in files.sizes:
        return {}
    if INDEX_FILE not in files.sizes:
        raise VerifierError(_no_weights(files))
    place = f"{files.directory}/{INDEX_FILE}"
    weight_map = read_json_object(files, INDEX_FILE).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise VerifierError(f"{place} has no weight_map; fetch it again")
    outside = [name for name in weight_map.values() if Path(str(name)).name != name]
    if outside:
        raise VerifierError(f"{place} names {outside[0]!r}, which is no file of its directory")
    return weight_map


def _file_names(files: ModelFiles, weight_map: dict[str, str]) -> list[str]:
    names = sorted(set(weight_map.values())) or [SINGLE_FILE]
    missing = [name for name in names if name not in files.sizes]
    if missing:
        raise VerifierError(
            f"{files.directory}/{INDEX_FILE} names {len(names)} weight files, {len(missing)} of them "
            f"are not there (first: {missing[0]}); fetch the checkpoint again"
        )
    return names


def _read_header(files: ModelFiles, name: str) -> WeightFile:
    place, file_bytes = f"{files.directory}/{name}", files.sizes[name]
    prefix = files.read(name, 0, HEADER_LENGTH_BYTES)
    if prefix == LFS_POINTER:
        raise VerifierError(f"{place} is a git-lfs pointer, not the file: run `git lfs pull` there")
    if len(prefix) < HEADER_LENGTH_BYTES:
        raise _truncated(place, file_bytes, HEADER_LENGTH_BYTES)
    header_bytes = struct.unpack("<Q", prefix)[0]
    if header_bytes > MAX_HEADER_BYTES:
        raise _no_header(place, f"its first 8 bytes give the length {header_bytes:,}")
    data_start = HEADER_LENGTH_BYTES + header_bytes
    if data_start > file_bytes:
        raise _truncated(place, file_bytes, data_start)
    raw = files.read(name, HEADER_LENGTH_BYTES, data_start)
    try:
        header = json.loads(raw)
        entries = {
            key: _entry(name, value, data_start)
            for key, value in header.items()
            if key != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise _no_header(place, repr(error)) from error
    for (key, entry), (other, behind) in pairwise(
        sorted(entries.items(), key=lambda item: (item[1].start, item[1].stop))
    ):
        if behind.start < entry.stop:
            raise _no_header(place, f"{key} and {other} share bytes")
    wanted_bytes = max((entry.stop for entry in entries.values()), default=data_start)
    if wanted_bytes > file_bytes:
        raise _truncated(place, file_bytes, wanted_bytes)
    return WeightFile(name, file_bytes, hashlib.sha256(raw).hexdigest(), entries)


def _entry(name: str, value: dict[str, Any], data_start: int) -> TensorEntry:
    start, stop = value["data_offsets"]
    if not 0 <= start <= stop:
        raise ValueError(f"data_offsets {start}, {stop} of a {value['dtype']}")
    shape = tuple(int(extent) for extent in value["shape"])
    return TensorEntry(name, str(value["dtype"]), shape, data_start + start, data_start + stop)


def _truncated(place: str, file_bytes: int, wanted_bytes: int) -> VerifierError:
    return VerifierError(
        f"{place} is cut off: it has {file_bytes} bytes, its header needs {wanted_bytes}; "
        "fetch it again"
    )


def _no_header(place: str, why: str) -> VerifierError:
    return VerifierError(
        f"{place} has no readable safetensors header ({why}); it is another kind of file or damaged: "
        "fetch it again"
    )


def _no_weights(files: ModelFiles) -> str:
    others = sorted(n for n in files.sizes if Path(n).suffix in (".bin", ".pt", ".pth", ".gguf"))
    if not others:
        others = sorted(name for name in files.sizes if name.endswith(".safetensors"))
    found = f"; it has {', '.join(others[:3])}, which is not read: convert it" if others else ""
    return f"{files.directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{found}"
