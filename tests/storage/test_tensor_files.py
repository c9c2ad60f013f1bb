"""Safetensors files by several threads: the bytes of safetensors' own, what cannot be stored, a full disk."""

import errno
import os
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from storage import tensor_files
from storage.manifest import digest_file
from storage.tensor_files import write_tensors

DTYPES = (
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.float8_e4m3fn,
    torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8, torch.bool,
)  # fmt: skip


def some_tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(7, 5, generator=generator)
    tensors = {f"of {dtype}": (values * 3).to(dtype) for dtype in DTYPES}
    return tensors | {
        "a scalar": torch.tensor(2.5),
        "empty": torch.empty(0, 3),
        "über": torch.randn(1000, 3, generator=generator),
    }


@pytest.mark.parametrize("piece_bytes", [64, 1 << 20])
@pytest.mark.parametrize("metadata", [None, {"made by": 'us, "quoted"'}])
def test_the_file_has_the_bytes_of_safetensors_own(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    piece_bytes: int,
    metadata: dict[str, str] | None,
) -> None:
    monkeypatch.setattr(tensor_files, "PIECE_BYTES", piece_bytes)
    tensors = some_tensors()
    digest = write_tensors(tmp_path / "ours", tensors, metadata=metadata)
    save_file(tensors, tmp_path / "theirs", metadata=metadata)
    assert (tmp_path / "ours").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert digest == digest_file(tmp_path / "theirs")


def test_a_file_that_is_there_is_replaced_even_by_a_shorter_one(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(b"x" * 10_000)
    write_tensors(path, {"w": torch.ones(3)})
    assert torch.equal(load_file(path)["w"], torch.ones(3))


def test_tensors_may_share_memory(tmp_path: Path) -> None:
    tied = torch.arange(6.0)
    write_tensors(tmp_path / "file", {"a": tied, "b": tied, "c": tied[2:4]})
    loaded = load_file(tmp_path / "file")
    assert torch.equal(loaded["b"], tied)
    assert torch.equal(loaded["c"], tied[2:4])


def test_a_dtype_that_is_not_stored_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"w is of torch.complex64; stored are bool"):
        write_tensors(tmp_path / "file", {"w": torch.ones(3, dtype=torch.complex64)})


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_what_a_thread_cannot_write_is_the_callers_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    full = os.open("/dev/full", os.O_WRONLY)
    plain = os.pwrite
    monkeypatch.setattr(os, "pwrite", lambda _, content, place: plain(full, content, place))
    with pytest.raises(OSError, match="No space left") as caught:
        write_tensors(tmp_path / "file", {"w": torch.ones(3)})
    os.close(full)
    assert caught.value.errno == errno.ENOSPC
