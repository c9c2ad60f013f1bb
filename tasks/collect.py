"""Stage collect: conversation files -> one artifact of conversations for each source file."""

import json
import logging
from collections import Counter
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import CONVERSATIONS, CONVERSATIONS_TABLE
from storage.manifest import Manifest
from storage.sources import expand_sources, fingerprint_source, read_records
from storage.store import Store
from storage.tables import CONVERSATIONS_SCHEMA, write_table
from tasks.drop_budget import check_dropped
from tasks.eagle3.conversations import (
    ConversationRejected,
    conversation_id,
    has_assistant_turn,
    parse_conversation,
)
from tasks.stage import StageResult, stage_task
from tasks.stage_settings import StageSettings

logger = logging.getLogger(__name__)

VERSION = 1


class DataSettings(StageSettings):
    """Where the conversations come from."""

    resources: ClassVar[frozenset[str]] = frozenset({"max_dropped"})

    sources: tuple[Annotated[str, Field(min_length=1)], ...] = Field(min_length=1)
    """JSONL, JSON or Parquet files of conversations: paths (relative to where the command runs), directories
    or fsspec URLs, with wildcards."""
    regenerate: bool = False
    """Let the verifier write the answers anew: a draft learns best from what its verifier says."""
    max_dropped: float = Field(default=0.01, ge=0, le=1)
    """Largest share of conversations that may be dropped as unusable, and of samples that may turn out to have no
    usable states, before the run stops; a line that is no JSON always stops it."""


@stage_task
def collect(store: Store, settings: DataSettings) -> StageResult:
    """Read every source file into the store; a file that did not change is not read again."""
    parts, reused = [], True
    for url in expand_sources(list(settings.sources)):
        wanted = Identity(
            stage=CONVERSATIONS,
            version=VERSION,
            settings={"needs_answers": not settings.regenerate},
            inputs={"source": fingerprint_source(url)},
        )
        found = artifacts.find(store, wanted)
        if found is None:
            found, reused = _collect_file(store, wanted, url=url, settings=settings), False
        parts.append(found)
    return StageResult(tuple(parts), reused=reused)


def _collect_file(store: Store, wanted: Identity, *, url: str, settings: DataSettings) -> Manifest:
    dropped: Counter[str] = Counter()
    rows = list(_conversations(url, dropped, needs_answers=not settings.regenerate))
    total = len(rows) + sum(dropped.values())
    if total == 0:
        raise ValueError(
            f"data.sources: {url} holds no conversation; give a file with at least one"
        )
    if dropped["no_assistant_turn"] == total:
        raise ValueError(
            f"data.sources: none of the {total} conversations in {url} has an assistant turn, so "
            "there is nothing to learn from; give conversations with answers or set "
            "data.regenerate to let the verifier write them"
        )
    check_dropped(dropped, total, max_dropped=settings.max_dropped, where=url)
    with artifacts.write(store, wanted) as writer:
        with writer.file(CONVERSATIONS_TABLE) as path:
            write_table(path, rows, schema=CONVERSATIONS_SCHEMA)
        return writer.publish(rows=len(rows), facts={"source": url, "dropped": dict(dropped)})


def _conversations(
    url: str, dropped: Counter[str], *, needs_answers: bool
) -> Iterator[dict[str, Any]]:
    name = url.rsplit("/", 1)[-1]
    seen: set[str] = set()
    for number, record in read_records(url):
        try:
            messages = parse_conversation(record)
        except ConversationRejected as error:
            logger.warning("%s, record %d dropped: %s", url, number, error)
            dropped[error.reason] += 1
            continue
        if needs_answers and not has_assistant_turn(messages):
            dropped["no_assistant_turn"] += 1
            continue
        row_id = conversation_id(messages)
        if row_id in seen:
            continue
        seen.add(row_id)
        yield {
            "conversation_id": row_id,
            "source": str(record.get("source", name)),
            "messages": json.dumps(messages, ensure_ascii=False, sort_keys=True),
        }
