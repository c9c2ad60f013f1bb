"""Stage tokenize_chats: conversations -> token ids and loss masks, by the verifier's own chat template."""

import logging
from collections import Counter

from pydantic import PositiveInt

from storage.artifacts import Identity
from storage.layout import SAMPLES
from storage.store import Store
from tasks.drop_budget import DroppedTooManyError, check_dropped
from tasks.load_verifier import Verifier
from tasks.stage import StageResult, build_parts, stage_task
from tasks.stage_settings import StageSettings

logger = logging.getLogger(__name__)

VERSION = 1
MODULE = "tasks.jobs.tokenize_chats"


class TokenizeSettings(StageSettings):
    """How conversations become token ids."""

    max_tokens: PositiveInt = 2048
    """Longest sample, at most the verifier's context; what is longer is cut at the end, counted and shown."""


@stage_task
def tokenize_chats(
    store: Store,
    conversations: StageResult,
    verifier: Verifier,
    settings: TokenizeSettings,
    max_dropped: float,
) -> StageResult:
    """Tokenize each part of the conversations; supervised are the assistant's words and its end of turn."""
    context = verifier.facts.context_tokens
    if settings.max_tokens > context:
        logger.info(
            "samples are cut at the verifier's context of %d tokens (tokenize.max_tokens is %d)",
            context,
            settings.max_tokens,
        )
        settings = settings.model_copy(update={"max_tokens": context})
    wanted = [
        Identity(
            stage=SAMPLES,
            version=VERSION,
            settings=settings.identity(),
            inputs={"conversations": part.content, "verifier": verifier.identity},
        )
        for part in conversations.parts
    ]
    requests = [
        {
            "conversations": part.path,
            **verifier.place,
            "max_tokens": settings.max_tokens,
        }
        for part in conversations.parts
    ]
    samples = build_parts(store, wanted, MODULE, requests=requests)
    _check(samples, max_dropped=max_dropped)
    return samples


def _check(samples: StageResult, *, max_dropped: float) -> None:
    """Stop before any model runs when too much was dropped or nothing is left to learn from."""
    for part in samples.parts:
        dropped: Counter[str] = Counter(part.facts["dropped"])
        check_dropped(
            dropped,
            part.rows + sum(dropped.values()),
            max_dropped=max_dropped,
            where="tokenize_chats",
        )
    if not sum(part.facts["supervised_tokens"] for part in samples.parts):
        raise DroppedTooManyError(
            "tokenize_chats: no token of any conversation is supervised, so there is nothing to learn; "
            "give conversations with an assistant turn within tokenize.max_tokens"
        )
