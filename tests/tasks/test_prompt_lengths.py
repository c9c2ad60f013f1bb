"""Prompts near the end of the verifier's positions: cut or left out, and counted, never decoded past it."""

import json
import logging
from pathlib import Path

import pytest

from storage import artifacts
from storage.layout import CONVERSATIONS_TABLE
from storage.store import Store
from storage.tables import read_table
from tasks.collect import DataSettings, collect
from tasks.eagle3.chat import prompt_tokens
from tasks.eagle3.conversations import prompts_of
from tasks.jobs.evaluate import choose_prompts
from tasks.jobs.models import load_tokenizer
from tasks.load_verifier import load_verifier, open_verifier
from tasks.regenerate import RegenerateSettings, regenerate
from tasks.stage import call
from tests.tiny_models import make_llama

POSITIONS = 64


def test_evaluation_takes_the_next_prompt_for_one_that_leaves_no_room(caplog):
    prompts = [[1] * n for n in (5, 50, 6, 41, 7)]

    with caplog.at_level(logging.WARNING):
        found = choose_prompts((("chat", prompt) for prompt in prompts), count=2, room=40)
        assert found == [("chat", [1] * 5), ("chat", [1] * 6)]

    assert "1 prompts of more than 40 tokens are left out" in caplog.text


def test_evaluation_without_any_prompt_that_fits_names_the_lengths():
    with pytest.raises(ValueError, match=r"the shortest has 50 tokens, 40 are left beside"):
        choose_prompts([("chat", [1] * 50), ("chat", [1] * 51)], count=2, room=40)


def test_regenerated_answers_end_with_the_verifiers_positions(tmp_path: Path):
    model = make_llama(tmp_path / "verifier", max_position_embeddings=POSITIONS)
    tokenizer = load_tokenizer(str(model))
    texts = ["Why?", "x" * 45, "y" * 90]
    chats = [{"messages": [{"role": "user", "content": text}]} for text in texts]
    source = tmp_path / "prompts.jsonl"
    source.write_text("".join(json.dumps(chat) + "\n" for chat in chats))
    store = Store(str(tmp_path / "store"))
    loaded = call(load_verifier, store, str(model))
    verifier = open_verifier(store, str(model), loaded.parts[0])
    collected = call(collect, store, DataSettings(sources=(str(source),), regenerate=True))

    written = call(
        regenerate, store, collected, verifier, RegenerateSettings(max_new_tokens=POSITIONS)
    )

    (part,) = written.parts
    assert (part.rows, part.facts["dropped"]) == (2, 1)
    with artifacts.open_file(store, part, CONVERSATIONS_TABLE) as path:
        rows = [json.loads(row["messages"]) for row in read_table(path).to_pylist()]
    assert [row[0]["content"] for row in rows] == texts[:2]
    prompts = [prompt_tokens(tokenizer, prompts_of(row)) for row in rows]
    # this verifier never ends by itself: both answers run up to its last position
    assert part.facts["new tokens"] == sum(POSITIONS - len(prompt) for prompt in prompts)
    assert call(
        regenerate, store, collected, verifier, RegenerateSettings(max_new_tokens=POSITIONS)
    ).reused
