"""The deployment of prefect.yaml on a real Prefect server, run by a real process worker."""

import itertools
import json
import os
import pty
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tasks.processes import die_with_parent
from tests.prefect_api import ask
from tests.tiny_models import make_llama
from tests.tiny_runs import wait_for

ROOT = Path(__file__).parents[2]
NAME = "train-draft/train-draft"
STAGES = [
    "load_verifier", "collect", "tokenize_chats", "capture", "split", "map_vocab", "train",
    "evaluate", "export", "promote",
]  # fmt: skip
SHARDS = ["capture rows [0, 8)", "capture rows [8, 16)"]
INFO = 20

pytestmark = pytest.mark.slow


@dataclass(frozen=True)
class Site:
    """A server with the deployment and a worker, and the settings of a tiny run."""

    url: str
    environment: dict[str, str]
    settings: dict[str, Any]
    deploy_output: str

    def get(self, path: str) -> Any:
        return ask("GET", f"{self.url}{path}")

    def post(self, path: str, body: dict[str, Any]) -> Any:
        return ask("POST", f"{self.url}{path}", body)

    def start(self, **changes: Any) -> str:
        """Start a run of the deployment; returns its id."""
        deployment = self.get(f"/deployments/name/{NAME}")["id"]
        parameters = {"settings": self.settings | changes}
        run = self.post(f"/deployments/{deployment}/create_flow_run", {"parameters": parameters})
        return str(run["id"])

    def run(self, run_id: str) -> dict[str, Any]:
        found: dict[str, Any] = self.get(f"/flow_runs/{run_id}")
        return found

    def finish(self, run_id: str, *, seconds: float) -> dict[str, Any]:
        """Wait for the final state of a run; returns the run."""
        final = {"COMPLETED", "FAILED", "CRASHED", "CANCELLED"}
        wait_for(lambda: self.run(run_id)["state_type"] in final, seconds=seconds)
        return self.run(run_id)

    def child_runs(self, run_id: str) -> list[dict[str, Any]]:
        only = {"flow_runs": {"parent_flow_run_id": {"any_": [run_id]}}}
        return list(self.post("/flow_runs/filter", only))

    def task_states(self, run_id: str) -> dict[str, str]:
        """State name of each task run, by the task run's name."""
        only = {"flow_runs": {"id": {"any_": [run_id]}}}
        return {t["name"]: t["state_name"] for t in self.post("/task_runs/filter", only)}

    def lines(self, run_id: str) -> list[str]:
        """Messages of a run's log at INFO."""
        only = {"logs": {"flow_run_id": {"any_": [run_id]}, "level": {"ge_": INFO}}}
        pages = (self.post("/logs/filter", {**only, "offset": 200 * i}) for i in itertools.count())
        found = itertools.chain(*itertools.takewhile(bool, pages))
        return [r["message"] for r in found if r["level"] == INFO]

    def artifacts(self, run_id: str) -> dict[str, dict[str, Any]]:
        only = {"artifacts": {"flow_run_id": {"any_": [run_id]}}}
        return {a["key"]: a for a in self.post("/artifacts/filter", only)}

    def processes(self) -> list[str]:
        """Command lines of the runs' processes, children too: all that inherited our PREFECT_HOME."""
        mark = f"PREFECT_HOME={self.environment['PREFECT_HOME']}".encode()
        found = []
        for directory in Path("/proc").glob("[0-9]*"):
            try:
                command = (directory / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                ours = mark in (directory / "environ").read_bytes().split(b"\0")
            except OSError:  # it has just ended
                continue
            if ours and re.search(r"tasks\.child|prefect\.engine", command):
                found.append(command)
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """Server, work pool, deployment and worker, as the README sets them up."""
    home = tmp_path_factory.mktemp("deployment")
    port = free_port()
    url = f"http://127.0.0.1:{port}/api"
    kept = {k: v for k, v in os.environ.items() if not k.startswith("PREFECT_")}
    environment = {
        **kept,
        "PREFECT_HOME": str(home / "prefect"),
        "PREFECT_API_URL": url,
        "PREFECT_SERVER_ANALYTICS_ENABLED": "false",
        "PREFECT_WORKER_QUERY_SECONDS": "1",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
    }
    server = start([*PREFECT, "server", "start", "--no-ui", f"--port={port}"], home, environment)
    worker = None
    try:
        settings = tiny_settings(home)
        wait_for(lambda: healthy(url), seconds=120)
        create = [*PREFECT, "work-pool", "create", "outrider", "--type", "process"]
        subprocess.run(create, env=environment, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        worker = start([*PREFECT, "worker", "start", "--pool=outrider"], home, environment)
        said = run_in_terminal([*PREFECT, "deploy", "--all"], environment)
        yield Site(url, environment, settings, said)
    finally:
        for process in filter(None, (worker, server)):
            stop(process)


@pytest.fixture(scope="module")
def first(site: Site) -> str:
    """Id of a run that the worker has completed, on an empty store."""
    run_id = site.start()
    assert site.finish(run_id, seconds=240)["state_name"] == "Completed"
    return run_id


def test_deploying_in_a_terminal_asks_no_question(site: Site) -> None:
    assert f"'{NAME}' successfully created" in site.deploy_output
    assert "[y/n]" not in site.deploy_output


def test_the_worker_runs_where_the_deployment_was_made(site: Site) -> None:
    steps = site.get(f"/deployments/name/{NAME}")["pull_steps"]

    assert steps == [
        {"prefect.deployments.steps.set_working_directory": {"directory": str(ROOT.resolve())}}
    ]


def test_the_form_has_titles_descriptions_and_plain_defaults(site: Site) -> None:
    schema = site.get(f"/deployments/name/{NAME}")["parameter_openapi_schema"]

    assert schema["required"] == ["settings"]
    assert schema["properties"]["settings"]["description"].startswith("what to train")
    boxes = schema["definitions"]["PipelineSettings"]["properties"]
    assert {name: box["title"] for name, box in boxes.items()}["vocab"] == "Vocabulary"
    for box in schema["definitions"].values():
        assert box["description"]
        for key, field in box["properties"].items():
            assert field.get("title"), key
            assert "$ref" in field or field.get("description"), key
            assert key in box.get("required", []) or "default" in field, key
    train = schema["definitions"]["TrainSettings"]["properties"]["lr"]
    assert (train["default"], boxes["train"]["default"]["lr"]) == (3e-5, 3e-5)


def test_unknown_settings_are_refused_before_a_run_is_made(site: Site) -> None:
    with pytest.raises(httpx.HTTPStatusError, match="409"):
        site.start(trian={"epochs": 1})


def test_each_stage_and_each_shard_is_a_task_run_with_a_name(site: Site, first: str) -> None:
    (captured,) = site.child_runs(first)

    assert site.run(first)["name"] == "train-draft tiny"
    assert captured["name"] == "capture 16 samples"
    states = site.task_states(first)
    assert {states[stage] for stage in STAGES} == {"Completed"}
    assert site.task_states(captured["id"]) == dict.fromkeys(SHARDS, "Completed")


def test_lines_of_stages_and_children_are_in_the_log_of_the_run(site: Site, first: str) -> None:
    # the log is sent in batches: the last one may arrive after the final state
    def computed() -> set[str]:
        found = (re.match(r"(\w+): computed, \d+ rows", x) for x in site.lines(first))
        return {match[1] for match in found if match}

    wait_for(lambda: computed() >= set(STAGES), seconds=60)
    lines = site.lines(first)

    assert "capture: 0 of 16 samples done, 16 to do in 2 shards, 0 quarantined" in lines
    assert [x for x in lines if re.match(r"\[train \d+\] .* M parameters", x)]
    (captured,) = site.child_runs(first)
    assert [x for x in site.lines(captured["id"]) if x.startswith("capture: ") and "tokens" in x]


def test_artifacts_show_what_each_stage_made(site: Site, first: str) -> None:
    artifacts = site.artifacts(first)

    for stage in STAGES:
        shown = artifacts[f"stage-{stage.replace('_', '-')}"]
        assert shown["type"] == "markdown"
        assert shown["data"].startswith(f"## {stage}: computed")
    assert artifacts["stages"]["type"] == "table"
    rows = json.loads(artifacts["stages"]["data"])
    assert {row["stage"]: row["state"] for row in rows} == dict.fromkeys(STAGES, "computed")


def test_in_a_second_run_every_stage_is_reused(site: Site, first: str) -> None:
    second = site.start()
    assert site.finish(second, seconds=60)["state_name"] == "Completed"

    states = site.task_states(second)
    assert {stage: states[stage] for stage in STAGES} == dict.fromkeys(STAGES, "Reused")
    assert not site.child_runs(second)


def test_the_module_runs_the_same_flow_on_a_settings_file(
    site: Site, first: str, tmp_path: Path
) -> None:
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(site.settings))
    command = [sys.executable, "-m", "flows.train_draft", str(file), "--json"]
    done = subprocess.run(
        command, env=site.environment, cwd=ROOT, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])
    assert {entry["state"] for entry in result["stages"].values()} == {"reused"}
    (run,) = self_started(site)
    assert (run["name"], run["state_name"]) == ("train-draft tiny", "Completed")
    assert [x for x in site.lines(run["id"]) if x.startswith("export: reused")]


