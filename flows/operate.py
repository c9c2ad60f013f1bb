"""make up, make down: a Prefect server, the work pool, a worker, all deployments and automations.

python -m flows.operate up | down | deploy

What is started is recorded in .outrider/ (or $OUTRIDER_STATE), with the logs and, by default, the server's database.
`deploy` starts nothing: it makes pool, deployments and automations on the server of PREFECT_API_URL.
"""

import fcntl
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from flows.daemons import Daemon

POOL = "outrider"
ROOT = Path(__file__).parent.parent
SERVER_SECONDS = 180.0
CANCEL_SECONDS = 60.0
"""Time that running runs get to end."""
STOP_SECONDS = 20.0
NOTIFY = "OUTRIDER_NOTIFY"
"""Who is told of runs that failed: an Apprise URL, or the name of a notification block."""
PREFECT = [sys.executable, "-m", "prefect"]


class Site:
    """The server of one state directory, and how its processes find it."""

    def __init__(self, state: Path, *, elsewhere: str | None = None) -> None:
        self.state = state
        self.elsewhere = elsewhere
        """The API of a server that is not ours to start."""
        self.state.mkdir(parents=True, exist_ok=True)
        self.server = Daemon("server", state)
        self.worker = Daemon("worker", state)
        self.host = os.environ.get("PREFECT_SERVER_API_HOST", "127.0.0.1")
        self.port = os.environ.get("PREFECT_SERVER_API_PORT", "4200")
        self.asked = f"http://{self.host}:{self.port}"
        """Where a server is to run that is started now."""

    @property
    def ui(self) -> str:
        """Where the server is: one that runs stays where it was started."""
        if self.elsewhere is not None:
            return self.elsewhere.rstrip("/").removesuffix("/api")
        return self.server.address() or self.asked

    @property
    def api(self) -> str:
        """The address of its API."""
        return f"{self.ui}/api"

    @property
    def environment(self) -> dict[str, str]:
        """Of all processes; Prefect's own variables count, such as PREFECT_API_DATABASE_CONNECTION_URL."""
        quiet = {
            "PREFECT_HOME": str(self.state / "prefect"),
            "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
            "PREFECT_SERVER_UI_SHOW_PROMOTIONAL_CONTENT": "false",
            "DO_NOT_TRACK": "1",
            # in memory they are lost with the server, and Prefect ends each run whose lease is not found
            "PREFECT_SERVER_CONCURRENCY_LEASE_STORAGE": "prefect.server.concurrency.lease_storage.filesystem",
        }
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        kept = {name: value for name, value in os.environ.items() if name != NOTIFY}
        return {**quiet, **kept, "PREFECT_API_URL": self.api, "PYTHONPATH": path}

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One up or down at a time."""
        with (self.state / "lock").open("w") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield

    def answers(self) -> bool:
        """Whether a Prefect server answers at the address."""
        try:
            return httpx.get(f"{self.api}/health", timeout=5).status_code == 200
        except httpx.HTTPError:
            return False

    def prefect(self, *arguments: str) -> None:
        """Run Prefect's command line; RuntimeError with what it said when it fails."""
        done = subprocess.run(
            [*PREFECT, "--no-prompt", *arguments],
            env=self.environment, cwd=ROOT, capture_output=True, text=True, check=False,
        )  # fmt: skip
        if done.returncode != 0:
            said = " ".join((done.stdout + done.stderr).split())[-800:]
            raise RuntimeError(f"prefect {' '.join(arguments)} failed: {said}")


def up(site: Site) -> str:
    """Start what does not run yet and bring the rest up to date; returns what to do next."""
    with site.locked():
        _start_server(site)
        _make_all(site)
        site.worker.start(
            [*PREFECT, "worker", "start", f"--pool={POOL}", "--name=outrider-local"],
            site.environment,
        )
        _notify(site)
    return (
        f"Prefect's UI       {site.ui}\n"
        f"processes          server {site.server.pid()}, worker {site.worker.pid()}; logs in {site.state}\n"
        f"start a run        {site.ui}/v2/deployments: train-draft, Custom run, edit the settings\n"
        f"retrain by itself  watch-data there: edit its settings, turn its schedule on\n"
        f"in a terminal      export PREFECT_API_URL={site.api}\n"
        f"stop               make down (runs, drafts and database stay)"
    )


