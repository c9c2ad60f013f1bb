"""The sensor: data or a verifier that no run was trained on yet -> an event, which the automation answers by a retrain.

python -m flows.watch_data SETTINGS.yaml

It compares with what was last *trained* on, not with what it saw last: an event that was lost is sent again. It ends as
NothingNew, DataLanded (the event was sent), UnderWay (a retrain of that data waits or runs) or OnHold (one was
cancelled, or three have failed).
"""

import logging
import sys
from pathlib import Path
from typing import Any

from prefect import flow, get_client
from prefect.artifacts import create_markdown_artifact
from prefect.client.schemas.filters import (
    DeploymentFilter,
    DeploymentFilterName,
    FlowRunFilter,
    FlowRunFilterState,
    FlowRunFilterStateType,
)
from prefect.client.schemas.objects import FlowRun, State, StateType
from prefect.client.schemas.sorting import FlowRunSort
from prefect.events import emit_event
from prefect.states import Completed

from flows.run_end import explain_end
from flows.run_log import send_log_to_prefect
from flows.settings import PipelineSettings
from storage.store import Store
from tasks.fingerprint import last_trained, take_fingerprint

logger = logging.getLogger(__name__)

EVENT = "outrider.data.landed"
RESOURCE = "outrider.settings"
"""Prefix of the resource that an event is about: the settings, by their name."""
RETRAIN = "retrain"
UNDER_WAY = [StateType.SCHEDULED, StateType.PENDING, StateType.RUNNING]
FAILURES = 3
"""Retrains of the same data that may fail; a crashed one does not count: the next starts where it was."""
STOPPED_BY_DOWN = "outrider.stopped-by-make-down"
"""Label of runs that make down cancelled: nobody meant that their data should not be trained on."""


@flow(
    name="watch-data",
    flow_run_name="watch-data {settings.name}",
    persist_result=False,
    on_failure=[explain_end],
    on_crashed=[explain_end],
)
def watch_data(settings: PipelineSettings) -> State[Any]:
    """Look at the sources and the verifier, and send an event when they are not what the last run was trained on.

    Args:
        settings: whose data to watch; a retrain that the event starts gets the same.
    """
    send_log_to_prefect()
    now = take_fingerprint(settings.data, settings.verifier)
    draft = settings.promote.draft_of(settings.verifier)
    changes = now.changes_since(last_trained(Store(settings.store), settings.name, draft))
    if not changes:
        return _said("NothingNew", f"{settings.name}: nothing new since the last training")
    new = "; ".join(changes)
    runs = _retrains_of(now.digest, settings)
    for run in runs:
        if run.state_type in UNDER_WAY:
            return _said(
                "UnderWay", f"{settings.name}: {new}; the run {run.name} is to train on it"
            )
    held = _why_on_hold(runs, settings)
    if held:
        return _said("OnHold", f"{settings.name}: {new}; {held}")
    emit_event(
        EVENT,
        resource={
            "prefect.resource.id": f"{RESOURCE}.{settings.name}",
            "prefect.resource.name": settings.name,
            "outrider.store": settings.store,
        },
        payload={
            "settings": settings.model_dump(mode="json"),
            "fingerprint": now.digest,
            "changes": changes,
        },
    )
    return _said("DataLanded", f"{settings.name}: {new}; the event {EVENT} was sent")


def _said(name: str, message: str) -> State[Any]:
    logger.info(message)
    create_markdown_artifact(key="watch-data", markdown=message, description=name)
    return Completed(name=name, message=message)


def _retrains_of(fingerprint: str, settings: PipelineSettings) -> list[FlowRun]:
    """The retrains of this very data, for this draft, that have not completed; the newest first."""
    own = settings.model_dump(mode="json", include={"name", "store", "verifier"})
    wanted = [*UNDER_WAY, StateType.FAILED, StateType.CANCELLED]
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[RETRAIN])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=wanted))
            ),
            sort=FlowRunSort.EXPECTED_START_TIME_DESC,
        )
    return [
        run
        for run in found
        if run.parameters.get("fingerprint") == fingerprint
        and {key: run.parameters["settings"].get(key) for key in own} == own
    ]


def _why_on_hold(runs: list[FlowRun], settings: PipelineSettings) -> str | None:
    """Why no run is started: with these settings it was cancelled by hand, or failed time and again."""
    same = [run for run in runs if run.parameters["settings"] == settings.model_dump(mode="json")]
    again = "press Retry on its page, or start retrain by hand"
    for run in same[:1]:
        if run.state_type == StateType.CANCELLED and not run.labels.get(STOPPED_BY_DOWN):
            return f"the run {run.name} that was to train on it was cancelled: {again}"
    if [run.state_type for run in same[:FAILURES]] == [StateType.FAILED] * FAILURES:
        return f"{FAILURES} runs that were to train on it failed: mend the cause, then {again}"
    return None


if __name__ == "__main__":
    from flows.settings import load_settings

    watch_data(load_settings(Path(sys.argv[1]), sys.argv[2:]))
