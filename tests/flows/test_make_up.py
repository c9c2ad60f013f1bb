"""make up and make down: twice at once, at a port that is taken, without their records or their database."""

import threading
from concurrent.futures import ThreadPoolExecutor
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from tests.operated_site import ENDLESS, Site, free_port, start_training
from tests.tiny_runs import Values

pytestmark = [pytest.mark.slow, pytest.mark.operate]


def test_a_database_that_was_deleted_is_made_anew_with_all_deployments(
    site: Site, values: Values
) -> None:
    site.kill("server")
    for file in site.state.glob("prefect/prefect.db*"):
        file.unlink()

    assert site.operate("up").returncode == 0

    assert site.watch(values) == "DataLanded"  # by the worker that was there before
    (run,) = site.all_ended(values["name"], 1)
    assert run["state_name"] == "Completed"


def test_make_up_twice_at_once_starts_one_of_each(site: Site) -> None:
    site.operate("down")

    with ThreadPoolExecutor(2) as pool:
        both = list(pool.map(site.operate, ["up", "up"]))

    assert [done.returncode for done in both] == [0, 0], both
    assert both[0].stdout == both[1].stdout
    ours = [" ".join(one.cmdline()) for one in site.processes()]
    assert len([x for x in ours if "server start" in x]) == 1
    assert len([x for x in ours if "worker start" in x]) == 1


def test_make_up_at_another_port_is_refused_and_the_server_stays(site: Site) -> None:
    port = str(free_port())
    pids = site.pids()

    done = site.operate("up", PREFECT_SERVER_API_PORT=port)

    assert done.returncode == 1
    assert f"runs at http://127.0.0.1:{site.port}, not at http://127.0.0.1:{port}" in done.stderr
    assert site.pids() == pids
    assert site.get("/health") is True


def test_make_down_finds_the_server_whatever_the_port_that_is_set(
    site: Site, values: Values
) -> None:
    run_id = start_training(site, values, epochs=ENDLESS, deployment="train-draft")

    done = site.operate("down", PREFECT_SERVER_API_PORT=str(free_port()))

    assert "stopped: worker, server; 1 runs were cancelled" in done.stdout
    assert site.operate("up").returncode == 0
    assert site.get(f"/flow_runs/{run_id}")["state_name"] == "Cancelled"


class Answers(BaseHTTPRequestHandler):
    """Something else than Prefect at a port."""

    def do_GET(self) -> None:
        self.send_response(404)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


def test_a_port_that_is_taken_is_named_and_nothing_is_left_running(tmp_path: Path) -> None:
    with HTTPServer(("127.0.0.1", 0), Answers) as other:
        threading.Thread(target=other.serve_forever, daemon=True).start()
        site = Site(tmp_path / "state", other.server_port)
        done = site.operate("up")
        other.shutdown()

    assert done.returncode == 1
    assert f"{other.server_port}" in done.stderr
    assert "already in use" in done.stderr
    assert "PREFECT_SERVER_API_PORT" in done.stderr
    assert "Traceback" not in done.stderr
    assert site.processes() == []


def test_another_prefect_server_at_the_port_is_left_alone(site: Site, tmp_path: Path) -> None:
    done = Site(tmp_path / "state", site.port).operate("up")

    assert done.returncode == 1
    assert "is another Prefect server's, which make up did not start" in done.stderr
    assert site.get("/health") is True


@pytest.mark.parametrize("word", ["up", "down"])
def test_a_record_that_cannot_be_read_is_named_before_anything_is_started(
    tmp_path: Path, word: str
) -> None:
    site = Site(tmp_path / "state", free_port())
    site.state.mkdir()
    (site.state / "server.json").write_text("{")

    done = site.operate(word)

    assert (done.returncode, done.stdout) == (1, "")
    assert "server.json cannot be read" in done.stderr
    assert "then delete the file" in done.stderr
    assert "Traceback" not in done.stderr
    assert site.processes() == []
