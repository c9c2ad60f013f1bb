"""New data -> a new draft: train on all there is, judge it beside the draft in service, promote the better one."""

import logging
from typing import Any, Literal

from prefect import flow
from prefect.client.schemas.objects import State
from prefect.states import Completed

from flows.run_end import explain_end
from flows.run_log import send_log_to_prefect
from flows.settings import PipelineSettings
from flows.train_draft import train_draft
from storage import artifacts, drafts
from storage.store import Store
from tasks.fingerprint import last_trained, take_fingerprint

logger = logging.getLogger(__name__)

StartFrom = Literal["scratch", "draft in service"]


@flow(
    name="retrain",
    flow_run_name="retrain {settings.name}",
    persist_result=False,
    on_failure=[explain_end],
    on_crashed=[explain_end],
)
def retrain(
    settings: PipelineSettings, start_from: StartFrom = "scratch", fingerprint: str | None = None
) -> dict[str, Any] | State[Any]:
    """Train a draft on data that has landed since the last training; ends at once when there is none.

    Only new samples are captured, both drafts are decoded on the same held-out prompts, and the better one is in
    service afterwards.

    Args:
        settings: what to train and on what; the event brings those that were watched.
        start_from: what training begins with; without a draft in service, or with train.init set, as the settings say.
        fingerprint: the data that the event told of; empty for a run by hand.

    Returns:
        The record of the training, or the state NothingNew.
    """
    send_log_to_prefect()
    store = Store(settings.store)
    now = take_fingerprint(settings.data, settings.verifier)
    draft = settings.promote.draft_of(settings.verifier)
    changes = now.changes_since(last_trained(store, settings.name, draft))
    if not changes:
        message = f"{settings.name}: nothing new since the last training (train-draft trains whatever there is)"
        logger.info(message)
        return Completed(name="NothingNew", message=message)
    logger.info("%s: %s", settings.name, "; ".join(changes))
    if fingerprint not in {None, now.digest}:
        logger.info("more has landed since the event: this run trains on all of it")
    if start_from == "draft in service":
        settings = _from_draft_in_service(store, settings, draft)
    return train_draft(settings)


def _from_draft_in_service(
    store: Store, settings: PipelineSettings, draft: str
) -> PipelineSettings:
    """The settings with train.init set to the speculator of the draft in service, if there is one."""
    now = drafts.current(store, draft)
    if now is None or settings.train.init is not None:
        return settings
    location = artifacts.location(store, artifacts.peek(store, now.speculator))
    logger.info("training starts from the draft of run %s, %s", now.run, location)
    train = settings.train.model_copy(update={"init": location})
    return settings.model_copy(update={"train": train})
