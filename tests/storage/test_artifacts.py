import json
import logging
import signal
import subprocess
import sys
import threading
from contextvars import ContextVar
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from storage import artifacts
from storage.artifacts import ArtifactError, Identity
from storage.layout import MANIFEST_NAME
from storage.manifest import Manifest
from storage.store import Store, StoreError

IDENTITY = Identity(
    stage="samples", version=1, settings={"max_tokens": 8}, inputs={"conversations": "c0"}
)


def make(store: Store, identity: Identity = IDENTITY, content: bytes = b"table") -> Manifest:
    with artifacts.write(store, identity) as writer:
        writer.add_bytes("samples.parquet", content)
        writer.add_bytes("model/config.json", b"{}")
        return writer.publish(rows=5, facts={"dropped": 0})


def test_an_artifact_is_found_once_its_manifest_is_there_and_not_before(store: Store) -> None:
    assert artifacts.find(store, IDENTITY) is None
    with artifacts.write(store, IDENTITY) as writer:
        with writer.file("samples.parquet") as path:
            path.write_bytes(b"table")
        assert artifacts.find(store, IDENTITY) is None
        made = writer.publish(rows=5, facts={"dropped": 0, "lengths": (1, 2)})
    found = artifacts.find(store, IDENTITY)
    assert found == made == artifacts.require(store, IDENTITY.path)
    assert (found.rows, found.key, found.path) == (5, IDENTITY.key, f"samples/{IDENTITY.key}")
    assert found.facts == {"dropped": 0, "lengths": [1, 2]}
    assert found.inputs == {"conversations": "c0"}
    assert found.seconds >= 0
    with artifacts.open_file(store, found, "samples.parquet") as path:
        assert path.read_bytes() == b"table"


def test_a_file_that_tells_of_the_making_is_no_part_of_the_content(store: Store) -> None:
    def write(seconds: bytes, *, in_content: bool) -> Manifest:
        with artifacts.write(store, IDENTITY) as writer:
            writer.add_bytes("draft.safetensors", b"weights")
            with writer.file("metrics.parquet", in_content=in_content) as path:
                path.write_bytes(seconds)
            return writer.publish(rows=5)

    first, second = write(b"1.0", in_content=False), write(b"2.0", in_content=False)
    assert first.content == second.content
    assert artifacts.require(store, IDENTITY.path) == second
    store.write_bytes(f"{second.path}/{second.files['metrics.parquet'].path}", b"3.0")
    assert artifacts.verify(store, second, deep=True)  # it is watched over like any other file
    assert write(b"1.0", in_content=True).content != write(b"2.0", in_content=True).content


def test_any_other_setting_input_or_version_is_another_artifact(store: Store) -> None:
    make(store)
    for other in (
        replace(IDENTITY, version=2),
        replace(IDENTITY, settings={"max_tokens": 9}),
        replace(IDENTITY, inputs={"conversations": "c1"}),
    ):
        assert artifacts.find(store, other) is None
    assert artifacts.find(store, IDENTITY) is not None


def test_a_fixed_directory_with_another_identity_is_a_miss_and_left_alone(store: Store) -> None:
    mine = replace(IDENTITY, directory="fixed/place")
    other = replace(mine, version=2)
    made = make(store, mine)
    assert artifacts.find(store, other) is None
    assert artifacts.find(store, mine) == made
    make(store, other)
    assert artifacts.find(store, mine) is None
    assert artifacts.find(store, other) is not None


def test_a_block_that_raises_or_does_not_publish_leaves_no_file(store: Store) -> None:
    with pytest.raises(KeyError), artifacts.write(store, IDENTITY) as writer:  # noqa: PT012
        writer.add_bytes("samples.parquet", b"table")
        raise KeyError
    with artifacts.write(store, IDENTITY) as writer:
        writer.add_bytes("samples.parquet", b"table")
    assert store.sizes("") == {}
    assert artifacts.find(store, IDENTITY) is None