def deploy(site: Site) -> str:
    """Make what a worker needs on a server that runs already; returns what to do next."""
    with site.locked():
        _make_all(site)
        _notify(site)
    return f"deployed on {site.ui}; a worker there: prefect worker start --pool {POOL}"


def down(site: Site) -> str:
    """Cancel what runs, stop worker and server; the database stays. Returns what was stopped."""
    with site.locked():
        cancelled = 0
        if site.server.pid() is not None and site.answers():
            _set_paused(site, paused=True)
            try:
                cancelled = _cancel_runs(site)
                stopped = _stop(site.worker)
                _end_cancellations(site)
            finally:
                _set_paused(site, paused=False)
        else:
            stopped = _stop(site.worker)
        stopped += _stop(site.server)
    if not stopped:
        return "nothing runs"
    runs = (
        f"; {cancelled} runs were cancelled: Retry in the UI goes on with them" if cancelled else ""
    )
    return f"stopped: {', '.join(stopped)}{runs}"


def _start_server(site: Site) -> None:
    if site.ui != site.asked:
        raise RuntimeError(
            f"the server of {site.state} runs at {site.ui}, not at {site.asked}: `make down` ends it, then `make up` "
            "starts it there; or set PREFECT_SERVER_API_HOST and PREFECT_SERVER_API_PORT as they were"
        )
    if site.server.pid() is None:
        if site.answers():
            raise RuntimeError(
                f"{site.ui} is another Prefect server's, which make up did not start: stop it, or set "
                "PREFECT_SERVER_API_PORT to a free port"
            )
        site.server.start(
            [*PREFECT, "server", "start", f"--host={site.host}", f"--port={site.port}"],
            site.environment,
            address=site.asked,
        )
    until = time.monotonic() + SERVER_SECONDS
    while not site.answers():
        if site.server.pid() is None or time.monotonic() > until:
            said = site.server.last_words()
            _stop(site.server)
            raise RuntimeError(
                f"the Prefect server did not start: {said}; see {site.server.log}. Another port: "
                "PREFECT_SERVER_API_PORT"
            )
        time.sleep(0.2)


def _stop(daemon: Daemon) -> list[str]:
    return [daemon.name] if daemon.stop(seconds=STOP_SECONDS) else []


def _make_all(site: Site) -> None:
    """The work pool, the deployments, the automations."""
    _make_pool(site)
    _deploy(site)
    _apply_automations(site)


def _make_pool(site: Site) -> None:
    if _has_pool(site):
        return
    try:
        site.prefect("work-pool", "create", POOL, "--type", "process")
    except RuntimeError:  # a worker that runs makes the pool that it does not find
        if not _has_pool(site):
            raise


def _has_pool(site: Site) -> bool:
    return _ask(site, "GET", f"/work_pools/{POOL}") is not None


def _set_paused(site: Site, *, paused: bool) -> None:
    """Whether the work pool's workers take up new runs."""
    _ask(site, "PATCH", f"/work_pools/{POOL}", {"is_paused": paused})


def _cancel_runs(site: Site) -> int:
    """Cancel the runs that workers of the pool are at, and wait for their end; returns how many there were."""
    found = _live_runs(site)
    for run in found:
        _ask(
            site, "PATCH", f"/flow_runs/{run['id']}/labels", {"outrider.stopped-by-make-down": True}
        )
        state = {"type": "CANCELLING", "name": "Cancelling", "message": "stopped by make down"}
        _ask(site, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state})
    until = time.monotonic() + CANCEL_SECONDS
    while _live_runs(site) and time.monotonic() < until:
        time.sleep(0.5)
    return len(found)


def _end_cancellations(site: Site) -> None:
    """Of runs that had no process yet: nobody else would, and the next runs would wait for them."""
    state = {"type": "CANCELLED", "name": "Cancelled", "message": "stopped by make down"}
    for run in _live_runs(site):
        _ask(site, "POST", f"/flow_runs/{run['id']}/set_state", {"state": state, "force": True})


