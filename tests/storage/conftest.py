"""The places a store can live in: a directory, memory, and a real S3 server on this machine."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import pytest

from storage.store import Store
from tests.s3_server import BUCKET, ENVIRONMENT, s3_server


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A running S3 server with one bucket."""
    with s3_server() as endpoint:
        yield endpoint


@pytest.fixture
def s3_environment(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """Credentials and endpoint where the product looks for them: in the environment."""
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": s3_endpoint}.items():
        monkeypatch.setenv(name, value)
    return s3_endpoint


@pytest.fixture
def s3_store(s3_environment: str) -> Store:
    """An empty store in the bucket."""
    return Store(f"s3://{BUCKET}/{secrets.token_hex(4)}")


@pytest.fixture(params=["disk", "memory", "s3"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    """An empty store of each kind."""
    if request.param == "disk":
        return Store(str(tmp_path / "store"))
    if request.param == "memory":
        return Store(f"memory://{secrets.token_hex(4)}")
    found: Store = request.getfixturevalue("s3_store")
    return found
