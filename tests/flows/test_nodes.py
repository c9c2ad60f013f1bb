"""Capture on two machines: process workers of a work pool, a store in a bucket, a machine that is lost on the way."""

import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from flows import capture_nodes
from flows.settings import SettingsError, parse_settings
from storage.store import Store
from tests.s3_server import BUCKET, ENVIRONMENT, s3_server
from tests.tiny_captures import capture_only, sample_ids, shards_in
from tests.tiny_runs import (
    ROOT,
    Values,
    environment,
    run_flow,
    tiny_values,
    wait_for,
    write_chats,
    write_settings,
)

PREFECT = [sys.executable, "-m", "prefect"]
JOB = "tasks.jobs.capture"


class Pool:
    """Workers of a work pool, each as if it were a machine."""

    def __init__(self, api: str, home: Path) -> None:
        self.api = api
        self._home = home
        self.workers: list[subprocess.Popen[bytes]] = []

    def start_worker(self) -> "subprocess.Popen[bytes]":
        number = len(self.workers)
        command = [*PREFECT, "worker", "start", "--pool=outrider", "--work-queue=capture"]
        with (self._home / f"worker-{number}.log").open("wb") as log:
            worker = subprocess.Popen(
                [*command, "--limit=1", f"--name=machine-{number}"],
                cwd=ROOT, env=self.environment(), stdout=log, stderr=subprocess.STDOUT,
            )  # fmt: skip
        self.workers.append(worker)
        return worker

    def environment(self) -> dict[str, str]:
        """Of a worker: no store, verifier or setting is in it, only how to reach the server and the bucket."""
        quick = {"PREFECT_API_URL": self.api, "PREFECT_WORKER_QUERY_SECONDS": "1"}
        return environment(self._home / "prefect", **quick)

    def runs(self) -> list[dict[str, Any]]:
        """The runs of the deployment, the newest last."""
        only = {"flows": {"name": {"any_": ["capture-states"]}}, "sort": "START_TIME_ASC"}
        found = httpx.post(f"{self.api}/flow_runs/filter", json=only, timeout=30)
        return [run for run in found.raise_for_status().json() if run["deployment_id"]]

    def lose(self, worker: "subprocess.Popen[bytes]") -> None:
        """kill -9 to a worker and all that it started, as a machine ends."""
        for process in [*family(worker.pid), psutil.Process(worker.pid)]:
            process.kill()
        worker.wait()


