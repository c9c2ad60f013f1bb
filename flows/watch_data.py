"""The sensor: data or a verifier that no run was trained on yet -> an event, which the automation answers by a retrain.

python -m flows.watch_data SETTINGS.yaml

It compares with what was last *trained* on, not with what it saw last: an event that was lost is sent again.
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
from prefect.client.schemas.objects import State, StateType
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
    changes = now.changes_since(last_trained(Store(settings.store), settings.name))
    if not changes:
        return _said("NothingNew", f"{settings.name}: nothing new since the last training")
    new = "; ".join(changes)
    run = _retrain_under_way(now.digest)
    if run is not None:
        return _said("UnderWay", f"{settings.name}: {new}; the run {run} is to train on it")
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


def _retrain_under_way(fingerprint: str) -> str | None:
    """The name of a retrain of this very data that waits or runs."""
    with get_client(sync_client=True) as client:
        found = client.read_flow_runs(
            deployment_filter=DeploymentFilter(name=DeploymentFilterName(any_=[RETRAIN])),
            flow_run_filter=FlowRunFilter(
                state=FlowRunFilterState(type=FlowRunFilterStateType(any_=UNDER_WAY))
            ),
        )
    same = [run.name for run in found if run.parameters.get("fingerprint") == fingerprint]
    return same[0] if same else None


if __name__ == "__main__":
    from flows.settings import load_settings

    watch_data(load_settings(Path(sys.argv[1]), sys.argv[2:]))
