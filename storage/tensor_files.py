"""Safetensors files written by several threads: one alone is slower than the disk of a GPU machine.

The format: https://github.com/huggingface/safetensors (8 bytes with the header's length, the header as JSON, the bytes
of the tensors). The bytes are those that safetensors' own `save_file` writes.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor, wait
from pathlib import Path
from typing import TYPE_CHECKING, Any

import xxhash

if TYPE_CHECKING:  # torch takes seconds to import and most readers of a store need none
    import torch

WRITERS = 8
PIECE_BYTES = 32 << 20
"""Of a tensor that one thread writes at a time."""
FLUSH_SECONDS = 0.2
HEADER_ALIGNMENT = 8

_DTYPES = {
    "bool": "BOOL",
    "uint8": "U8",
    "int8": "I8",
    "float8_e4m3fn": "F8_E4M3",
    "int16": "I16",
    "float16": "F16",
    "bfloat16": "BF16",
    "int32": "I32",
    "float32": "F32",
    "float64": "F64",
    "int64": "I64",
}
"""torch's names and the format's, in the order in which tensors lie in a file, the last first."""
_RANKS = {dtype: rank for rank, dtype in enumerate(_DTYPES.values())}


class AbandonedError(Exception):
    """A file is not needed any more while it is written."""


def write_tensors(
    path: Path,
    tensors: Mapping[str, "torch.Tensor"],
    *,
    metadata: Mapping[str, str] | None = None,
    abandoned: Callable[[], bool] = lambda: False,
) -> str:
    """Write contiguous CPU tensors by name and return the file's digest (xxh3, 128 bits, hexadecimal).

    They may share memory. Most of a large file is on the disk when this returns.

    Raises:
        AbandonedError: `abandoned` has become true meanwhile; the file is not complete.
        OSError: the disk is full, or another thing of the system's.
        ValueError: a tensor's dtype is none that is stored here.
    """
    dtypes = {name: _dtype_name(name, tensor) for name, tensor in tensors.items()}
    ordered = sorted(tensors.items(), key=lambda item: (-_RANKS[dtypes[item[0]]], item[0]))
    header: dict[str, Any] = {"__metadata__": dict(metadata)} if metadata else {}
    place = 0
    for name, tensor in ordered:
        end = place + tensor.numel() * tensor.itemsize
        header[name] = {
            "dtype": dtypes[name],
            "shape": list(tensor.shape),
            "data_offsets": [place, end],
        }
        place = end
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text = text.ljust(-(-len(text) // HEADER_ALIGNMENT) * HEADER_ALIGNMENT)
    start = len(text).to_bytes(8, "little") + text
    with path.open("wb", buffering=0) as file, ThreadPoolExecutor(WRITERS) as pool:
        file.write(start)
        file.truncate(len(start) + place)
        pieces = list(_pieces(ordered))
        waiting = {
            pool.submit(_write, file.fileno(), piece, len(start) + offset)
            for offset, piece in pieces
        }
        try:
            digest = xxhash.xxh3_128(start)
            for _, piece in pieces:
                _go_on(abandoned)
                digest.update(piece)
            while waiting:
                done, waiting = wait(waiting, timeout=FLUSH_SECONDS)
                _go_on(abandoned)
                for written in done:
                    written.result()
                if waiting:
                    os.fsync(file.fileno())  # the disk takes what is there while the rest is copied
        finally:
            pool.shutdown(cancel_futures=True)
    return digest.hexdigest()


def _pieces(ordered: list[tuple[str, "torch.Tensor"]]) -> Iterator[tuple[int, memoryview]]:
    """Offsets and bytes of the tensors, one after the other."""
    import torch  # noqa: PLC0415 - see above

    offset = 0
    for _, tensor in ordered:
        content = tensor.reshape(-1).view(torch.uint8).numpy().data
        for start in range(0, len(content), PIECE_BYTES):
            yield offset + start, content[start : start + PIECE_BYTES]
        offset += len(content)


def _go_on(abandoned: Callable[[], bool]) -> None:
    if abandoned():
        raise AbandonedError


def _write(descriptor: int, content: memoryview, offset: int) -> None:
    while content:
        written = os.pwrite(descriptor, content, offset)
        content, offset = content[written:], offset + written


def _dtype_name(name: str, tensor: "torch.Tensor") -> str:
    try:
        return _DTYPES[str(tensor.dtype).removeprefix("torch.")]
    except KeyError as error:
        raise ValueError(f"{name} is of {tensor.dtype}; stored are {', '.join(_DTYPES)}") from error
