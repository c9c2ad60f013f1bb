"""Job of regenerate: the verifier answers the prompts of one chunk of conversations."""

import json
import logging
from typing import Any

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import CONVERSATIONS_TABLE
from storage.store import Store
from storage.tables import CONVERSATIONS_SCHEMA, read_table, write_table
from tasks.child import ProgressCallback
from tasks.eagle3.chat import prompt_tokens
from tasks.eagle3.conversations import conversation_id, prompts_of
from tasks.engines.generation import greedy_generate
from tasks.jobs.models import check_unchanged, load_model, load_tokenizer, pad_token_id

logger = logging.getLogger(__name__)


def run(request: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
    """Publish the chunk's conversations with the verifier's own last answers."""
    store, wanted = Store(request["store"]), Identity(**request["identity"])
    settings, (start, stop) = request["settings"], request["rows"]
    directory, trusted = request["directory"], request["trust_remote_code"]
    tokenizer = load_tokenizer(directory, trust_remote_code=trusted)
    model = load_model(
        directory,
        device=settings["device"],
        dtype=settings["dtype"],
        trust_remote_code=trusted,
    )
    manifest = artifacts.require(store, request["conversations"])
    with artifacts.open_file(store, manifest, CONVERSATIONS_TABLE) as path:
        conversations = read_table(path).slice(start, stop - start).to_pylist()
    histories = [prompts_of(json.loads(row["messages"])) for row in conversations]
    prompts = [prompt_tokens(tokenizer, history) for history in histories]
    rooms = [request["max_positions"] - len(prompt) for prompt in prompts]
    fitting = [i for i, room in enumerate(rooms) if room > 0]
    if len(fitting) < len(prompts):
        logger.warning(
            "regenerate: %d of %d conversations are dropped: they fill the verifier's %d positions",
            len(prompts) - len(fitting),
            len(prompts),
            request["max_positions"],
        )
    total = len(fitting) * settings["max_new_tokens"]
    stage = f"regenerate {start}-{stop}"
    answers = greedy_generate(
        model,
        [prompts[i] for i in fitting],
        max_new_tokens=settings["max_new_tokens"],
        eos_token_ids=request["eos_token_ids"],
        pad_token_id=pad_token_id(tokenizer),
        batch_size=settings["batch_size"],
        progress=lambda done: progress(
            {"stage": stage, "done": done, "total": total, "unit": "tokens"}
        ),
    )
    answers = [answer[: rooms[i]] for i, answer in zip(fitting, answers, strict=True)]
    rows = []
    for i, answer in zip(fitting, answers, strict=True):
        conversation, history = conversations[i], histories[i]
        text = str(tokenizer.decode(answer, skip_special_tokens=True)).strip()
        messages = [*history, {"role": "assistant", "content": text}]
        rows.append(
            {
                "conversation_id": conversation_id(messages),
                "source": conversation["source"],
                "messages": json.dumps(messages, ensure_ascii=False, sort_keys=True),
            }
        )
    check_unchanged(request)
    with artifacts.write(store, wanted) as writer:
        with writer.file(CONVERSATIONS_TABLE) as path:
            write_table(path, rows, schema=CONVERSATIONS_SCHEMA)
        writer.publish(
            rows=len(rows),
            facts={"new tokens": sum(map(len, answers)), "dropped": len(prompts) - len(fitting)},
        )
    return {}
