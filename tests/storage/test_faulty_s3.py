"""An object store that fails, stalls and hangs up: what is written and read is right all the same."""

import importlib.util
import logging
import secrets
from collections.abc import Iterator

import fsspec
import pytest

from storage import artifacts, retries
from storage.artifacts import Identity
from storage.store import Store, StoreError
from tests.s3_server import BUCKET
from tests.storage.faulty_s3 import FAULTS, FaultyS3

LARGE = bytes(range(256)) * (101 * 4096)
"""101 MiB: above the limit for one put, three parts."""


@pytest.fixture
def faulty(
    s3_environment: str, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> Iterator[FaultyS3]:
    """A proxy whose slow answers come later than the client waits."""
    waits = 5 if "large" in request.node.name else 1  # for a part of 50 MB, for little
    monkeypatch.setattr(retries, "FIRST_PAUSE_SECONDS", 0.01)
    # as a user sets it by FSSPEC_S3; the client's own 15 s would make a slow test
    monkeypatch.setitem(fsspec.config.conf, "s3", {"config_kwargs": {"read_timeout": waits}})
    with FaultyS3(s3_environment, slow_seconds=2 * waits) as proxy:
        monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield proxy


@pytest.fixture
def far_store(faulty: FaultyS3) -> Store:
    return Store(f"s3://{BUCKET}/{secrets.token_hex(4)}")


@pytest.mark.parametrize("fault", FAULTS)
def test_a_small_file_is_written_and_read_through_faults(
    faulty: FaultyS3, far_store: Store, fault: str
) -> None:
    content = secrets.token_bytes(300_000)
    # the answer to a put has nothing in it to be cut
    faulty.spoil("503" if fault == "cut answer" else fault, method="PUT", count=2)
    far_store.write_bytes("a", content)
    assert faulty.spoilt == 2

    faulty.spoil(fault, method="GET", count=2)
    assert far_store.read_bytes("a") == content
    assert faulty.spoilt == 2
    faulty.spoil(fault, method="GET", count=2)
    with far_store.reading("a") as path:
        assert path.read_bytes() == content
    assert faulty.spoilt == 2
    faulty.spoil(fault, method="GET")
    part = far_store.read_parts("a", lambda file: (file.seek(100_000), file.read(5_000))[1])
    assert part == content[100_000:105_000]
    assert faulty.spoilt == 1


@pytest.mark.parametrize("fault", ["503", "slow", "cut request", "cut answer"])
def test_a_large_file_is_written_and_read_in_parts_through_faults(
    faulty: FaultyS3, far_store: Store, fault: str
) -> None:
    # a part of it, or in one case the confirmation of all parts
    method = "POST" if fault == "cut answer" else "PUT"
    faulty.spoil(fault, method=method, path="uploadId=")
    with far_store.writing("big") as path:
        path.write_bytes(LARGE)
    assert faulty.spoilt == 1
    parts = [request for request in faulty.requests if "partNumber=" in request.path]
    assert len(parts) >= 3

    faulty.spoil(fault, method="GET", count=2)
    with far_store.reading("big") as path:
        assert path.read_bytes() == LARGE
    assert faulty.spoilt == 2
    assert far_store.sizes("") == {"big": len(LARGE)}


def test_a_large_file_whose_confirmation_is_lost_is_there(
    faulty: FaultyS3, far_store: Store
) -> None:
    faulty.spoil("lost answer", method="POST", path="uploadId=")
    with far_store.writing("big") as path:
        path.write_bytes(LARGE)
    assert faulty.spoilt == 1
    with far_store.reading("big") as path:
        assert path.read_bytes() == LARGE


@pytest.mark.parametrize("fault", FAULTS)
def test_listings_look_ups_and_deletions_go_through_faults(
    faulty: FaultyS3, far_store: Store, fault: str
) -> None:
    for name in ("d/a", "d/b"):
        far_store.write_bytes(name, b"12")
    for answer, ask in (
        ({"a": 2, "b": 2}, lambda: far_store.sizes("d")),
        (["a", "b"], lambda: far_store.files("d")),
        (2, lambda: far_store.size("d/a")),
        (None, lambda: far_store.delete("d")),
        (False, lambda: far_store.exists("d")),
    ):
        faulty.spoil(fault)
        assert ask() == answer
        assert faulty.spoilt == 1


def test_pauses_grow_and_are_said_with_place_and_cause(
    faulty: FaultyS3, far_store: Store, caplog: pytest.LogCaptureFixture
) -> None:
    faulty.spoil("500", count=3)
    with caplog.at_level(logging.WARNING):
        far_store.write_bytes("a", b"1")
    lines = [record.getMessage() for record in caplog.records]
    assert [line.split(" (try ")[0] for line in lines] == [f"could not write {far_store.url}/a"] * 3
    assert [line.split(" (try ")[1][:6] for line in lines] == ["1 of 4", "2 of 4", "3 of 4"]


def test_a_large_file_that_never_arrives_leaves_the_old_content_and_no_upload(
    faulty: FaultyS3, far_store: Store, s3_environment: str
) -> None:
    far_store.write_bytes("big", b"old")
    faulty.spoil("500", method="PUT", count=1000)
    with pytest.raises(StoreError, match=r"could not write .*/big in 4 tries"):  # noqa: SIM117
        with far_store.writing("big") as path:
            path.write_bytes(LARGE)
    faulty.spoil("500", count=0)
    assert far_store.read_bytes("big") == b"old"
    aborted = [r for r in faulty.requests if r.method == "DELETE" and "uploadId=" in r.path]
    assert len(aborted) == 4


def test_a_large_artifact_is_published_by_puts_alone_its_manifest_last(
    faulty: FaultyS3, far_store: Store
) -> None:
    identity = Identity(stage="states", version=1, settings={}, inputs={})
    with artifacts.write(far_store, identity) as writer:
        with writer.file("large.bin") as path:
            path.write_bytes(LARGE)
        writer.add_bytes("small.bin", b"1")
        writer.publish(rows=1)

    writes = [request for request in faulty.requests if request.method in {"PUT", "POST", "DELETE"}]
    assert {request.method for request in writes} == {"PUT", "POST"}
    assert not [r for r in writes if any("copy" in name.lower() for name in r.headers)]
    assert writes[-1].path.split("?")[0].endswith("/manifest.json")
    with artifacts.open_file(
        far_store, artifacts.require(far_store, identity.path), "large.bin"
    ) as path:
        assert path.read_bytes() == LARGE


@pytest.mark.parametrize("url", ["gs://bucket/outrider", "az://bucket/outrider"])
def test_a_store_of_another_cloud_is_known_by_name(url: str) -> None:
    """The code has no word about them: their clients are the user's to install."""
    kind = {"gs": "gcsfs", "az": "adlfs"}[url.split(":", maxsplit=1)[0]]
    if importlib.util.find_spec(kind) is not None:
        assert Store(url).url == url
    else:
        with pytest.raises(ValueError, match=rf"its file system is not installed here.*{kind}"):
            Store(url)