@pytest.mark.parametrize("damage", ["removed", "truncated", "manifest cut", "manifest edited"])
def test_a_damaged_artifact_is_set_aside_with_a_warning_and_rebuilt(
    store: Store, caplog: pytest.LogCaptureFixture, damage: str
) -> None:
    made = make(store)
    other = make(store, replace(IDENTITY, version=2))
    file, manifest = made.files["samples.parquet"].path, f"{made.path}/{MANIFEST_NAME}"
    if damage == "removed":
        store.delete(f"{made.path}/{file}")
    elif damage == "truncated":
        store.write_bytes(f"{made.path}/{file}", b"tabl")
    elif damage == "manifest cut":
        store.write_bytes(manifest, store.read_bytes(manifest)[:-20])
    else:
        store.write_json(manifest, {**store.read_json(manifest), "rows": 6})
    with caplog.at_level(logging.WARNING):
        assert artifacts.find(store, IDENTITY) is None
    expected = {
        "removed": "samples.parquet is missing",
        "truncated": "samples.parquet has 4 bytes, its manifest says 5",
        "manifest cut": "manifest is unreadable",
        "manifest edited": "manifest is unreadable",
    }
    assert expected[damage] in caplog.text
    assert made.path in caplog.text
    assert [name.startswith("set-aside-") for name in store.files(made.path)] == [True]
    with pytest.raises(ArtifactError, match="no complete artifact"):
        artifacts.require(store, made.path)
    rebuilt = make(store)
    assert artifacts.find(store, IDENTITY) == rebuilt
    assert rebuilt.content == made.content
    assert artifacts.find(store, replace(IDENTITY, version=2)) == other


def test_an_artifact_repaired_by_another_run_meanwhile_is_not_set_aside(store: Store) -> None:
    made = make(store)
    artifacts._set_aside(store, made.path, text=b"as it was before", problems=["x is missing"])
    assert artifacts.find(store, IDENTITY) == made


def test_peeking_looks_at_no_file_and_sets_nothing_aside(store: Store) -> None:
    made = make(store)
    store.delete(f"{made.path}/{made.files['samples.parquet'].path}")
    assert artifacts.peek(store, made.path) == made
    assert store.files(made.path) == [MANIFEST_NAME]
    attempt = made.files["samples.parquet"].path.split("/")[0]
    assert artifacts.location(store, made) == f"{store.url}/{made.path}/{attempt}"
    with pytest.raises(ArtifactError, match="samples/none has no readable manifest"):
        artifacts.peek(store, "samples/none")


def test_equal_data_has_equal_content_and_other_data_has_not(store: Store) -> None:
    first, again, changed = make(store), make(store), make(store, content=b"tablE")
    assert first.content == again.content != changed.content
    assert first.key == changed.key
    assert first.files["samples.parquet"].path != again.files["samples.parquet"].path