def test_cancelling_a_run_leaves_no_process(site: Site, first: str) -> None:
    endless = site.start(train=site.settings["train"] | {"epochs": 10_000})
    wait_for(lambda: any(x.startswith("[train ") for x in site.lines(endless)), seconds=90)
    assert [x for x in site.processes() if "tasks.jobs.train" in x]

    cancelling = {"state": {"type": "CANCELLING", "name": "Cancelling"}}
    site.post(f"/flow_runs/{endless}/set_state", cancelling)
    wait_for(lambda: not site.processes(), seconds=20)
    assert site.finish(endless, seconds=40)["state_name"] == "Cancelled"


PREFECT = [sys.executable, "-m", "prefect"]


def tiny_settings(home: Path) -> dict[str, Any]:
    """Settings of a run of seconds: 16 conversations, 2 shards, a tiny Llama."""
    chats = [
        {
            "source": "unseen" if i % 4 == 3 else "seen",
            "messages": [
                {"role": "user", "content": f"what is {i} times {i}?"},
                {"role": "assistant", "content": f"{i} times {i} is {i * i}, as it was before"},
            ],
        }
        for i in range(16)
    ]
    source = home / "chats.jsonl"
    source.write_text("\n".join(json.dumps(chat) for chat in chats))
    return {
        "name": "tiny",
        "store": str(home / "store"),
        "verifier": {"model": str(make_llama(home / "verifier"))},
        "data": {"sources": [str(source)]},
        "tokenize": {"max_tokens": 96},
        "capture": {"rows_per_shard": 8},
        "vocab": {"draft_size": 128},
        "split": {"holdout_sources": ["unseen"]},
        "train": {"epochs": 1, "tokens_per_batch": 256},
        "evaluate": {"prompts": 2, "max_new_tokens": 8},
    }


