"""make up on PostgreSQL, as servers for many people have it."""

import os
import pwd
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.operated_site import free_port, records, running, watched_values
from tests.tiny_runs import wait_for

pytestmark = [pytest.mark.slow, pytest.mark.operate]


@pytest.fixture
def database() -> Iterator[str]:
    """The URL of an empty database of a PostgreSQL server of its own."""
    found = [shutil.which("initdb"), *sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"))]
    programs = next((Path(one).resolve().parent for one in found if one), None)
    if programs is None:
        pytest.skip("PostgreSQL is not installed")
    owner = "nobody" if os.getuid() == 0 else None  # it refuses to run as root
    directory, port = Path(tempfile.mkdtemp(prefix="outrider-postgresql-")), free_port()
    if owner is not None:
        os.chown(directory, pwd.getpwnam(owner).pw_uid, -1)
    data = directory / "data"
    make = [programs / "initdb", "--pgdata", data, "--username", "prefect", "--auth", "trust"]
    subprocess.run(make, user=owner, check=True, capture_output=True, cwd=directory)
    serve = [programs / "postgres", "-D", data, "-p", str(port), "-k", directory]
    with (directory / "log").open("wb") as log:
        server = subprocess.Popen(serve, user=owner, stdout=log, stderr=log, cwd=directory)
    try:
        ready = [programs / "pg_isready", "-h", "127.0.0.1", "-p", str(port)]
        wait_for(
            lambda: subprocess.run(ready, check=False, capture_output=True).returncode == 0,
            seconds=60,
        )
        yield f"postgresql+asyncpg://prefect@127.0.0.1:{port}/postgres"
    finally:
        server.terminate()
        server.wait()
        shutil.rmtree(directory)


def test_make_up_on_postgresql_runs_what_it_runs_on_sqlite_and_keeps_it(
    database: str, tmp_path: Path
) -> None:
    values = watched_values(tmp_path, "on-postgresql")
    with running(tmp_path, PREFECT_API_DATABASE_CONNECTION_URL=database) as site:
        assert site.watch(values) == "DataLanded"
        (run,) = site.all_ended(values["name"], 1)
        assert run["state_name"] == "Completed", run["state"]["message"]
        assert records(values)[0]["state"] == "completed"

        assert site.operate("down").returncode == 0
        assert site.operate("up").returncode == 0

        assert site.get(f"/flow_runs/{run['id']}")["state_name"] == "Completed"
        assert site.watch(values) == "NothingNew"
        assert not list(site.state.rglob("prefect.db"))
