"""Job of evaluate: greedy texts of the verifier alone, or by speculative decoding with a draft."""

import json
import logging
import random
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

import torch
from transformers import PreTrainedModel

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import CONVERSATIONS_TABLE, EVALUATION_TABLE, SPLIT_TABLE
from storage.store import Store
from storage.tables import EVALUATION_SCHEMA, read_table, write_table
from tasks.child import ProgressCallback
from tasks.eagle3.acceptance import compare_texts, is_rounding, margin_at, summarize
from tasks.eagle3.chat import prompt_tokens
from tasks.eagle3.conversations import prompts_of
from tasks.eagle3.speculative import speculative_greedy
from tasks.engines.generation import greedy_generate
from tasks.jobs.drafts import make_draft, trained_weights
from tasks.jobs.models import check_unchanged, load_model, load_tokenizer, pad_token_id

logger = logging.getLogger(__name__)

SHOWN_TEXTS = 2


def run(request: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
    """Publish the reference texts, or the evaluation of the draft of `request["draft"]`."""
    store, wanted = Store(request["store"]), Identity(**request["identity"])
    settings = request["settings"]
    directory, trusted = request["directory"], request["trust_remote_code"]
    tokenizer = load_tokenizer(directory, trust_remote_code=trusted)
    model = load_model(
        directory,
        device=settings["device"],
        dtype=settings["dtype"],
        trust_remote_code=trusted,
    )
    room = request["max_positions"] - settings["max_new_tokens"]
    chosen = choose_prompts(
        (
            (source, prompt_tokens(tokenizer, history))
            for source, history in read_histories(store, request)
        ),
        count=settings["prompts"],
        room=room,
    )
    prompts = [prompt for _, prompt in chosen]
    total = len(prompts) * settings["max_new_tokens"]
    done = 0

    def show(tokens: int) -> None:
        nonlocal done
        done = tokens
        name = f"evaluate {request['name']}"
        progress({"stage": name, "done": done, "total": total, "unit": "tokens"})

    if request["draft"] is None:
        texts = greedy_generate(
            model,
            prompts,
            max_new_tokens=settings["max_new_tokens"],
            eos_token_ids=request["eos_token_ids"],
            pad_token_id=pad_token_id(tokenizer),
            batch_size=settings["batch_size"],
            progress=show,
        )
        facts: dict[str, Any] = {"tokens": sum(map(len, texts))}
        accepted: list[list[int]] = [[] for _ in texts]
    else:
        texts, accepted, facts = _speculate(
            store, request, model, prompts, lambda tokens: show(done + tokens)
        )
        show(total)
    facts["shown"] = [tokenizer.decode(text) for text in texts[:SHOWN_TEXTS]]
    rows = [
        {
            "source": source,
            "prompt_ids": prompt,
            "token_ids": text,
            "pieces": [tokenizer.decode([token]) for token in text],
            "accepted_per_round": rounds,
        }
        for (source, prompt), text, rounds in zip(chosen, texts, accepted, strict=True)
    ]
    check_unchanged(request)
    with artifacts.write(store, wanted) as writer:
        with writer.file(EVALUATION_TABLE) as path:
            write_table(path, rows, schema=EVALUATION_SCHEMA)
        writer.publish(rows=len(rows), facts=facts)
    return {}


def choose_prompts(
    prompts: Iterable[tuple[str, list[int]]], *, count: int, room: int
) -> list[tuple[str, list[int]]]:
    """Return the first `count` prompts, and their sources, that leave room for an answer within the positions.

    Raises ValueError when there is none.
    """
    fitting: list[tuple[str, list[int]]] = []
    too_long: list[int] = []
    for source, prompt in prompts:
        if len(prompt) > room:
            too_long.append(len(prompt))
        else:
            fitting.append((source, prompt))
        if len(fitting) == count:
            break
    if not fitting:
        raise ValueError(
            f"evaluate: none of the {len(too_long)} prompts fits the verifier's positions (the shortest has "
            f"{min(too_long)} tokens, {room} are left beside evaluate.max_new_tokens); lower "
            "evaluate.max_new_tokens or add shorter conversations"
        )
    if too_long:
        logger.warning(
            "evaluate: %d prompts of more than %d tokens are left out", len(too_long), room
        )
    return fitting


def read_histories(store: Store, request: dict[str, Any]) -> list[tuple[str, list[dict[str, str]]]]:
    """Return the side's sources and conversations without their last answer, each once, in a fixed random order.

    Held out is the test side, where there is one, else val. Raises ValueError when the side is empty.
    """
    with artifacts.open_file(
        store, artifacts.require(store, request["split"]), SPLIT_TABLE
    ) as path:
        sides = {row["conversation_id"]: row["side"] for row in read_table(path).to_pylist()}
    side = "test" if "test" in sides.values() else "val"
    if request["settings"]["side"] == "train":
        side = "train"
    histories: dict[str, tuple[str, list[dict[str, str]]]] = {}
    for part in request["conversations"]:
        with artifacts.open_file(
            store, artifacts.require(store, part), CONVERSATIONS_TABLE
        ) as path:
            for row in read_table(path).to_pylist():
                if sides[row["conversation_id"]] == side:
                    history = prompts_of(json.loads(row["messages"]))
                    key = json.dumps(history, sort_keys=True)
                    histories.setdefault(key, (row["source"], history))
    if not histories:
        raise ValueError(
            "evaluate: no conversation is held out from training; raise split.val_ratio or name a source in "
            "split.holdout_sources"
        )
    ordered = [histories[key] for key in sorted(histories)]
    random.Random(0).shuffle(ordered)
    return ordered


def _speculate(
    store: Store,
    request: dict[str, Any],
    model: PreTrainedModel,
    prompts: list[list[int]],
    advance: Any,
) -> tuple[list[list[int]], list[list[int]], dict[str, Any]]:
    """Decode by verifier and draft; returns texts, accepted tokens per round, and the facts."""
    settings, parts = request["settings"], request["draft"]
    weights = None if parts["weights"] is None else trained_weights(store, parts["weights"])
    draft = make_draft(store, parts, seed=parts["seed"], device=model.device, weights=weights)
    decoded = speculative_greedy(
        model,
        draft,
        prompts,
        layer_ids=parts["layer_ids"],
        max_new_tokens=settings["max_new_tokens"],
        draft_tokens=settings["draft_tokens"],
        eos_token_ids=request["eos_token_ids"],
        batch_size=settings["batch_size"],
        progress=advance,
    )
    reference = artifacts.require(store, request["reference"])
    with artifacts.open_file(store, reference, EVALUATION_TABLE) as path:
        plain = read_table(path).to_pylist()
    texts = [row.token_ids for row in decoded]
    differing, rounded = [], 0
    for difference in compare_texts([row["token_ids"] for row in plain], texts):
        prompt = prompts[difference.prompt]
        before = plain[difference.prompt]["token_ids"][: difference.position]
        margin = margin_at(model, prompt + before, position=len(prompt) + difference.position)
        if model.dtype != torch.float32 and is_rounding(difference, margin):
            rounded += 1
        else:
            differing.append({"prompt": difference.prompt, "token": difference.position})
    summary = asdict(summarize(decoded, draft_tokens=settings["draft_tokens"]))
    facts = {
        **{k: round(v, 4) if isinstance(v, float) else v for k, v in summary.items()},
        "prompts": len(prompts),
        "differing": differing,
        "differing_within_rounding": rounded,
    }
    facts["per_position"] = [round(v, 4) for v in summary["per_position"]]
    facts["per_prompt"] = [None if v is None else round(v, 4) for v in summary["per_prompt"]]
    return texts, [row.accepted_per_round for row in decoded], facts