def self_started(site: Site) -> list[dict[str, Any]]:
    """Runs of the flow that no deployment and no other run started."""
    only = {
        "flow_runs": {
            "deployment_id": {"is_null_": True},
            "parent_task_run_id": {"is_null_": True},
        }
    }
    return list(site.post("/flow_runs/filter", only))


def start(command: list[str], home: Path, environment: dict[str, str]) -> "subprocess.Popen[bytes]":
    """Start a process that ends with this one; its output goes to a file of its own in `home`."""
    log = home / f"{command[len(PREFECT)]}.log"
    with log.open("wb") as out:
        return subprocess.Popen(
            command,
            env=environment,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            preexec_fn=die_with_parent,  # noqa: PLW1509 - one prctl and getppid
        )


def stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(timeout=15)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def run_in_terminal(command: list[str], environment: dict[str, str]) -> str:
    """Run a command whose stdin and stdout are a terminal on which nobody types; returns what it printed."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        command,
        env=environment | {"TERM": "dumb", "COLUMNS": "200"},
        cwd=ROOT,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
    )
    os.close(theirs)
    said = b""
    try:
        while b"[y/n]" not in said:
            said += os.read(ours, 4096)
    except OSError:  # the other side has closed
        process.wait(timeout=60)
    finally:
        process.kill()
        process.wait()
        os.close(ours)
    return said.decode()


def healthy(url: str) -> bool:
    try:
        return httpx.get(f"{url}/health", timeout=5).status_code == 200
    except httpx.HTTPError:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
