"""What make up starts, with a state directory and a port of its own: a server, a worker, all deployments."""

import json
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from tests.prefect_api import ask
from tests.tiny_runs import ROOT, Values, chat, tiny_values, wait_for, write_settings

FINAL = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
ENDLESS = 10_000
"""Epochs of a training that is still going on when its processes are ended."""
QUICK = {"PREFECT_WORKER_QUERY_SECONDS": "1", "PREFECT_SERVER_ANALYTICS_ENABLED": "false"}


@dataclass(frozen=True)
class Site:
    """A state directory and a port of its own for make up."""

    state: Path
    port: int
    variables: tuple[tuple[str, str], ...] = ()

    @property
    def api(self) -> str:
        return f"http://127.0.0.1:{self.port}/api"

    @property
    def environment(self) -> dict[str, str]:
        plain = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
        own = {"OUTRIDER_STATE": str(self.state), "PREFECT_SERVER_API_PORT": str(self.port)}
        return {**plain, **QUICK, **own, **dict(self.variables), "HF_HUB_OFFLINE": "1"}

    def operate(self, word: str, **variables: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "flows.operate", word]
        env = self.environment | variables
        return subprocess.run(
            command, cwd=ROOT, env=env, capture_output=True, text=True, check=False
        )

    def get(self, path: str) -> Any:
        return ask("GET", f"{self.api}{path}")

    def post(self, path: str, body: Values) -> Any:
        return ask("POST", f"{self.api}{path}", body)

    def patch(self, path: str, body: Values) -> None:
        ask("PATCH", f"{self.api}{path}", body)

    def start(self, deployment: str, parameters: Values) -> str:
        found = self.get(f"/deployments/name/{deployment}/{deployment}")["id"]
        made = self.post(f"/deployments/{found}/create_flow_run", {"parameters": parameters})
        return str(made["id"])

    def finish(self, run_id: str) -> Values:
        wait_for(lambda: self.get(f"/flow_runs/{run_id}")["state_type"] in FINAL, seconds=150)
        found: Values = self.get(f"/flow_runs/{run_id}")
        return found

    def watch(self, values: Values) -> str:
        """Run watch-data by the worker; returns the name of its final state."""
        return str(self.finish(self.start("watch-data", {"settings": values}))["state_name"])

    def watch_here(self, values: Values, directory: Path, api: str) -> str:
        """Run watch-data in a process without a worker, on the server at `api`; returns its log."""
        file = write_settings(values, directory / "watched.yaml")
        done = subprocess.run(
            [sys.executable, "-m", "flows.watch_data", str(file)],
            cwd=ROOT, env=self.environment | {"PREFECT_API_URL": api}, capture_output=True,
            text=True, check=True,
        )  # fmt: skip
        return done.stdout + done.stderr

    def retrains(self, name: str) -> list[Values]:
        """The runs of the deployment retrain for settings of this name, in the order of their making."""
        only = {"deployments": {"name": {"any_": ["retrain"]}}}
        found = self.post("/flow_runs/filter", only)
        ours = [run for run in found if run["parameters"]["settings"]["name"] == name]
        return sorted(ours, key=lambda run: str(run["created"]))

    def all_ended(self, name: str, count: int) -> list[Values]:
        """Wait until so many retrains have ended; returns them."""
        wait_for(lambda: len(self.retrains(name)) >= count, seconds=40)
        for run in self.retrains(name):
            self.finish(run["id"])
        return self.retrains(name)

    def pause(self, *, paused: bool) -> None:
        """Whether the worker takes up runs."""
        self.patch("/work_pools/outrider", {"is_paused": paused})

    def page_of(self, run_id: str, key: str = "run-end") -> str:
        only = {"artifacts": {"flow_run_id": {"any_": [run_id]}, "key": {"any_": [key]}}}
        (page,) = self.post("/artifacts/filter", only)
        return str(page["data"])

    def crashed(self, run_id: str) -> str | None:
        """What the state of a run says, once that is Crashed."""
        run = self.get(f"/flow_runs/{run_id}")
        return str(run["state"]["message"]) if run["state_type"] == "CRASHED" else None

    def retry(self, run_id: str) -> None:
        """As the button Retry in the UI does."""
        scheduled = {"type": "SCHEDULED", "name": "AwaitingRetry"}
        self.post(f"/flow_runs/{run_id}/set_state", {"state": scheduled})

    def cancel(self, run_id: str) -> Values:
        """As Cancel in the UI does, to the end; returns the run."""
        state = {"type": "CANCELLING", "name": "Cancelling"}
        self.post(f"/flow_runs/{run_id}/set_state", {"state": state})
        return self.finish(run_id)

    def kill(self, name: str, *, with_children: bool = True) -> None:
        """SIGKILL for the server or the worker, and for all that it has started."""
        process = psutil.Process(self.pids()[name])
        for one in [*(process.children(recursive=True) if with_children else []), process]:
            one.send_signal(signal.SIGKILL)

    def pids(self) -> dict[str, int]:
        return {
            name: json.loads((self.state / f"{name}.json").read_text())["pid"]
            for name in ("server", "worker")
        }

    def processes(self) -> list[psutil.Process]:
        """All that was started with this state directory, whoever its parent is by now."""
        found = []
        for process in psutil.process_iter():
            try:
                if process.environ().get("OUTRIDER_STATE") == str(self.state) and (
                    process.status() != psutil.STATUS_ZOMBIE
                ):
                    found.append(process)
            except psutil.Error:
                continue
        return found


def watched_values(directory: Path, test: str) -> Values:
    """Settings of a tiny run, named after a test, whose sources are a directory in which files can land."""
    made = tiny_values(directory)
    (directory / "landing").mkdir()
    (directory / "chats.jsonl").rename(directory / "landing" / "a.jsonl")
    made["data"] = {"sources": [str(directory / "landing")]}
    made["capture"] = {"gpus": 1, "rows_per_shard": 8}
    made["train"] |= {"epochs": 1, "checkpoint_seconds": 60}
    made["evaluate"] = {"prompts": 2, "max_new_tokens": 6}
    return made | {"name": re.sub(r"\W+", "-", test)[-40:].strip("-_")}


def start_training(site: Site, values: Values, *, epochs: int, deployment: str) -> str:
    """Start a run; returns its id when its training has begun."""
    values["train"] |= {"epochs": epochs}
    run_id = site.start(deployment, {"settings": values})
    wait_for(lambda: Path(values["store"], "checkpoints").exists(), seconds=120)
    return run_id


def land(values: Values, name: str, numbers: range) -> None:
    """Put conversations of the train side into the directory that is watched."""
    text = "".join(json.dumps(chat(n, source="seen")) + "\n" for n in numbers)
    Path(values["data"]["sources"][0], name).write_text(text)


def records(values: Values) -> list[Values]:
    """The records of the runs of a store, oldest first; none that is being written."""
    found = sorted(Path(values["store"], "run_records").glob("[0-9]*.json"))
    return [json.loads(file.read_text()) for file in found]


@contextmanager
def running(directory: Path, **variables: str) -> Iterator[Site]:
    """make up, and in the end nothing is left of it."""
    made = Site(directory / "state", free_port(), tuple(variables.items()))
    done = made.operate("up")
    try:
        assert done.returncode == 0, done.stderr
        assert f"http://127.0.0.1:{made.port}" in done.stdout
        yield made
    finally:
        made.operate("down")
        for process in made.processes():
            process.kill()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
