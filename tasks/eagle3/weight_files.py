"""The weight files of a checkpoint, known by their headers alone: names, shapes, places, digests.

A safetensors file is 8 bytes (little-endian header length), a JSON header, then the tensors' bytes.
Everything here reads headers and a few kilobytes of each file, whatever its size.
"""

import hashlib
import json
import os
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

SINGLE_FILE = "model.safetensors"
INDEX_FILE = "model.safetensors.index.json"
HEADER_LENGTH_BYTES = 8
SAMPLED_TENSORS_PER_FILE = 256
WHOLE_FILE_BYTES = 1 << 30
SAMPLE_BYTES = 4096


class VerifierError(ValueError):
    """A verifier that cannot be used as it is; the message says why and what to do."""


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


def read_weight_files(directory: Path) -> tuple[WeightFile, ...]:
    """Return the headers of all weight files of a checkpoint, sorted by name.

    Raises VerifierError when there are none, when the index names what is not there, and when a file
    is short.
    """
    # A single file goes before an index, the order in which transformers looks.
    if (directory / SINGLE_FILE).is_file():
        return (_read_header(directory, SINGLE_FILE),)
    if not (directory / INDEX_FILE).is_file():
        raise VerifierError(_no_weights(directory))
    weight_map = _read_weight_map(directory / INDEX_FILE)
    names = sorted(set(weight_map.values()))
    missing = [name for name in names if not (directory / name).is_file()]
    if missing:
        raise VerifierError(
            f"{directory / INDEX_FILE} names {len(names)} weight files, {len(missing)} of them are "
            f"not there (first: {missing[0]}); fetch the checkpoint again"
        )
    files = {name: _read_header(directory, name) for name in names}
    for key, name in weight_map.items():
        if key not in files[name].tensors:
            raise VerifierError(
                f"{directory / INDEX_FILE} says that {key} lies in {name}, which holds no such "
                "tensor; index and files are of different checkpoints: fetch it again"
            )
    return tuple(files.values())


def content_sample_digest(directory: Path, weights: WeightFile) -> str:
    """Digest a file's content, or of a large file a sample: fine-tunes of one model share sizes and headers.

    Up to WHOLE_FILE_BYTES every byte counts. Of a larger file it takes SAMPLE_BYTES from the middle of
    SAMPLED_TENSORS_PER_FILE tensors at most, evenly spread over the file.
    """
    if (directory / weights.name).stat().st_size <= WHOLE_FILE_BYTES:
        with (directory / weights.name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()
    entries = sorted(weights.tensors.values(), key=lambda entry: entry.start)
    count = min(len(entries), SAMPLED_TENSORS_PER_FILE)
    digest = hashlib.sha256()
    with (directory / weights.name).open("rb") as file:
        for place in range(count):
            entry = entries[place * len(entries) // count]
            middle = (entry.start + entry.stop) // 2
            start = max(entry.start, middle - SAMPLE_BYTES // 2)
            sample = os.pread(file.fileno(), min(SAMPLE_BYTES, entry.stop - start), start)
            digest.update(sample)
    return digest.hexdigest()


def read_json_object(path: Path) -> dict[str, Any]:
    """Return the JSON object in `path`; VerifierError names the file when it holds none."""
    try:
        value = json.loads(path.read_bytes())
    except (ValueError, OSError) as error:
        raise VerifierError(f"{path} is not readable JSON ({error}); fetch it again") from error
    if not isinstance(value, dict):
        raise VerifierError(f"{path} holds a JSON {type(value).__name__}, not an object")
    return value


def _read_weight_map(index: Path) -> dict[str, str]:
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise VerifierError(f"{index} has no weight_map; fetch it again")
    outside = [name for name in weight_map.values() if Path(str(name)).name != name]
    if outside:
        raise VerifierError(f"{index} names {outside[0]!r}, which is no file of its directory")
    return weight_map


def _read_header(directory: Path, name: str) -> WeightFile:
    path = directory / name
    file_bytes = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(HEADER_LENGTH_BYTES)
        header_bytes = struct.unpack("<Q", prefix)[0] if len(prefix) == HEADER_LENGTH_BYTES else -1
        data_start = HEADER_LENGTH_BYTES + header_bytes
        if header_bytes < 0 or data_start > file_bytes:
            raise _truncated(path, file_bytes, max(data_start, HEADER_LENGTH_BYTES))
        raw = file.read(header_bytes)
    try:
        header = json.loads(raw)
        entries = {
            key: _entry(name, value, data_start)
            for key, value in header.items()
            if key != "__metadata__"
        }
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise VerifierError(f"{path} has no readable safetensors header ({error!r})") from error
    wanted_bytes = max((entry.stop for entry in entries.values()), default=data_start)
    if wanted_bytes > file_bytes:
        raise _truncated(path, file_bytes, wanted_bytes)
    return WeightFile(name, file_bytes, hashlib.sha256(raw).hexdigest(), entries)


def _entry(name: str, value: dict[str, Any], data_start: int) -> TensorEntry:
    start, stop = value["data_offsets"]
    shape = tuple(int(extent) for extent in value["shape"])
    return TensorEntry(name, str(value["dtype"]), shape, data_start + start, data_start + stop)


def _truncated(path: Path, file_bytes: int, wanted_bytes: int) -> VerifierError:
    return VerifierError(
        f"{path} is cut off: it has {file_bytes} bytes, its header needs {wanted_bytes}; "
        "fetch it again"
    )


def _no_weights(directory: Path) -> str:
    others = sorted(
        path.name for path in directory.glob("*") if path.suffix in (".bin", ".pt", ".pth", ".gguf")
    )
    if not others:
        others = sorted(path.name for path in directory.glob("*.safetensors"))
    found = f"; it has {', '.join(others[:3])}, which is not read: convert it" if others else ""
    return f"{directory} has no weights: neither {SINGLE_FILE} nor {INDEX_FILE}{found}"
