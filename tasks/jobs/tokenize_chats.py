"""Job of tokenize_chats: one part of conversations -> one part of samples."""

import json
from collections import Counter
from typing import Any

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import CONVERSATIONS_TABLE, SAMPLES_TABLE
from storage.store import Store
from storage.tables import SAMPLES_SCHEMA, read_table, write_table
from tasks.child import ProgressCallback
from tasks.eagle3.chat import ChatRejected, sample_id, show_supervision, tokenize_chat
from tasks.jobs.models import check_unchanged, load_tokenizer
from tasks.length_histogram import count_lengths

SHOWN_SAMPLES = 3


def run(request: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
    """Publish the samples of one part of conversations."""
    store, wanted = Store(request["store"]), Identity(**request["identity"])
    tokenizer = load_tokenizer(request["directory"], trust_remote_code=request["trust_remote_code"])
    manifest = artifacts.require(store, request["conversations"])
    with artifacts.open_file(store, manifest, CONVERSATIONS_TABLE) as path:
        conversations = read_table(path).to_pylist()
    rows: list[dict[str, Any]] = []
    dropped: Counter[str] = Counter()
    for number, conversation in enumerate(conversations):
        try:
            chat = tokenize_chat(
                tokenizer, json.loads(conversation["messages"]), max_tokens=request["max_tokens"]
            )
        except ChatRejected as error:
            dropped[error.reason] += 1
            continue
        rows.append(
            {
                "sample_id": sample_id(chat.input_ids),
                "conversation_id": conversation["conversation_id"],
                "source": conversation["source"],
                "input_ids": chat.input_ids,
                "loss_mask": chat.loss_mask,
                "truncated": chat.truncated,
            }
        )
        progress(
            {
                "stage": "tokenize_chats",
                "done": number + 1,
                "total": len(conversations),
                "unit": "conversations",
            }
        )
    lengths = sorted(len(row["input_ids"]) for row in rows)
    shown = [
        show_supervision(tokenizer, row["input_ids"], row["loss_mask"])
        for row in rows[:SHOWN_SAMPLES]
    ]
    check_unchanged(request)
    with artifacts.write(store, wanted) as writer:
        with writer.file(SAMPLES_TABLE) as path:
            write_table(path, rows, schema=SAMPLES_SCHEMA)
        writer.publish(
            rows=len(rows),
            facts={
                "tokens": sum(lengths),
                "supervised_tokens": sum(sum(row["loss_mask"]) for row in rows),
                "median_tokens": lengths[len(lengths) // 2] if lengths else 0,
                "longest_tokens": lengths[-1] if lengths else 0,
                "lengths": count_lengths(lengths),
                "truncated": sum(row["truncated"] for row in rows),
                "dropped": dict(dropped),
                "shown": shown,
            },
        )
    return {}
