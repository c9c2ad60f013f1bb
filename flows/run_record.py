"""The record of one run in the store, and the tables that Prefect's UI shows of it."""

import logging
import os
import socket
import time
import uuid
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any

from prefect import Task, get_client, runtime
from prefect.artifacts import create_markdown_artifact, create_table_artifact
from prefect.context import FlowRunContext
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.settings import PipelineSettings
from flows.stage_page import describe_data, describe_stage
from storage.layout import run_record
from storage.store import Store, StoreError
from tasks.data_summary import summarize_data
from tasks.fingerprint import Fingerprint, record_trained
from tasks.stage import StageResult, announce

logger = logging.getLogger(__name__)

STAGE_LABEL = "outrider.stage"
"""Label of a flow run with the stage that it is at: what the server knows of a run that has gone."""


class RunRecord:
    """Runs the stages of one run, in order, and writes down after each what became of it."""

    def __init__(self, store: Store, settings: PipelineSettings, run_id: str | None = None) -> None:
        self.run_id = run_id or new_run_id()
        self._store = store
        self._started = time.monotonic()
        self._begun = self._started
        self.record: dict[str, Any] = {
            "run": self.run_id,
            "name": settings.name,
            "state": "running",
            "flow_run": root_flow_run(),
            "process": {"host": socket.gethostname(), "pid": os.getpid()},
            "started_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "settings": settings.model_dump(mode="json"),
            "at": "the start",
            "stages": {},
            "making": [],
            "speculator": None,
            "acceptance_length": None,
        }
        self._save()

    def stage(self, task: Task[..., Any], *args: Any, **kwargs: Any) -> StageResult:
        """Run one stage's task to its end and return its result."""
        if self.record["at"] != task.name:
            self.begin(task.name)
        telling = announce.set(self.making)
        try:
            result: StageResult = task.submit(*args, **kwargs).result()
        finally:
            announce.reset(telling)
        return self.done(task.name, result, time.monotonic() - self._begun)

    def begin(self, name: str) -> None:
        """Note that the work of a stage begins, before its task does where there is more to it."""
        self.record["at"] = name
        self._save()
        label_stage(self.record["flow_run"], name)
        self._begun = time.monotonic()

    def making(self, paths: list[str]) -> None:
        """Note what the stage under way is making: should the run end here, the next one goes on with it."""
        self.record["making"] = paths
        self._save()

    def begin_again(self) -> None:
        """Note that all stages are gone through once more."""
        self.record["at"] = "the start"

    def done(self, name: str, result: StageResult, seconds: float) -> StageResult:
        """Write a stage's result down and show it; what this run itself computed before stays so."""
        before = self.record["stages"].get(name)
        if before is not None and result.reused and before["key"] == result.key:
            return result
        state = "reused" if result.reused else "computed"
        entry = {
            "state": state,
            "seconds": round(seconds, 2),
            "key": result.key,
            "rows": result.rows,
            "parts": [part.path for part in result.parts],
        }
        self.record["stages"][name] = entry
        self.record["making"] = []
        self._save()
        logger.info(
            "%s: %s, %s rows, %.1f s, key %s",
            name,
            state,
            f"{result.rows:,}",
            seconds,
            result.key[:12],
        )
        _show(
            create_markdown_artifact,
            key=f"stage-{name.replace('_', '-')}",
            markdown=describe_stage(self._store, name, entry, result),
            description=f"{name}: {state}",
        )
        return result

    def show_data(
        self,
        conversations: StageResult,
        samples: StageResult,
        split: StageResult,
        vocab: StageResult,
    ) -> None:
        """Show what the run learns from, before anything costly begins."""
        data = summarize_data(
            self._store,
            conversations=conversations.parts,
            samples=samples.parts,
            split=split.parts[0],
            vocab=vocab.parts[0],
        )
        _show(
            create_markdown_artifact,
            key="data-report",
            markdown=describe_data(data),
            description="What this run learns from: sources, lengths, samples, vocabulary coverage",
        )

    def finish(
        self,
        *,
        speculator: str,
        acceptance: dict[str, Any],
        promotion: dict[str, Any],
        trained_on: Fingerprint,
    ) -> dict[str, Any]:
        """Close the record of a run that went through; returns it."""
        self.record |= {
            "state": "completed",
            "speculator": speculator,
            "acceptance_length": acceptance["after"]["acceptance_length"],
            "acceptance": acceptance,
            "promotion": promotion,
        }
        del self.record["at"]
        self._close()
        name, draft = self.record["name"], promotion["draft"]
        record_trained(self._store, name, draft, trained_on, run=self.run_id)
        _show(
            create_table_artifact,
            key="stages",
            table=[
                {"stage": name, **{k: entry[k] for k in ("state", "rows", "seconds", "key")}}
                for name, entry in self.record["stages"].items()
            ],
            description=f"Run {self.run_id}: acceptance length {self.record['acceptance_length']}",
        )
        return self.record

    def fail(self, error: BaseException) -> None:
        """Close the record of a run that broke or was stopped (Ctrl-C, SIGTERM, cancelled in the UI)."""
        if isinstance(error, Exception):
            self.record |= {"state": "failed", "error": f"{type(error).__name__}: {error}"}
        else:
            self.record |= {"state": "stopped", "error": f"stopped by {type(error).__name__}"}
        try:
            self._close()
        except StoreError as problem:  # the run's own error is the one to be seen
            logger.warning("the record of the run stays as it was: %s", problem)

    def _close(self) -> None:
        self.record["seconds"] = round(time.monotonic() - self._started, 1)
        self._save()

    def _save(self) -> None:
        self._store.write_json(run_record(self.run_id), self.record)


def root_flow_run() -> str | None:
    """The id of the flow run that Prefect's UI lists: of this one, or of the one that called it."""
    context = FlowRunContext.get()
    if context is None or context.flow_run is None:
        return None
    return str(runtime.flow_run.root_flow_run_id)


def label_stage(flow_run: str | None, stage: str) -> None:
    """Show the stage as a label of the flow run."""
    if flow_run is not None:
        _show(_label, flow_run, {STAGE_LABEL: stage})


def _label(flow_run: str, labels: dict[str, bool | int | float | str]) -> None:
    with get_client(sync_client=True) as client:
        client.update_flow_run_labels(uuid.UUID(flow_run), labels)


def _show(tell: Callable[..., Any], *what: Any, **page: Any) -> None:
    """Tell the server what is for people to see; where it is away that costs a run seconds, and not its work."""
    try:
        with temporary_settings(updates={PREFECT_CLIENT_MAX_RETRIES: 1}):
            tell(*what, **page)
    except Exception as error:
        logger.warning("%s is not shown in Prefect: %s", page.get("key") or what[-1], error)


def new_run_id() -> str:
    """Return an id that sorts by time."""
    return f"{datetime.now(UTC):%Y%m%d-%H%M%S}-{uuid.uuid4().hex[:6]}"
