"""A Prefect server for the length of one command, where the user runs none.

Prefect's own temporary server outlives a killed flow; this one ends with its parent. Run as a module it is the
server's process.
"""

import logging
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tasks.child import kill_children
from tasks.processes import die_with_parent, start_process

logger = logging.getLogger(__name__)

START_SECONDS = 120.0
SCRATCH_PREFIX = "outrider-prefect-"
QUIET = {
    "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
    "DO_NOT_TRACK": "1",
    "PREFECT_UI_ENABLED": "0",
}


@contextmanager
def api_server() -> Iterator[None]:
    """Use the Prefect API that is configured, or else a server that ends with the block."""
    from prefect.settings import PREFECT_API_URL, temporary_settings  # noqa: PLC0415 - a second that others save

    configured = PREFECT_API_URL.value()
    if configured:
        _check_answers(configured)
        try:
            yield
        finally:
            _drain()
        return
    _remove_leftovers()
    logger.info("starting a Prefect server for this run (set PREFECT_API_URL to use your own)")
    with (
        tempfile.TemporaryDirectory(prefix=f"{SCRATCH_PREFIX}{os.getpid()}-") as scratch,
        _server(Path(scratch)) as url,
        temporary_settings(updates={PREFECT_API_URL: url}),
    ):
        yield


def _remove_leftovers() -> None:
    """Remove what the servers of killed runs have left among the temporary files."""
    for directory in Path(tempfile.gettempdir()).glob(f"{SCRATCH_PREFIX}*-*"):
        owner = directory.name.removeprefix(SCRATCH_PREFIX).split("-", 1)[0]
        if owner.isdecimal() and not Path("/proc", owner).exists() and Path("/proc").exists():
            shutil.rmtree(directory, ignore_errors=True)


def _check_answers(url: str) -> None:
    """Raise RuntimeError when no Prefect server is behind PREFECT_API_URL: Prefect would try for minutes."""
    import httpx  # noqa: PLC0415 - as above

    try:
        httpx.get(f"{url.rstrip('/')}/health", timeout=30).raise_for_status()
    except httpx.HTTPStatusError:
        return  # it answers; whether it lets us in, Prefect says
    except httpx.HTTPError as error:
        raise RuntimeError(
            f"PREFECT_API_URL {url} does not answer ({type(error).__name__}): start that server, or unset "
            "PREFECT_API_URL to use one for the length of this run"
        ) from error


@contextmanager
def _server(scratch: Path) -> Iterator[str]:
    """Run a server with a database of its own and give its URL.

    In a common database a second server would find it locked, and a killed run would stay "Running" for ever.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    stopping = threading.Event()
    database = f"sqlite+aiosqlite:///{scratch}/prefect.db"
    log = scratch / "server.log"
    with log.open("w") as output:
        process = start_process(
            [sys.executable, "-m", "flows.server", str(port)],
            env={**os.environ, **QUIET, "PREFECT_API_DATABASE_CONNECTION_URL": database},
            stdout=output,
        )
    try:
        url = f"http://127.0.0.1:{port}/api"
        _wait_until_healthy(url, process, log)
        threading.Thread(target=_end_with, args=(process, stopping), daemon=True).start()
        try:
            yield url
        finally:
            if process.poll() is None:  # a dead server would be waited for without end
                _drain()
    finally:
        stopping.set()
        process.terminate()
        process.wait()


def _end_with(process: "subprocess.Popen[str]", stopping: threading.Event) -> None:
    """End this process when its server does: Prefect would try to reach it for minutes."""
    process.wait()
    if not stopping.is_set():
        message = (
            "outrider: the temporary Prefect server ended; run the same command again to go on"
        )
        print(message, file=sys.stderr, flush=True)  # noqa: T201 - all that is left to do
        kill_children()
        os._exit(1)


def _drain() -> None:
    """Wait until the log lines and events of the run have reached the server."""
    from prefect.events.worker import EventsWorker  # noqa: PLC0415 - as above
    from prefect.logging.handlers import APILogWorker  # noqa: PLC0415

    for worker in (APILogWorker, EventsWorker):
        worker.drain_all(timeout=5)


def _wait_until_healthy(url: str, process: "subprocess.Popen[str]", log: Path) -> None:
    import httpx  # noqa: PLC0415 - as above

    until = time.monotonic() + START_SECONDS
    while time.monotonic() < until and process.poll() is None:
        try:
            if httpx.get(f"{url}/health", timeout=5).status_code == 200:
                return
        except httpx.HTTPError:
            time.sleep(0.1)
    ended = "ended" if process.poll() is not None else f"did not answer in {START_SECONDS:.0f} s"
    said = log.read_text(errors="replace").strip()[-500:]
    raise RuntimeError(
        f"the temporary Prefect server {ended}: {said or 'it said nothing'}; "
        "run `prefect server start` and set PREFECT_API_URL to use one of your own"
    )


def main() -> None:
    """Serve Prefect's API on the port given until the parent ends."""
    import uvicorn  # noqa: PLC0415 - only the server's process needs it

    die_with_parent()
    uvicorn.run(
        "prefect.server.api.server:create_app",
        factory=True,
        host="127.0.0.1",
        port=int(sys.argv[1]),
        log_level="error",
    )


if __name__ == "__main__":
    main()