def test_two_writers_at_once_leave_one_complete_artifact(store: Store) -> None:
    barrier = threading.Barrier(2)
    made: list[Manifest] = []

    def run(content: bytes) -> None:
        with artifacts.write(store, IDENTITY) as writer:
            barrier.wait()
            with writer.file("samples.parquet") as path:
                path.write_bytes(content)
            barrier.wait()
            made.append(writer.publish(rows=1))

    threads = [threading.Thread(target=run, args=(c,)) for c in (b"one", b"twotwo")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    found = artifacts.find(store, IDENTITY)
    assert found is not None
    assert found in made
    assert len(made) == 2
    for manifest in made:  # who has read the first manifest still finds its files
        assert artifacts.verify(store, manifest, deep=True) == []


def test_one_flipped_bit_is_found_by_a_deep_check_only(store: Store) -> None:
    made = make(store, content=b"A" * 1000)
    assert artifacts.verify(store, made, deep=True) == []
    damaged = bytearray(b"A" * 1000)
    damaged[777] ^= 1
    store.write_bytes(f"{made.path}/{made.files['samples.parquet'].path}", bytes(damaged))
    assert artifacts.verify(store, made, deep=False) == []
    (problem,) = artifacts.verify(store, made, deep=True)
    assert problem.startswith("samples.parquet has the digest")
    store.delete(f"{made.path}/{made.files['model/config.json'].path}")
    assert "model/config.json is missing" in artifacts.verify(store, made, deep=False)


def test_a_directory_of_files_is_stored_and_opened_under_its_names(store: Store) -> None:
    with artifacts.write(store, IDENTITY) as writer:
        with writer.directory() as folder:
            (folder / "config.json").write_text("{}")
            (folder / "assets").mkdir()
            (folder / "assets" / "a.txt").write_text("a")
        with writer.directory("extra") as folder:
            (folder / "b.txt").write_text("b")
        made = writer.publish(rows=0)
    assert sorted(made.files) == ["assets/a.txt", "config.json", "extra/b.txt"]
    with artifacts.open_directory(store, made) as folder:
        assert (folder / "assets" / "a.txt").read_text() == "a"
        assert (folder / "extra" / "b.txt").read_text() == "b"
    local = artifacts.local_directory(store, made)
    assert (local is not None) == store.is_local
    if local is not None:
        assert sorted(path.name for path in local.iterdir()) == ["assets", "config.json", "extra"]


def test_listing_returns_complete_artifacts_and_leaves_out_the_rest(store: Store) -> None:
    shards = [
        replace(IDENTITY, directory=f"states/c/{name}", settings={"n": name}) for name in "abcd"
    ]
    made = [make(store, shard) for shard in shards]
    make(store, replace(IDENTITY, directory="states/other/a"))
    store.delete(f"{made[1].path}/{made[1].files['samples.parquet'].path}")
    store.delete(f"{made[2].path}/{MANIFEST_NAME}")
    assert artifacts.list_manifests(store, "states/c") == [made[0], made[3]]
    assert artifacts.list_manifests(store, "states/none") == []
    assert artifacts.find_all(store, shards) == [made[0], None, None, made[3]]


def test_a_moved_store_knows_where_its_artifacts_are_now(tmp_path: Path) -> None:
    made = make(Store(str(tmp_path / "old")))
    (tmp_path / "old" / "samples").rename(tmp_path / "old" / "renamed")
    store = Store(str(tmp_path / "old"))
    (found,) = artifacts.list_manifests(store, "renamed")
    assert found.path == f"renamed/{made.key}"
    with artifacts.open_file(store, found, "samples.parquet") as path:
        assert path.read_bytes() == b"table"


def test_old_attempts_of_killed_runs_go_with_the_next_publication(store: Store) -> None:
    def leave(age: timedelta) -> str:
        moment = (datetime.now(UTC) - age).strftime("%Y%m%dT%H%M%S%f")
        name = f"attempt-{moment}-0123abcd"
        store.write_bytes(f"{IDENTITY.path}/{name}/samples.parquet", b"ta")
        return name

    old, young = leave(timedelta(hours=25)), leave(timedelta(hours=23))
    store.write_bytes(f"{IDENTITY.path}/steps/step-000000001/x", b"another's")
    made = make(store)
    attempt = made.files["samples.parquet"].path.split("/")[0]
    assert store.directories(IDENTITY.path) == sorted([young, attempt, "steps"])
    assert old not in store.directories(IDENTITY.path)


def test_an_old_attempt_that_the_manifest_refers_to_stays(store: Store) -> None:
    made = make(store)
    attempt = made.files["samples.parquet"].path.split("/")[0]
    old = "attempt-20200101T000000000000-0123abcd"
    for name in made.files:
        content = store.read_bytes(f"{made.path}/{attempt}/{name}")
        store.write_bytes(f"{made.path}/{old}/{name}", content)
    moved = Manifest.model_validate_json(made.model_dump_json().replace(attempt, old))
    store.write_bytes(f"{made.path}/{MANIFEST_NAME}", moved.to_text())
    assert artifacts.remove_garbage(store, made.path) == []
    assert artifacts.find(store, IDENTITY) is not None


def test_publishing_files_that_have_gone_is_refused(store: Store) -> None:
    with artifacts.write(store, IDENTITY) as writer:
        writer.add_bytes("samples.parquet", b"table")
        store.delete(writer.attempt_path)
        with pytest.raises(StoreError, match=r"samples\.parquet is missing"):
            writer.publish(rows=1)
    assert artifacts.find(store, IDENTITY) is None


def test_names_settings_and_facts_that_cannot_be_stored_are_refused() -> None:
    store = Store("memory://refused")
    with artifacts.write(store, IDENTITY) as writer:
        for name in ("../x", "a/b/c", ".hidden", "", "/x"):
            with pytest.raises(ValueError, match="cannot name a file"):
                writer.add_bytes(name, b"")
        writer.add_bytes("x", b"")
        with pytest.raises(ValueError, match="written before"):
            writer.add_bytes("x", b"")
        with pytest.raises(ValueError, match=r"facts\.loss is nan"):
            writer.publish(rows=1, facts={"loss": float("nan")})
    with pytest.raises(ValueError, match=r"settings\.lr is nan"):
        artifacts.find(store, replace(IDENTITY, settings={"lr": float("nan")}))
    assert store.sizes("") == {}


def test_a_file_that_is_not_in_the_artifact_or_has_gone_is_named(store: Store) -> None:
    made = make(store)
    with (
        pytest.raises(ArtifactError, match=r"no file 'nope'.*samples\.parquet"),
        artifacts.open_file(store, made, "nope"),
    ):
        pass
    artifacts.remove(store, made.path)
    with (
        pytest.raises(ArtifactError, match=r"samples\.parquet .*has gone"),
        artifacts.open_file(store, made, "samples.parquet"),
    ):
        pass
    assert artifacts.find(store, IDENTITY) is None
    assert store.sizes("") == {}


def test_a_process_killed_between_files_and_manifest_leaves_no_artifact(tmp_path: Path) -> None:
    code = """
import json, sys
from storage import artifacts
from storage.store import Store
identity = artifacts.Identity(**json.loads(sys.argv[2]))
with artifacts.write(Store(sys.argv[1]), identity) as writer:
    writer.add_bytes("samples.parquet", b"table")
    with writer.file("second.bin") as path:
        path.write_bytes(b"half")
        print("half-way", flush=True)
        sys.stdin.read()
    writer.publish(rows=1)
"""
    fields = {"stage": "samples", "version": 1, "settings": {"max_tokens": 8}}
    argument = json.dumps({**fields, "inputs": {"conversations": "c0"}})
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path), argument],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        cwd=Path(artifacts.__file__).parents[1],
    )
    assert child.stdout is not None
    assert child.stdout.readline() == b"half-way\n"
    child.send_signal(signal.SIGKILL)
    child.communicate()
    store = Store(str(tmp_path))
    assert len(store.sizes(IDENTITY.path)) == 1  # the finished file of the killed attempt
    assert artifacts.find(store, IDENTITY) is None
    assert artifacts.find(store, IDENTITY) is None
    assert make(store) == artifacts.find(store, IDENTITY)


