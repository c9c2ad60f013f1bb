"""Capture on many machines: each captures a part of the plan's rows, in a run of a deployment.

What has arrived, the store says; how far a run is and that it lives, its progress artifact on the Prefect server. Rows
of a run that ended or fell silent without all its shards are submitted again.
"""

import contextvars
import logging
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

from prefect import get_client
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.filters import (
    ArtifactFilter,
    ArtifactFilterFlowRunId,
    ArtifactFilterKey,
    FlowRunFilter,
    FlowRunFilterId,
)
from prefect.client.schemas.objects import FlowRun, StateType
from prefect.deployments import run_deployment
from prefect.exceptions import ObjectNotFound
from prefect.settings import PREFECT_API_URL
from prefect.states import Cancelling, Crashed

from storage.manifest import Manifest
from storage.row_ranges import RowRange
from storage.store import Store
from tasks.capture import CapturePlan, open_plan
from tasks.capture_settings import CaptureSettings
from tasks.child import JobFailedError
from tasks.load_verifier import Verifier
from tasks.progress import ProgressMeter
from tasks.verifier_sources import VerifierSettings, named_for_others

logger = logging.getLogger(__name__)

PROGRESS_KEY = "capture-progress"
SIGN_SECONDS = 10.0
"""Time between two signs of life of a run."""
POLL_SECONDS = 5.0
SILENT_SECONDS = {StateType.RUNNING: 90.0, StateType.PENDING: 1800.0}
"""Time without a sign after which a run counts as lost; one that is pending may be fetching its image."""
WAITING_SECONDS = 60.0
"""Time without a worker after which that is said."""
TRIES = 3
"""Runs in a row of the same rows that may end without a single new shard."""


def check_deployment(settings: CaptureSettings) -> None:
    """Raise ValueError when captures on other machines are asked for and there is no deployment for them."""
    if settings.nodes == 1:
        return
    with get_client(sync_client=True) as client:
        try:
            client.read_deployment_by_name(settings.deployment)
        except ObjectNotFound as error:
            raise ValueError(
                f"capture.nodes {settings.nodes} needs the deployment {settings.deployment}, and the Prefect server "
                f"{PREFECT_API_URL.value()} has none of that name: set PREFECT_API_URL to the server of your workers "
                "and deploy it there, as the README says, or set capture.nodes to 1"
            ) from error


def capture_on_nodes(
    store: Store,
    plan: Manifest,
    verifier: Verifier,
    settings: CaptureSettings,
    model: VerifierSettings,
) -> None:
    """Capture every shard of a plan in runs of `settings.deployment`; they are cancelled when this is stopped.

    Raises JobFailedError when some rows bring no shard, try after try.
    """
    work = open_plan(store, plan.path)
    lacking = work.missing(store, work.ranges)
    meter = ProgressMeter("capture", work.tokens(lacking), "tokens")
    parameters = {
        "store": store.url,
        "plan": plan.path,
        "verifier": verifier.manifest.path,
        "model": named_for_others(model).model_dump(mode="json"),
        "settings": settings.model_copy(update={"nodes": 1}).model_dump(mode="json"),
    }
    with get_client(sync_client=True) as client:
        nodes = _Nodes(client, settings.deployment, parameters, work)
        try:
            for ranges in cut_into_groups(work, lacking, settings.nodes):
                nodes.submit(ranges)
            while nodes.runs:
                time.sleep(POLL_SECONDS)
                for run, how in nodes.ended():
                    _take_over(nodes, run, work.missing(store, run.ranges), how=how)
                meter.set(nodes.tokens_done)
        finally:
            nodes.cancel()


def _take_over(
    nodes: "_Nodes", run: "_NodeRun", lacking: tuple[RowRange, ...], *, how: str
) -> None:
    """Submit again what a run that has ended did not bring."""
    nodes.tokens_brought += nodes.work.tokens(run.ranges) - nodes.work.tokens(lacking)
    if not lacking:
        return
    in_vain = run.in_vain + 1 if len(lacking) == len(run.ranges) else 0
    brought = (
        f"{len(lacking)} of the {len(run.ranges)} shards of its {run.rows} are not in the store"
    )
    if in_vain == TRIES:
        raise JobFailedError(
            f"capture: {in_vain} runs brought nothing of the {run.rows}; the last {how}; its log in Prefect says more"
        )
    logger.warning("capture: a run %s, and %s; they are submitted again", how, brought)
    nodes.submit(lacking, in_vain=in_vain)


