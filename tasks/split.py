"""Stage split: conversations -> which side each is on: train, val or test."""

import json
from collections import Counter

from pydantic import Field

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import CONVERSATIONS_TABLE, SPLIT, SPLIT_TABLE
from storage.store import Store
from storage.tables import SPLIT_SCHEMA, read_table, write_table
from tasks.eagle3.conversations import prompt_digest
from tasks.eagle3.splits import SplitRow, split_conversations
from tasks.stage import StageResult, stage_task
from tasks.stage_settings import StageSettings

VERSION = 1


class SplitSettings(StageSettings):
    """Which conversations are kept from training."""

    val_ratio: float = Field(default=0.2, ge=0, lt=1)
    """Share of the conversations that choose the best checkpoint instead of being trained on."""
    holdout_sources: tuple[str, ...] = ()
    """Sources that are never trained on: the evaluation draws its prompts from them."""
    seed: int = 0
    """Changes which conversations are kept; adding conversations moves none."""


@stage_task
def split(store: Store, conversations: StageResult, settings: SplitSettings) -> StageResult:
    """Put every conversation on one side, equal prompts together."""
    wanted = Identity(
        stage=SPLIT,
        version=VERSION,
        settings=settings.identity(),
        inputs={"conversations": conversations.content},
    )
    found = artifacts.find(store, wanted)
    if found is not None:
        return StageResult((found,), reused=True)
    rows: dict[str, SplitRow] = {}
    for part in conversations.parts:
        with artifacts.open_file(store, part, CONVERSATIONS_TABLE) as path:
            for row in read_table(path).to_pylist():
                prompt = prompt_digest(json.loads(row["messages"]))
                row_id = row["conversation_id"]
                rows[row_id] = SplitRow(row_id, prompt, row["source"])
    sides = split_conversations(
        rows.values(),
        val_ratio=settings.val_ratio,
        holdout_sources=settings.holdout_sources,
        seed=settings.seed,
    )
    with artifacts.write(store, wanted) as writer:
        with writer.file(SPLIT_TABLE) as path:
            table = [
                {"conversation_id": row_id, "source": rows[row_id].source, "side": side}
                for row_id, side in sorted(sides.items())
            ]
            write_table(path, table, schema=SPLIT_SCHEMA)
        manifest = writer.publish(rows=len(sides), facts=dict(Counter(sides.values())))
    return StageResult((manifest,), reused=False)