def family(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


def jobs(pid: int) -> list[psutil.Process]:
    """Capturing processes that a worker's runs have started."""
    found = []
    for process in family(pid):
        try:
            if JOB in process.cmdline():
                found.append(process)
        except psutil.Error:  # it has just ended
            continue
    return found


@pytest.fixture(scope="module")
def bucket() -> Iterator[None]:
    """A bucket, and the environment in which everything here finds it."""
    with s3_server() as endpoint, pytest.MonkeyPatch.context() as patch:
        for name, value in {**ENVIRONMENT, "AWS_ENDPOINT_URL": endpoint}.items():
            patch.setenv(name, value)
        yield


@pytest.fixture(scope="module")
def pool(
    bucket: None, prefect_api: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Pool]:
    """The work pool and the deployment, made as the README says."""
    home = tmp_path_factory.mktemp("pool")
    made = Pool(prefect_api, home)
    for command in (
        ["work-pool", "create", "outrider", "--type", "process"],
        ["--no-prompt", "deploy", "--name", "capture-states"],
    ):
        subprocess.run(
            [*PREFECT, *command], cwd=ROOT, env=made.environment(), check=True, capture_output=True
        )
    try:
        yield made
    finally:
        for worker in made.workers:
            if worker.poll() is None:
                made.lose(worker)


@pytest.fixture
def soon_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """The parent hears of its runs more often than on a real cluster."""
    monkeypatch.setattr(capture_nodes, "POLL_SECONDS", 0.5)
    silent = {**capture_nodes.SILENT_SECONDS, capture_nodes.StateType.RUNNING: 25.0}
    monkeypatch.setattr(capture_nodes, "SILENT_SECONDS", silent)


def values_of(directory: Path, store: str, **capture: Any) -> Values:
    values = tiny_values(directory)
    plain = {"gpus": 1, "rows_per_shard": 1}
    return values | {"store": store, "capture": plain | capture}


@pytest.mark.slow
def test_rows_of_a_lost_machine_are_captured_by_another(
    pool: Pool, soon_lost: None, tmp_path: Path, run_log: Any
) -> None:
    values = values_of(tmp_path, f"s3://{BUCKET}/nodes", nodes=2)
    store = Store(values["store"])
    workers = [pool.start_worker() for _ in range(2)]

    def lose_one() -> None:
        wait_for(lambda: jobs(workers[0].pid) and store.sizes("states"), every=0.002)
        pool.lose(workers[0])

    loser = threading.Thread(target=lose_one)
    loser.start()
    record = run_flow(values, pool.api)
    loser.join()

    assert record["stages"]["capture"]["state"] == "computed"
    assert "gave no sign of life for" in run_log.getvalue()
    assert sorted(run["state_name"] for run in pool.runs()) == ["Completed", "Completed", "Crashed"]
    parents = {run["parent_task_run_id"] for run in pool.runs()}
    assert None not in parents
    assert len(parents) == 3

    capture_only(
        values | {"store": str(tmp_path / "local"), "capture": {"rows_per_shard": 1}}, pool.api
    )
    local, remote = shards_in(Store(str(tmp_path / "local"))), shards_in(store)
    assert len(remote) == 24
    assert {path: shard.content for path, shard in remote.items()} == {
        path: shard.content for path, shard in local.items()
    }
    ids = [sample for shard in remote.values() for sample in sample_ids(store, shard)]
    assert len(set(ids)) == len(ids) == 24


@pytest.mark.slow
def test_a_stopped_run_stops_its_machines(pool: Pool, tmp_path: Path) -> None:
    values = values_of(tmp_path, str(tmp_path / "shared"), nodes=2)
    values["data"] = {"sources": [str(write_chats(tmp_path / "many.jsonl", range(600)))]}
    file = write_settings(values, tmp_path / "settings.yaml")
    before = {run["id"] for run in pool.runs()}
    worker = pool.start_worker()
    parent = subprocess.Popen(
        [sys.executable, "-m", "flows.cli", "run", str(file)], cwd=ROOT, env=pool.environment()
    )
    wait_for(lambda: jobs(worker.pid))

    parent.terminate()
    parent.wait(timeout=60)

    def ours() -> list[str]:
        return [run["state_name"] for run in pool.runs() if run["id"] not in before]

    wait_for(lambda: set(ours()) == {"Cancelled"}, seconds=60)
    assert len(ours()) == 2
    wait_for(lambda: not jobs(worker.pid), seconds=20)


def test_without_its_deployment_a_run_is_refused_before_anything_is_computed(
    prefect_api: str, tmp_path: Path
) -> None:
    values = values_of(tmp_path, str(tmp_path / "store"), nodes=3, deployment="capture-states/none")

    with pytest.raises(
        ValueError, match=r"capture\.nodes 3 needs the deployment capture-states/none"
    ):
        run_flow(values, prefect_api)
    assert [path.name for path in (tmp_path / "store").iterdir()] == ["run_records"]


@pytest.mark.parametrize("store", ["runs", "./runs", "../runs"])
def test_a_relative_store_is_refused_when_other_machines_have_to_find_it(store: str) -> None:
    values = {"name": "x", "verifier": {"model": "m"}, "data": {"sources": ["a"]}, "store": store}
    with pytest.raises(SettingsError, match=r"is a relative path, and capture\.nodes is 2"):
        parse_settings(values | {"capture": {"nodes": 2}})
    assert parse_settings(values).capture.nodes == 1
    for shared in ("/data/runs", "file:///data/runs", f"s3://{BUCKET}/x"):
        parse_settings(values | {"capture": {"nodes": 2}, "store": shared})
