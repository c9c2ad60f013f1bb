"""A real S3 server on this machine, and what the product needs to find it."""

from collections.abc import Iterator
from contextlib import contextmanager

import boto3  # type: ignore[import-untyped]
from moto.server import ThreadedMotoServer

BUCKET = "outrider-tests"
ENVIRONMENT = {
    "AWS_ACCESS_KEY_ID": "testing",
    "AWS_SECRET_ACCESS_KEY": "testing",
    "AWS_DEFAULT_REGION": "us-east-1",
    # one try by the client itself: what is retried in these tests is retried by the store
    "AWS_MAX_ATTEMPTS": "1",
}


@contextmanager
def s3_server() -> Iterator[str]:
    """The endpoint of a server with one bucket."""
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
    try:
        yield endpoint
    finally:
        server.stop()
