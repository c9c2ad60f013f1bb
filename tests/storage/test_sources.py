import gzip
import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from storage.sources import SourceError, expand_sources, fingerprint_source, read_records
from storage.store import Store

LINES = b'{"prompt": "a"}\n\n{"prompt": "\xc3\xbc"}\n'
RECORDS = [(1, {"prompt": "a"}), (3, {"prompt": "ü"})]


def test_json_lines_are_read_with_their_numbers_plain_zipped_and_remote(
    store: Store, tmp_path: Path
) -> None:
    for name, content in (("x.jsonl", LINES), ("x.jsonl.gz", gzip.compress(LINES))):
        store.write_bytes(name, content)
        assert list(read_records(f"{store.url}/{name}")) == RECORDS


def test_json_lists_data_objects_lines_and_parquet_give_the_same_records(tmp_path: Path) -> None:
    items = [{"prompt": "a", "n": 1}, {"prompt": "b", "n": 2}]
    (tmp_path / "list.json").write_text(json.dumps(items, indent=2))
    (tmp_path / "data.json").write_text(json.dumps({"version": 1, "data": items}))
    (tmp_path / "lines.json").write_text("".join(json.dumps(item) + "\n" for item in items))
    (tmp_path / "bom.jsonl").write_text("\ufeff" + "\n".join(map(json.dumps, items)))
    pq.write_table(pa.Table.from_pylist(items), tmp_path / "table.parquet")
    for path in tmp_path.iterdir():
        assert list(read_records(str(path))) == [(1, items[0]), (2, items[1])], path.name


@pytest.mark.parametrize("name", ["x.jsonl", "x.json", "x.parquet"])
def test_an_empty_file_has_no_records(tmp_path: Path, name: str) -> None:
    (tmp_path / name).write_bytes(b"")
    assert list(read_records(str(tmp_path / name))) == []


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x.jsonl", b'{"a": 1}\n{"a": \n', r"x\.jsonl line 2: not JSON"),
        ("x.jsonl", b'{"a": 1}\n[1]\n', r"x\.jsonl line 2: a record is a JSON object, not a list"),
        ("x.jsonl", b'{"a": "\xff"}\n', r"x\.jsonl line 1: not JSON"),
        ("x.jsonl.gz", gzip.compress(LINES * 1000)[:-20], r"x\.jsonl\.gz breaks off"),
        ("x.jsonl.gz", LINES, r"x\.jsonl\.gz breaks off after line 0"),
        ("x.json", b'[{"a": 1}, 2]', r"x\.json item 2: a record is a JSON object, not a int"),
        ("x.json", b'{"a": 1}', r"x\.json: a \.json file holds a list"),
        ("x.json", b'[{"a": 1}', r"x\.json: not JSON"),
        ("x.parquet", b"PAR1 and no more", r"x\.parquet is no complete Parquet file"),
    ],
)
def test_what_is_no_record_is_named_with_file_and_place(
    tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(SourceError, match=message):
        list(read_records(str(tmp_path / name)))


def test_paths_directories_and_wildcards_become_files_each_once(store: Store) -> None:
    for name in ("in/b.jsonl", "in/a.jsonl", "in/c.txt", "in/sub/d.jsonl", "e.parquet"):
        store.write_bytes(name, b"")
    url = store.url
    assert expand_sources([f"{url}/in"]) == [f"{url}/in/a.jsonl", f"{url}/in/b.jsonl"]
    assert expand_sources([f"{url}/in/[ab].jsonl", f"{url}/in/a.jsonl", f"{url}/e.parquet"]) == [
        f"{url}/e.parquet",
        f"{url}/in/a.jsonl",
        f"{url}/in/b.jsonl",
    ]
    assert expand_sources([f"{url}/**/*.jsonl"])[-1] == f"{url}/in/sub/d.jsonl"


def test_a_file_whose_name_looks_like_a_wildcard_is_that_file(tmp_path: Path) -> None:
    path = tmp_path / "chats[1].jsonl"
    path.write_bytes(LINES)
    assert expand_sources([str(path)]) == [str(path)]


def test_sources_that_mean_nothing_are_refused_by_name(store: Store) -> None:
    store.write_bytes("in/c.txt", b"")
    for path, message in (
        ("none.jsonl", r"none\.jsonl: there is no such file"),
        ("in/*.jsonl", r"in/\*\.jsonl: no file matches"),
        ("in", r"/in: the directory holds no file that ends in \.jsonl"),
        ("in/c.txt", r"in/c\.txt does not end in one of"),
    ):
        with pytest.raises(ValueError, match=message):
            expand_sources([f"{store.url}/{path}"])


def test_a_fingerprint_changes_with_the_content_and_only_with_it(store: Store) -> None:
    url = f"{store.url}/x.jsonl"
    store.write_bytes("x.jsonl", b"one")
    first = fingerprint_source(url)
    assert fingerprint_source(url) == first
    store.write_bytes("x.jsonl", b"two")
    assert fingerprint_source(url) != first
    with pytest.raises(ValueError, match=r"none\.jsonl does not exist"):
        fingerprint_source(f"{store.url}/none.jsonl")


def test_a_touched_local_file_keeps_its_fingerprint(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_bytes(b"one")
    first = fingerprint_source(str(path))
    os.utime(path, (1, 1))
    assert fingerprint_source(str(path)) == first
