"""The places a store can live in: a directory, memory, and a real S3 server on this machine."""

import os
import secrets
from collections.abc import Iterator
from pathlib import Path

import boto3  # type: ignore[import-untyped]
import pytest
from moto.server import ThreadedMotoServer

from storage.store import Store

BUCKET = "outrider-tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    # one try by the client itself: what is retried in these tests is retried by the store
    "AWS_MAX_ATTEMPTS": "1",
}


@pytest.fixture(scope="session")
def s3_endpoint() -> Iterator[str]:
    """A running S3 server with one bucket."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = boto3.client(
        "s3",
        endpoint_url=endpoint,
        aws_access_key_id="testing",
        aws_secret_access_key="testing",
        region_name="us-east-1",
    )
    client.create_bucket(Bucket=BUCKET)
    client.close()
    yield endpoint
    server.stop()


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