def cut_into_groups(
    plan: CapturePlan, ranges: Sequence[RowRange], nodes: int
) -> list[tuple[RowRange, ...]]:
    """Cut row ranges, in order, into at most so many groups of about as many tokens."""
    groups: list[list[RowRange]] = [[] for _ in range(nodes)]
    total, before = plan.tokens(ranges), 0
    for rows in ranges:
        tokens = plan.tokens([rows])
        groups[nodes * (before + tokens // 2) // total].append(rows)
        before += tokens
    return [tuple(group) for group in groups if group]


@contextmanager
def signs_of_life(meter: ProgressMeter) -> Iterator[None]:
    """Show the progress of this flow run as an artifact, renewed all through the block: whoever waits sees it live."""
    shown: Any = create_progress_artifact(0.0, key=PROGRESS_KEY, description="Captured tokens")
    ended = threading.Event()

    def renew() -> None:
        while not ended.wait(SIGN_SECONDS):
            try:
                update_progress_artifact(shown, meter.percent)
            except Exception as error:
                logger.debug("no sign of life was given: %s", error)

    thread = threading.Thread(target=contextvars.copy_context().run, args=(renew,), daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
        update_progress_artifact(shown, meter.percent)


@dataclass
class _NodeRun:
    """A run of the deployment, and the shards that it is to bring."""

    id: UUID
    ranges: tuple[RowRange, ...]
    in_vain: int
    """Runs before it, in a row, that brought none of these shards."""
    percent: float = 0.0
    sign: Any = None
    """What was last seen of it: when that changes, it lives."""
    seen: float = field(default_factory=time.monotonic)
    waits: bool = False

    @property
    def rows(self) -> RowRange:
        """Rows of the plan from its first to its last shard."""
        return RowRange(self.ranges[0].start, self.ranges[-1].stop)


class _Nodes:
    """The runs of a deployment that capture parts of one plan."""

    def __init__(
        self,
        client: SyncPrefectClient,
        deployment: str,
        parameters: dict[str, Any],
        work: CapturePlan,
    ) -> None:
        self._client, self._deployment, self._parameters = client, deployment, parameters
        self.work = work
        self.runs: list[_NodeRun] = []
        self.tokens_brought = 0

    @property
    def tokens_done(self) -> float:
        """Tokens in the store, and those of the runs' shards in the making."""
        making = (self.work.tokens(run.ranges) * run.percent / 100 for run in self.runs)
        return self.tokens_brought + sum(making)

    def submit(self, ranges: tuple[RowRange, ...], *, in_vain: int = 0) -> None:
        """Start a run for these shards, which a worker takes up when it is free."""
        rows = RowRange(ranges[0].start, ranges[-1].stop)
        made: Any = run_deployment(
            self._deployment,
            parameters={**self._parameters, "rows": [rows.start, rows.stop]},
            flow_run_name=f"capture {rows}",
            timeout=0,
        )
        self.runs.append(_NodeRun(made.id, ranges, in_vain))

    def ended(self) -> list[tuple[_NodeRun, str]]:
        """Take out the runs that have ended or are lost, with how that came."""
        ids = [run.id for run in self.runs]
        found = self._client.read_flow_runs(
            flow_run_filter=FlowRunFilter(id=FlowRunFilterId(any_=ids))
        )
        flow_runs = {flow_run.id: flow_run for flow_run in found}
        progress = self._progress(ids)
        ended = []
        for run in self.runs:
            how = self._end_of(run, flow_runs.get(run.id), progress.get(run.id))
            if how is not None:
                ended.append((run, how))
        self.runs = [run for run in self.runs if all(run is not other for other, _ in ended)]
        return ended

    def cancel(self) -> None:
        """Ask for the end of all runs that have not ended."""
        for run in self.runs:
            self._client.set_flow_run_state(run.id, Cancelling())
        self.runs = []

    def _end_of(self, run: _NodeRun, flow_run: FlowRun | None, progress: Any) -> str | None:
        """How a run has ended; None while it goes on."""
        if flow_run is None or flow_run.state is None:
            return "was deleted"
        state = flow_run.state
        if state.is_final():
            return f"ended as {state.name}" + (f" ({state.message})" if state.message else "")
        sign = (state.id, progress and progress.updated)
        if sign != run.sign:
            run.sign, run.seen = sign, time.monotonic()
        run.percent = float(progress.data) if progress else 0.0
        silent = time.monotonic() - run.seen
        if state.is_scheduled() and silent > WAITING_SECONDS and not run.waits:
            run.waits = True
            logger.warning(
                "capture: %s waits for a worker of the work pool %s (prefect worker start)",
                flow_run.name, flow_run.work_pool_name,
            )  # fmt: skip
        if silent > SILENT_SECONDS.get(state.type, float("inf")):
            gone = f"gave no sign of life for {silent:.0f} s"
            self._client.set_flow_run_state(run.id, Crashed(message=gone))
            return gone
        return None

    def _progress(self, ids: Sequence[UUID]) -> dict[UUID, Any]:
        found = self._client.read_artifacts(
            artifact_filter=ArtifactFilter(
                flow_run_id=ArtifactFilterFlowRunId(any_=list(ids)),
                key=ArtifactFilterKey(any_=[PROGRESS_KEY]),
            )
        )
        return {artifact.flow_run_id: artifact for artifact in found if artifact.flow_run_id}
