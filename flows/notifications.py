"""Who is told of runs that fail or crash: a notification block on the Prefect server, and the automation that sends.

The message is written by the server, so it also comes when the run's machine is gone.
"""

from datetime import timedelta
from uuid import UUID

from prefect.blocks.abstract import NotificationError
from prefect.blocks.notifications import SlackWebhook
from prefect.client.orchestration import SyncPrefectClient
from prefect.events.actions import SendNotification
from prefect.events.schemas.automations import AutomationCore, EventTrigger, Posture
from prefect.events.schemas.events import ResourceSpecification
from prefect.exceptions import ObjectNotFound

from flows.automations import apply_automation
from flows.run_record import STAGE_LABEL

BLOCK = "outrider-notify"
"""Name of the block that holds the URL: Prefect's for Slack, which takes any URL of Apprise, encrypted."""
SLUG = "slack-webhook"
NAME = "outrider: tell of runs that failed or crashed"
SUBJECT = "outrider: {{ flow_run.name }} {{ flow_run.state.name | lower }}"
BODY = f"""\
stage: {{{{ flow_run.labels['{STAGE_LABEL}'] or 'before the first' }}}}
cause: {{{{ flow_run.state.message or 'nothing more is known' }}}}
next step: {{% if flow.name == 'capture-states' -%}}
nothing, unless it comes again: the run that started it submits its rows again
{{%- elif flow_run.state.type.value == 'CRASHED' -%}}
see that a worker runs, then press Retry: all that is in the store is reused
{{%- else -%}}
mend the cause, then press Retry: all that is in the store is reused
{{%- endif %}}
{{{{ flow_run | ui_url }}}}"""


def apply_notifications(client: SyncPrefectClient, target: str) -> None:
    """Have `target` told of every run that fails or crashes: an Apprise URL, or a block as TYPE/NAME.

    A URL that is new gets a first message; RuntimeError when that does not arrive, or there is no such block.
    """
    block = _keep_url(client, target) if "://" in target else _find_block(client, target)
    apply_automation(client, tell_of_bad_ends(block))


def tell_of_bad_ends(block: UUID) -> AutomationCore:
    """A run of our deployments that fails or crashes is told of by the block; a run within it is not, once more."""
    related = (
        {"prefect.resource.id": name} for name in ("prefect.tag.outrider", "prefect.deployment.*")
    )
    return AutomationCore(
        name=NAME,
        description="make up makes it from OUTRIDER_NOTIFY; turn it off here.",
        enabled=True,
        trigger=EventTrigger(
            expect={"prefect.flow-run.Failed", "prefect.flow-run.Crashed"},
            match=ResourceSpecification.model_validate(
                {"prefect.resource.id": "prefect.flow-run.*"}
            ),
            match_related=[ResourceSpecification.model_validate(one) for one in related],
            posture=Posture.Reactive,
            threshold=1,
            within=timedelta(0),
        ),
        actions=[SendNotification(block_document_id=block, subject=SUBJECT, body=BODY)],
    )


def _keep_url(client: SyncPrefectClient, url: str) -> UUID:
    try:
        known = client.read_block_document_by_name(BLOCK, SLUG, include_secrets=True)
        if known.data.get("url") == url:
            return known.id
    except ObjectNotFound:
        pass
    block = SlackWebhook(url=url)
    try:
        with block.raise_on_failure():
            block.notify(
                "Runs of outrider that fail or crash are told of here.", "outrider: make up"
            )
    except NotificationError as error:
        raise RuntimeError(
            f"OUTRIDER_NOTIFY: the first message did not arrive ({' '.join(error.log.split()) or 'no such service'}); "
            "correct the URL (https://appriseit.com/services lists them) and run make up again; all else is up"
        ) from error
    saved = block.save(BLOCK, overwrite=True)
    return UUID(str(saved))


def _find_block(client: SyncPrefectClient, target: str) -> UUID:
    slug, _, name = target.partition("/")
    try:
        return client.read_block_document_by_name(name, slug).id
    except ObjectNotFound as error:
        raise RuntimeError(
            f"OUTRIDER_NOTIFY: the Prefect server has no block {target!r}: make it in the UI (Blocks), its name is "
            "TYPE/NAME such as slack-webhook/ops, or give an Apprise URL; all else is up"
        ) from error
