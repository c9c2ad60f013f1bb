"""Reads GGUF files: metadata, and tensors without their quantization.

A file is: magic, version, counts, key-value metadata, tensor infos, then aligned tensor data, all
little-endian (the format's specification: ggml's docs/gguf.md). gguf's own reader makes a numpy view
of every one of a vocabulary's strings, which takes seconds for what takes a tenth of one here;
dequantization is gguf's.
"""

import mmap
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from gguf.quants import dequantize

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
STRING, ARRAY = 8, 9
# metadata value types: number -> struct format
SCALARS = {
    0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d",
}  # fmt: skip


class GgufError(ValueError):
    """A GGUF file that cannot be used; the message says why."""


@dataclass(frozen=True)
class GgufTensor:
    """One stored tensor: outermost dimension first, bytes [start, stop) of the file."""

    quantization: GGMLQuantizationType
    shape: tuple[int, ...]
    start: int
    stop: int


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensor places of a GGUF file."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    def read(self, name: str) -> np.ndarray[Any, np.dtype[np.float32]]:
        """Return a tensor in fp32, dequantized."""
        tensor = self.tensors[name]
        count = tensor.stop - tensor.start
        raw = np.fromfile(self.path, dtype=np.uint8, count=count, offset=tensor.start)
        rows = raw.reshape(*tensor.shape[:-1], -1)  # bytes of the innermost dimension last
        return np.ascontiguousarray(dequantize(rows, tensor.quantization), dtype=np.float32)


def read_gguf(path: Path) -> GgufFile:
    """Read metadata and tensor places; GgufError when the file is no GGUF of version 2 or 3, or cut off."""
    with path.open("rb") as file:
        if file.read(len(MAGIC)) != MAGIC:
            raise GgufError(f"{path} is no GGUF file")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            cursor = _Cursor(content)
            try:
                metadata, tensors = _read_head(cursor, path)
            except (struct.error, IndexError, UnicodeDecodeError) as error:
                raise GgufError(f"{path} is cut off or damaged in its header ({error})") from error
    needed = max((tensor.stop for tensor in tensors.values()), default=0)
    if needed > path.stat().st_size:
        raise GgufError(
            f"{path} is cut off: it has {path.stat().st_size} bytes, its header needs {needed}"
        )
    return GgufFile(path, metadata, tensors)


class _Cursor:
    """A place in the file that moves on with every value read."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content, self.place = content, len(MAGIC)

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from("<" + form, self._content, self.place)
        self.place += struct.calcsize("<" + form)
        return value

    def string(self) -> str:
        length = self.scalar("Q")
        raw = self._content[self.place : self.place + length]
        if len(raw) < length:
            raise IndexError("a string ends behind the file")
        self.place += length
        return raw.decode()

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.string()
        if kind == ARRAY:
            item_kind, count = self.scalar("I"), self.scalar("Q")
            if item_kind in SCALARS:
                form = f"<{count}{SCALARS[item_kind]}"
                items = struct.unpack_from(form, self._content, self.place)
                self.place += struct.calcsize(form)
                return list(items)
            return [self.value(item_kind) for _ in range(count)]
        if kind not in SCALARS:
            raise IndexError(f"there is no metadata type {kind}")
        return self.scalar(SCALARS[kind])


def _read_head(cursor: _Cursor, path: Path) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    version = cursor.scalar("I")
    if version not in (2, 3):
        raise GgufError(f"{path} is GGUF version {version}; versions 2 and 3 are supported")
    tensor_count, metadata_count = cursor.scalar("Q"), cursor.scalar("Q")
    metadata = {}
    for _ in range(metadata_count):
        key = cursor.string()
        metadata[key] = cursor.value(cursor.scalar("I"))
    infos = []
    for _ in range(tensor_count):
        name = cursor.string()
        # ggml counts dimensions from the innermost
        shape = tuple(cursor.scalar("Q") for _ in range(cursor.scalar("I")))[::-1]
        infos.append((name, shape, cursor.scalar("I"), cursor.scalar("Q")))
    alignment = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    data_start = -(-cursor.place // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in infos:
        quantization = _quantization(kind, name, path)
        block, block_bytes = GGML_QUANT_SIZES[quantization]
        size = int(np.prod(shape, dtype=np.int64)) // block * block_bytes
        start = data_start + offset
        tensors[name] = GgufTensor(quantization, shape, start, start + size)
    return metadata, tensors


def _quantization(kind: int, name: str, path: Path) -> GGMLQuantizationType:
    try:
        return GGMLQuantizationType(kind)
    except ValueError as error:
        raise GgufError(
            f"{path}: tensor {name} has quantization type {kind}, unknown to the installed gguf; update it"
        ) from error
