import hashlib
from pathlib import Path
from typing import Any

import pytest
import xxhash
from pydantic import BaseModel, ValidationError

from storage.manifest import (
    FileEntry,
    Manifest,
    artifact_key,
    canonical_json,
    content_digest,
    digest_bytes,
    digest_file,
    library_versions,
)


class Model(BaseModel):
    lr: float = 1e-4


def manifest_fields() -> dict[str, Any]:
    files = {"a.bin": FileEntry(path="attempt/a.bin", bytes=3, xxh3="0" * 32)}
    return {
        "path": "stage/key",
        "stage": "stage",
        "version": 1,
        "key": artifact_key(stage="stage", version=1, settings={"lr": 0.1}, inputs={}),
        "content": content_digest(stage="stage", version=1, files=files, rows=2),
        "settings": {"lr": 0.1},
        "inputs": {},
        "files": files,
        "rows": 2,
        "facts": {},
        "versions": {},
        "git_commit": None,
        "started_at": "2026-01-01T00:00:00+00:00",
        "seconds": 1.5,
    }


def test_canonical_json_does_not_depend_on_order_or_spelling() -> None:
    assert canonical_json({"b": [1, 2.5, None], "a": "ü"}) == '{"a":"\\u00fc","b":[1,2.5,null]}'
    assert canonical_json({"x": (1, 2)}) == canonical_json({"x": [1, 2]})


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ({"train": {"lr": float("nan")}}, r"settings\.train\.lr is nan"),
        ({"rates": [1.0, float("inf")]}, r"settings\.rates\[1\] is inf"),
        ({1: "a"}, "settings has the key 1"),
        ({"path": Path("a")}, r"settings\.path is a PosixPath"),
        ({"model": Model()}, r"settings\.model is a Model.*model_dump"),
        ({"ids": {1, 2}}, r"settings\.ids is a set"),
    ],
)
def test_what_json_cannot_hold_is_refused_by_name(value: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        canonical_json(value, name="settings")


def test_the_key_is_a_digest_of_all_that_determines_the_artifact() -> None:
    text = '["train",2,{"lr":0.1},{"states":"abc"}]'
    expected = hashlib.sha256(text.encode()).hexdigest()[:24]
    parts: dict[str, Any] = {
        "stage": "train", "version": 2, "settings": {"lr": 0.1}, "inputs": {"states": "abc"},
    }  # fmt: skip
    assert artifact_key(**parts) == expected
    for change in (
        {"stage": "t"}, {"version": 3}, {"settings": {"lr": 0.2}}, {"inputs": {"states": "abd"}},
    ):  # fmt: skip
        assert artifact_key(**{**parts, **change}) != expected


def test_files_are_digested_in_pieces_to_the_same_digest(tmp_path: Path) -> None:
    content = bytes(range(251)) * 40_000  # more than two pieces
    (tmp_path / "f").write_bytes(content)
    expected = xxhash.xxh3_128(content).hexdigest()
    assert digest_file(tmp_path / "f") == digest_bytes(content) == expected
    (tmp_path / "empty").write_bytes(b"")
    assert digest_file(tmp_path / "empty") == digest_bytes(b"")


def test_content_depends_on_data_and_not_on_where_it_lies() -> None:
    def content(path: str, digest: str, rows: int = 2) -> str:
        entry = FileEntry(path=path, bytes=3, xxh3=digest * 32)
        return content_digest(stage="s", version=1, files={"a": entry}, rows=rows)

    assert content("attempt-1/a", "0") == content("attempt-2/a", "0")
    assert content("attempt-1/a", "0") != content("attempt-1/a", "1")
    assert content("attempt-1/a", "0") != content("attempt-1/a", "0", rows=3)


def test_a_manifest_survives_json_and_refuses_what_does_not_follow() -> None:
    fields = manifest_fields()
    manifest = Manifest.model_validate(fields)
    assert Manifest.model_validate_json(manifest.model_dump_json()) == manifest
    assert manifest.total_bytes == 3
    for change in (
        {"rows": 3},
        {"settings": {"lr": 0.2}},
        {"surprise": 1},
        {"files": {"a.bin": FileEntry(path="attempt/a.bin", bytes=4, xxh3="0" * 32)}},
        {"files": {"a.bin": {"path": "../a.bin", "bytes": 3, "xxh3": "0" * 32}}},
    ):
        with pytest.raises(ValidationError):
            Manifest.model_validate({**fields, **change})


def test_a_flipped_bit_anywhere_in_a_manifests_file_is_found() -> None:
    manifest = Manifest.model_validate(
        {**manifest_fields(), "facts": {"error": 1e-7, "shown": "ü"}}
    )
    text = manifest.to_text()
    assert Manifest.from_text(text, path="stage/key") == manifest
    assert Manifest.from_text(text, path="moved/key").path == "moved/key"
    for place in range(8 * len(text)):
        flipped = bytearray(text)
        flipped[place // 8] ^= 1 << place % 8
        with pytest.raises(ValueError):  # noqa: PT011 - no JSON, no manifest, or not as it was written
            Manifest.from_text(bytes(flipped), path="stage/key")


def test_a_manifest_from_before_there_were_digests_is_read() -> None:
    manifest = Manifest.model_validate(manifest_fields())
    text = manifest.model_dump_json().encode()
    assert Manifest.from_text(text, path="stage/key") == manifest


def test_versions_name_the_libraries_that_are_there() -> None:
    assert {"python", "torch", "pyarrow"} <= set(library_versions())
