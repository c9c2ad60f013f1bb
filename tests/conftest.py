"""What every test process needs before torch is imported, a Prefect server, and one completed tiny run."""

import io
import json
import logging
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest

# as in the product's child processes: threads that spin while others work slow both down manyfold
os.environ.setdefault("GOMP_SPINCOUNT", "0")
os.environ.setdefault("OMP_NUM_THREADS", "1")  # as many as tiny models can use
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# where there is a GPU, speculators compiles its forward, which as a reference on the CPU takes minutes a case
os.environ.setdefault("TORCHDYNAMO_DISABLE", "1")
if not Path("/dev/nvidiactl").exists():  # Triton reads it when it is imported
    os.environ.setdefault("TRITON_INTERPRET", "1")

from tests.tiny_runs import (
    ROOT,
    TinyRun,
    environment,
    outrider,
    tiny_values,
    write_settings,
)


@pytest.fixture(scope="session")
def prefect_api(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """URL of a Prefect server with a database of its own."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "flows.server", str(port)],
        cwd=ROOT,
        env=environment(tmp_path_factory.mktemp("prefect")),
    )
    url = f"http://127.0.0.1:{port}/api"
    try:
        until = time.monotonic() + 120
        while not _healthy(url):
            assert process.poll() is None, "the Prefect server ended"
            assert time.monotonic() < until, "the Prefect server did not start"
            time.sleep(0.1)
        yield url
        _drain()
    finally:
        process.terminate()
        process.wait()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyRun:
    """One run by the command line, with a temporary Prefect server as users have it.

    Its store is for reading; `tiny.copy` makes one to change.
    """
    directory = tmp_path_factory.mktemp("tiny")
    values = tiny_values(directory)
    file = write_settings(values, directory / "settings.yaml")
    done = outrider("run", file, "--json", env=environment(directory / "prefect"))
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    return TinyRun(values, Path(values["store"]), result, done.stderr)


@pytest.fixture
def run_log() -> Iterator[io.StringIO]:
    """The lines that our packages log, children's included; Prefect takes pytest's own handler away."""
    from flows.run_log import OUR_LOGGERS

    stream = io.StringIO()
    handler = logging.StreamHandler(stream)
    for name in OUR_LOGGERS:
        logging.getLogger(name).addHandler(handler)
    yield stream
    for name in OUR_LOGGERS:
        logging.getLogger(name).removeHandler(handler)


def _healthy(url: str) -> bool:
    try:
        with urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except (URLError, OSError):
        return False


def _drain() -> None:
    """Let the lines and events of flows that ran in this process reach their server."""
    from prefect.events.worker import EventsWorker
    from prefect.logging.handlers import APILogWorker

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=5)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files with slow tests come first: what is left at the end is short, and no process waits for another."""
    slow = {item.path for item in items if item.get_closest_marker("slow")}
    items.sort(key=lambda item: item.path not in slow)
