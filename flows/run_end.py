"""A run that failed or crashed leaves a page in Prefect: the stage, the cause and the next step."""

import logging
from typing import Any

from prefect import get_client
from prefect.client.schemas.actions import ArtifactCreate
from prefect.client.schemas.objects import FlowRun, State

from flows.run_records import record_of_flow_run

logger = logging.getLogger(__name__)

KEY = "run-end"


def explain_end(flow: Any, flow_run: FlowRun, state: State[Any]) -> None:  # noqa: ARG001 - Prefect names its arguments
    """Leave the artifact `run-end` with the flow run; a state hook for on_failure and on_crashed.

    After a crash the worker calls it, outside of any run.
    """
    if flow_run.parent_task_run_id is not None:
        return  # the run that called it has the page
    with get_client(sync_client=True) as client:
        client.create_artifact(
            ArtifactCreate(
                key=KEY,
                type="markdown",
                description=f"{state.name}: cause and next step",
                data=describe_end(flow_run, state),
                flow_run_id=flow_run.id,
            )
        )


def describe_end(flow_run: FlowRun, state: State[Any]) -> str:
    """Return the page as Markdown."""
    record = _record(flow_run)
    cause = (record or {}).get("error") or state.message or "nothing more is known"
    lines = [
        f"## {flow_run.name}: {state.name}",
        "",
        f"- **stage** {record['at'] if record and 'at' in record else 'before the first'}",
        f"- **cause** {' '.join(str(cause).split())}",
        f"- **next step** {_next_step(flow_run, state)}",
    ]
    if record:
        done = ", ".join(record["stages"]) or "none"
        lines += [f"- **stages done** {done}", f"- **record** {record['run']}"]
    return "\n".join(lines)


def _next_step(flow_run: FlowRun, state: State[Any]) -> str:
    if flow_run.parameters.get("plan"):
        return (
            "nothing, unless it comes again: the run that started this one submits its rows again"
        )
    again = "press *Retry* here or start the run again: all that is in the store is reused, and it goes on where it was"
    if state.is_crashed():
        return f"its process, worker or machine ended; see that a worker runs, then {again}"
    return f"mend the cause (the log below names the place), then {again}"


def _record(flow_run: FlowRun) -> dict[str, Any] | None:
    """The run's record in the store that its parameters name; the page is written without it too."""
    settings = flow_run.parameters.get("settings") or {}
    store = settings.get("store") if isinstance(settings, dict) else settings.store
    if (
        flow_run.parameters.get("plan") or store is None
    ):  # a part of another run, which has the record
        return None
    try:
        return record_of_flow_run(str(store), str(flow_run.id))
    except Exception as error:
        logger.warning("the record of %s could not be read: %s", flow_run.name, error)
        return None
