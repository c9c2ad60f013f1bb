"""Eight processes capture; some are killed, then the flow: every shard is there once, in the bytes of a quiet run."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest

from storage.layout import ROWS_TABLE, STATES_FILE
from tests.tiny_models import make_llama
from tests.tiny_runs import (
    ROOT,
    Values,
    environment,
    manifests,
    started_by,
    wait_for,
    write_settings,
)

pytestmark = pytest.mark.slow

PROCESSES, SHARDS, ROWS_PER_SHARD = 8, 40, 4
# a second's work for each process, so that a kill finds it at it
LARGER = {"hidden_size": 256, "intermediate_size": 1024, "num_hidden_layers": 12}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> Values:
    directory = tmp_path_factory.mktemp("fan_out")
    draw = random.Random(0)
    chats = [
        [
            {"role": "user", "content": f"Question {number}?"},
            {
                "role": "assistant",
                "content": "".join(draw.choices("ab cd ef", k=draw.randint(100, 400))),
            },
        ]
        for number in range(SHARDS * ROWS_PER_SHARD)
    ]
    source = directory / "chats.jsonl"
    source.write_text("".join(json.dumps({"messages": chat}) + "\n" for chat in chats))
    return {
        "name": "fan-out",
        "verifier": {"model": str(make_llama(directory / "verifier", **LARGER))},
        "data": {"sources": [str(source)]},
        "capture": {"gpus": PROCESSES, "rows_per_shard": ROWS_PER_SHARD},
        "vocab": {"draft_size": 128},
    }


@contextmanager
def running(values: Values, directory: Path, api: str) -> Iterator["subprocess.Popen[str]"]:
    """A run of the command line, killed at the end of the block; nothing that it started may outlive it."""
    directory.mkdir()
    file = write_settings(values, directory / "settings.yaml")
    with (directory / "log").open("w") as log:
        flow = subprocess.Popen(
            [sys.executable, "-m", "flows.cli", "run", str(file)],
            cwd=ROOT,
            env=environment(directory / "prefect", PREFECT_API_URL=api),
            text=True,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
    try:
        yield flow
        assert flow.poll() is None, (directory / "log").read_text()
    finally:
        flow.kill()
        flow.wait()
    wait_for(lambda: not started_by(flow.pid), seconds=10)


def workers(flow: "subprocess.Popen[str]") -> list[psutil.Process]:
    found = []
    for process in started_by(flow.pid):
        with suppress(psutil.NoSuchProcess):  # it has just ended
            if "tasks.jobs.capture" in process.cmdline():
                found.append(process)
    return found


def shards(store: Path) -> dict[str, int]:
    return manifests(store, "capture") if (store / "states").exists() else {}


def contents(store: Path) -> dict[str, tuple[bytes, bytes]]:
    """Shard -> its files' bytes, as its manifest names them."""
    found = {}
    for name in shards(store):
        manifest = json.loads((store / name).read_text())
        files = [manifest["files"][file]["path"] for file in (STATES_FILE, ROWS_TABLE)]
        states, rows = [(store / name).parent / file for file in files]
        found[name] = (states.read_bytes(), rows.read_bytes())
    return found


def kill_some(flow: "subprocess.Popen[str]", store: Path, *, seed: int, until_shards: int) -> int:
    """Kill a worker at random now and then while the capture goes on; returns how many."""
    draw, killed = random.Random(seed), 0
    first = wait_for(lambda: len(found := workers(flow)) == PROCESSES and found)
    while len(shards(store)) < until_shards:
        assert flow.poll() is None, "the flow ended"
        if killed < 3 and first:
            victim = first.pop(draw.randrange(len(first)))
            if victim.is_running():
                os.kill(victim.pid, signal.SIGKILL)
                killed += 1
        time.sleep(draw.uniform(0.2, 1.5))
    return killed


def test_workers_and_the_flow_may_be_killed_and_every_shard_is_captured_once(
    values: Values, tmp_path: Path, prefect_api: str
) -> None:
    quiet, store = tmp_path / "quiet-store", tmp_path / "store"
    alone = values | {"store": str(quiet), "capture": values["capture"] | {"gpus": 2}}
    with running(alone, tmp_path / "quiet", prefect_api):
        wait_for(lambda: len(shards(quiet)) == SHARDS)

    disturbed = values | {"store": str(store)}
    with running(disturbed, tmp_path / "killed", prefect_api) as flow:
        assert kill_some(flow, store, seed=1, until_shards=SHARDS // 4) > 0
    before = shards(store)
    assert SHARDS // 4 <= len(before) < SHARDS
    with running(disturbed, tmp_path / "again", prefect_api) as flow:
        assert kill_some(flow, store, seed=2, until_shards=SHARDS) > 0

    after = shards(store)
    assert {name: after[name] for name in before} == before  # none was captured again
    assert contents(store) == contents(quiet)
    log = (tmp_path / "again" / "log").read_text()
    done = ROWS_PER_SHARD * len(before)
    total = ROWS_PER_SHARD * SHARDS
    assert f"capture: {done} of {total} samples done, {total - done} to do" in log