def test_what_is_set_aside_side_by_side_is_logged_in_the_callers_context(tmp_path):
    store = Store(str(tmp_path))
    for part in range(3):
        identity = Identity(stage="states", version=1, settings={"part": part}, inputs={})
        with artifacts.write(store, identity) as writer:
            writer.add_bytes("rows", b"1234")
            manifest = writer.publish(rows=1)
        (tmp_path / manifest.path / manifest.files["rows"].path).write_bytes(b"12")
    run = ContextVar("run", default="none")
    seen = []
    handler = logging.Handler()
    handler.emit = lambda record: seen.append((run.get(), "is set aside" in record.getMessage()))
    run.set("the caller's")
    logging.getLogger("storage").addHandler(handler)
    try:
        assert artifacts.list_manifests(store, "states") == []
    finally:
        logging.getLogger("storage").removeHandler(handler)

    assert seen == [("the caller's", True)] * 3


def test_a_file_with_a_flipped_bit_is_refused_when_it_is_read_and_set_aside(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    manifest = make(store)
    (name, entry), *_ = manifest.files.items()
    file = tmp_path / manifest.path / entry.path
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    assert artifacts.find(store, IDENTITY) is not None  # the size is right
    with (
        pytest.raises(ArtifactError, match="is corrupt; run again to rebuild it"),
        artifacts.open_file(store, manifest, name),
    ):
        pass
    assert artifacts.find(store, IDENTITY) is None
