"""What the Prefect server does by itself: landed data starts a retrain, a run that fell silent is marked as crashed,
a cancellation that nobody carries out is final.
"""

from datetime import timedelta

from prefect.client.orchestration import SyncPrefectClient
from prefect.client.schemas.objects import StateType
from prefect.events.actions import ChangeFlowRunState, RunDeployment
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification

from flows.watch_data import EVENT, RESOURCE, RETRAIN

SILENT = timedelta(seconds=90)
"""Time without a heartbeat (each 30 s) after which a run is lost."""
OUR_FLOWS = {
    "prefect.resource.role": "flow",
    "prefect.resource.name": ["train-draft", "capture-states", "watch-data", "retrain"],
}
"""A server may have others' runs too. Runs within runs are meant as well; these have no tags."""
HEARTBEAT = "prefect.flow-run.heartbeat"
CANCELLING = "prefect.flow-run.Cancelling"
STUCK = timedelta(seconds=60)
"""Time that a worker has to end a run that is cancelled."""
FINAL = (
    *("Completed", "Failed", "Crashed", "Cancelled"),
    *("NothingNew", "UnderWay", "OnHold", "DataLanded"),
)
"""Names of final states, our flows' own with them: their events are called by them."""
ENDS = (*FINAL, "Cancelling", "Paused", "Suspended")
LOST = (
    f"gave no sign of life for {SILENT.seconds} s: its process, worker or machine was lost; see that a worker runs, "
    "then press Retry: all that is in the store is reused"
)
UNENDED = (
    f"no worker ended it within {STUCK.seconds} s of the request: it was cancelled before it began, or its worker is "
    "lost; Retry goes on with it"
)


def retrain_on_data(client: SyncPrefectClient) -> AutomationCore:
    """The event of watch-data starts the deployment retrain with the settings that it brings."""
    deployment = client.read_deployment_by_name(f"{RETRAIN}/{RETRAIN}")
    return AutomationCore(
        name="outrider: retrain when data has landed",
        description=f"{EVENT} starts {RETRAIN}; runs wait for each other.",
        enabled=True,
        trigger=EventTrigger(
            expect={EVENT},
            match=ResourceSpecification.model_validate({"prefect.resource.id": f"{RESOURCE}.*"}),
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[
            RunDeployment(
                source="selected",
                deployment_id=deployment.id,
                parameters={
                    "settings": _from_event("{{ event.payload.settings | tojson }}"),
                    "fingerprint": _from_event("{{ event.payload.fingerprint | tojson }}"),
                },
            )
        ],
    )


def crash_silent_runs() -> AutomationCore:
    """A run whose heartbeats stop before it has ended is marked as crashed."""
    return _unless_it_goes_on(
        name="outrider: a run that fell silent has crashed",
        description="For runs with PREFECT_FLOWS_HEARTBEAT_FREQUENCY, as those of outrider's deployments.",
        after=HEARTBEAT,
        expect={HEARTBEAT, *_events(*ENDS)},
        within=SILENT,
        action=ChangeFlowRunState(state=StateType.CRASHED, name="Crashed", message=LOST),
    )


def end_stuck_cancellations() -> AutomationCore:
    """A run that is cancelled before its worker has a process to end would stay so, and block those that wait."""
    return _unless_it_goes_on(
        name="outrider: a cancellation that no worker carries out is final",
        description="So that the runs that wait for its place go on.",
        after=CANCELLING,
        expect=_events(*FINAL),
        within=STUCK,
        action=ChangeFlowRunState(state=StateType.CANCELLED, name="Cancelled", message=UNENDED),
    )


def apply_automations(client: SyncPrefectClient) -> None:
    """Create the automations, or bring them up to date."""
    for wanted in (retrain_on_data(client), crash_silent_runs(), end_stuck_cancellations()):
        apply_automation(client, wanted)


def apply_automation(client: SyncPrefectClient, wanted: AutomationCore) -> None:
    """Create an automation, or bring it up to date; one that was turned off in the UI stays off.

    One that is as wanted is not touched: an update makes the server forget which runs it waits for.
    """
    found = client.read_automations_by_name(wanted.name)
    if not found:
        client.create_automation(wanted)
        return
    as_before = wanted.model_copy(update={"enabled": found[0].enabled})
    if AutomationCore.model_validate(found[0].model_dump(exclude={"id"})) != as_before:
        client.update_automation(found[0].id, as_before)


def _from_event(template: str) -> dict[str, object]:
    """A parameter that the server reads as JSON out of the event."""
    return {"__prefect_kind": "json", "value": {"__prefect_kind": "jinja", "template": template}}


def _unless_it_goes_on(
    *,
    name: str,
    description: str,
    after: str,
    expect: set[str],
    within: timedelta,
    action: ChangeFlowRunState,
) -> AutomationCore:
    """Change the state of a run of ours for which, after the one event, none of the others has come in time."""
    return AutomationCore(
        name=name,
        description=description,
        enabled=True,
        trigger=EventTrigger(
            after={after},
            expect=expect,
            match=ResourceSpecification.model_validate(
                {"prefect.resource.id": "prefect.flow-run.*"}
            ),
            match_related=ResourceSpecification.model_validate(OUR_FLOWS),
            for_each={"prefect.resource.id"},
            posture=Posture.Proactive,
            threshold=1,
            within=within,
        ),
        actions=[action],
    )


def _events(*states: str) -> set[str]:
    """The events of runs that come into these states."""
    return {f"prefect.flow-run.{name}" for name in states}
