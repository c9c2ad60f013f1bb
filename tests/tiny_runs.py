"""Whole runs of the pipeline around a tiny verifier, by the command line or in this process."""

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import yaml

ROOT = Path(__file__).parent.parent
CONVERSATIONS, SEEN = 24, 18
TOPICS = ("the tide", "a lathe", "old maps", "rye bread", "a heron", "slate roofs")
STAGES = (
    "load_verifier", "collect", "tokenize_chats", "split", "map_vocab", "capture", "train",
    "evaluate", "export", "promote",
)  # fmt: skip
PLACES = {
    "load_verifier": "verifier",
    "collect": "conversations",
    "tokenize_chats": "samples",
    "capture": "states",
    "split": "split",
    "map_vocab": "vocab_map",
    "train": "checkpoints",
    "evaluate": "evaluation",
    "export": "speculator",
    "promote": "decision",
}
"""Stage -> its directory in the store."""

Values = dict[str, Any]


@dataclass(frozen=True)
class TinyRun:
    """A store, the settings that fill it, and what the run that filled it said."""

    values: Values
    store: Path
    result: Values
    log: str = ""

    def copy(self, directory: Path, *, without: Iterable[str] = ()) -> "TinyRun":
        """The same with a store of its own; `without` leaves out what these stages made.

        One process captures: on 2 cores starting a second one takes longer than its work.
        """
        store = directory / "store"
        shutil.copytree(self.store, store)
        for stage in without:
            for place in (PLACES[stage], *(["reference"] if stage == "evaluate" else [])):
                shutil.rmtree(store / place)
        values = self.changed(capture={"gpus": 1}) | {"store": str(store)}
        return TinyRun(values, store, self.result, self.log)

    def changed(self, **groups: Values) -> Values:
        """The settings with some of them changed: changed(train={"lr": 0.1})."""
        return self.values | {name: self.values.get(name, {}) | v for name, v in groups.items()}


def chat(number: int, *, source: str) -> Values:
    topic = TOPICS[number % len(TOPICS)]
    return {
        "source": source,
        "messages": [
            {"role": "user", "content": f"Say {number} words on {topic}."},
            {"role": "assistant", "content": f"On {topic} there is this and that to say."},
        ],
    }


def write_chats(path: Path, numbers: Iterable[int]) -> Path:
    chats = [chat(n, source="seen" if n < SEEN else "unseen") for n in numbers]
    path.write_text("".join(json.dumps(row) + "\n" for row in chats))
    return path


def tiny_values(directory: Path) -> Values:
    """Make a verifier and conversations in `directory`; returns settings for a run of seconds."""
    from tests.tiny_models import make_llama  # here, so that tests without models stay quick

    return {
        "name": "tiny",
        "store": str(directory / "store"),
        "verifier": {"model": str(make_llama(directory / "verifier"))},
        "data": {"sources": [str(write_chats(directory / "chats.jsonl", range(CONVERSATIONS)))]},
        "tokenize": {"max_tokens": 128},
        "capture": {"gpus": 2, "rows_per_shard": 8},
        "vocab": {"draft_size": 128},
        "split": {"val_ratio": 0.2, "holdout_sources": ["unseen"]},
        # a checkpoint after about every step
        "train": {"epochs": 2, "lr": 1e-3, "tokens_per_batch": 128, "checkpoint_seconds": 0.01},
        "evaluate": {"prompts": 4, "max_new_tokens": 12},
    }


def write_settings(values: Values, path: Path) -> Path:
    path.write_text(yaml.safe_dump(values))
    return path


def environment(home: Path, **variables: str) -> dict[str, str]:
    """Of a command line: no network, Prefect's files in `home`, and a server only if it is named."""
    plain = {name: value for name, value in os.environ.items() if name != "PREFECT_API_URL"}
    return {**plain, "HF_HUB_OFFLINE": "1", "PREFECT_HOME": str(home), **variables}


def outrider(
    *arguments: str | Path, env: dict[str, str], cwd: Path = ROOT
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        [sys.executable, "-m", "flows.cli", *map(str, arguments)],
        cwd=cwd,
        env={**env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def run_flow(values: Values, api: str) -> Values:
    """Run the flow in this process, on the Prefect server at `api`; returns the run's record."""
    from prefect.settings import PREFECT_API_URL, temporary_settings

    from flows.settings import parse_settings
    from flows.train_draft import train_draft

    with temporary_settings(updates={PREFECT_API_URL: api}):
        return train_draft(parse_settings(values))


def states(record: Values) -> dict[str, str]:
    """Stage -> computed or reused."""
    return {name: stage["state"] for name, stage in record["stages"].items()}


def computed(record: Values) -> list[str]:
    """Stages that were computed, in the order of the pipeline."""
    return [name for name in STAGES if record["stages"][name]["state"] == "computed"]


def manifests(store: Path, stage: str = "") -> dict[str, int]:
    """Path below the store -> time of change, of every manifest a stage made; a run may be writing others."""
    below = store / PLACES[stage] if stage else store
    found = [
        Path(directory, "manifest.json")
        for directory, _, files in os.walk(below)  # what vanishes on the way is passed over
        if "manifest.json" in files
    ]
    return {str(path.relative_to(store)): path.stat().st_mtime_ns for path in sorted(found)}


def read_metrics(file: Path) -> list[Values]:
    """The rows of a training's metrics table without its times, which differ from run to run."""
    import pyarrow.parquet as pq  # here, so that tests without tables stay quick

    rows: list[Values] = pq.read_table(file).to_pylist()
    times = {"seconds", "tokens_per_second"}
    return [{name: v for name, v in row.items() if name not in times} for row in rows]


def started_by(pid: int) -> list[psutil.Process]:
    """Processes that live and were started by the process `pid`, even when that has ended."""
    found = []
    for process in psutil.process_iter():
        try:
            ours = process.environ().get("OUTRIDER_PARENT_PID") == str(pid)
            if ours and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def job_of(pid: int, module: str) -> psutil.Process | None:
    """The process that does the job `module` for the process `pid`, if there is one."""
    for process in started_by(pid):
        try:
            if module in process.cmdline():
                return process
        except psutil.NoSuchProcess:
            continue
    return None


def wait_for(condition: Callable[[], Any], *, seconds: float = 240.0, every: float = 0.1) -> Any:
    """Ask for the condition `every` so many seconds until it holds; returns what it gave."""
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        found = condition()
        if found:
            return found
        time.sleep(every)
    raise AssertionError(f"nothing within {seconds} s")