def _live_runs(site: Site) -> list[Any]:
    only = {
        "work_pools": {"name": {"any_": [POOL]}},
        "flow_runs": {"state": {"type": {"any_": ["RUNNING", "PENDING", "CANCELLING"]}}},
    }
    return list(_ask(site, "POST", "/flow_runs/filter", only))


def _ask(site: Site, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    """Ask the server's API, again while its database is locked; None for what does not exist."""
    for last in (False, False, False, False, True):
        answer = httpx.request(method, f"{site.api}{path}", json=body, timeout=60)
        if answer.status_code != 503 or last:
            break
        time.sleep(1)
    if answer.status_code == 404:
        return None
    answer.raise_for_status()
    return answer.json() if answer.content else None


def _deploy(site: Site) -> None:
    """Deploy all; what was changed in the UI stays: schedules, and parameters unless the file's have changed."""
    record = site.state / "deployed.json"
    wanted = yaml.safe_load((ROOT / "prefect.yaml").read_text())
    in_file = {one["name"]: one.get("parameters") for one in wanted["deployments"]}
    try:
        deployed = json.loads(record.read_text())
        before = {name: deployed.get(name) for name in in_file}
    except (OSError, ValueError, AttributeError):
        before = in_file  # what the server has stays
    kept = {}
    for one in wanted["deployments"]:
        found = _deployment(site, one["name"])
        if found is None:
            continue
        one["schedules"] = None  # those that are there stay, as the UI has left them
        if before[one["name"]] == in_file[one["name"]]:
            kept[one["name"]] = found["parameters"]
            if "{{" not in json.dumps(found["parameters"]):  # Prefect would fill it in
                one["parameters"] = found["parameters"]
    file = site.state / "prefect.yaml"
    file.write_text(yaml.safe_dump(wanted))
    site.prefect("deploy", "--all", f"--prefect-file={file}")
    for name, parameters in kept.items():
        found = _deployment(site, name)
        if found["parameters"] != parameters:
            _ask(site, "PATCH", f"/deployments/{found['id']}", {"parameters": parameters})
    record.write_text(json.dumps(in_file))


def _deployment(site: Site, name: str) -> Any:
    return _ask(site, "GET", f"/deployments/name/{name}/{name}")


def _apply_automations(site: Site) -> None:
    with _client(site) as client:
        from flows.automations import apply_automations  # noqa: PLC0415 - after PREFECT_HOME is set

        apply_automations(client)


def _notify(site: Site) -> None:
    target = os.environ.get(NOTIFY)
    if not target:
        return  # what was set up before stays
    with _client(site) as client:
        from flows.notifications import apply_notifications  # noqa: PLC0415 - as above

        apply_notifications(client, target)


@contextmanager
def _client(site: Site) -> Iterator[Any]:
    """Prefect's client of the site's server."""
    os.environ.setdefault(
        "PREFECT_HOME", site.environment["PREFECT_HOME"]
    )  # before Prefect is imported
    from prefect import get_client  # noqa: PLC0415
    from prefect.settings import PREFECT_API_URL, temporary_settings  # noqa: PLC0415

    with (
        temporary_settings(updates={PREFECT_API_URL: site.api}),
        get_client(sync_client=True) as client,
    ):
        yield client


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one of the two; returns the exit status."""
    commands: dict[str, Callable[[Site], str]] = {"up": up, "down": down, "deploy": deploy}
    words = list(sys.argv[1:] if arguments is None else arguments)
    if len(words) != 1 or words[0] not in commands:
        print("usage: python -m flows.operate up | down | deploy", file=sys.stderr)
        return 2
    elsewhere = os.environ.get("PREFECT_API_URL") if words == ["deploy"] else None
    if words == ["deploy"] and not elsewhere:
        print("outrider: set PREFECT_API_URL to the server to deploy on", file=sys.stderr)
        return 2
    try:
        state = Path(os.environ.get("OUTRIDER_STATE", str(ROOT / ".outrider"))).absolute()
        site = Site(state, elsewhere=elsewhere)
        print(commands[words[0]](site))
    except (RuntimeError, OSError, httpx.HTTPError) as error:
        print(f"outrider: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
