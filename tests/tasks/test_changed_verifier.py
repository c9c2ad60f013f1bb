"""A verifier whose files change while a run goes on: what comes of it is not kept under the old one's name."""

import os
from pathlib import Path

import pytest

from storage.store import Store
from tasks.child import JobRefusedError
from tasks.collect import DataSettings, collect
from tasks.eagle3.model_files import VerifierError, check_stamps, file_stamps
from tasks.load_verifier import Verifier, load_verifier, open_verifier
from tasks.stage import call
from tasks.tokenize_chats import TokenizeSettings, tokenize_chats
from tests.tiny_models import make_llama
from tests.tiny_runs import write_chats


def opened(store: Store, model: Path) -> Verifier:
    loaded = call(load_verifier, store, str(model))
    return open_verifier(store, str(model), loaded.parts[0])


@pytest.mark.parametrize("change", ["weights", "template", "gone", "new"])
def test_a_change_of_any_file_that_a_model_is_loaded_from_is_seen(tmp_path: Path, change: str):
    model = make_llama(tmp_path / "verifier")
    before = file_stamps(model)
    (model / "notes.md").write_text("of no matter")
    check_stamps(model, before)

    if change == "weights":
        os.utime(model / "model.safetensors", ns=(1, 1))
    elif change == "template":
        (model / "chat_template.jinja").write_text("{{ messages }}")
    elif change == "gone":
        (model / "generation_config.json").unlink()
    else:
        (model / "adapter.safetensors").write_bytes(b"x")

    with pytest.raises(VerifierError, match=r"verifier changed during the run \("):
        check_stamps(model, before)


def test_a_stage_on_a_changed_verifier_publishes_nothing(tmp_path: Path):
    store = Store(str(tmp_path / "store"))
    model = make_llama(tmp_path / "verifier")
    verifier = opened(store, model)
    source = str(write_chats(tmp_path / "chats.jsonl", range(4)))
    conversations = call(collect, store, DataSettings(sources=(source,)))
    config = model / "tokenizer_config.json"
    config.write_text(config.read_text() + " ")

    with pytest.raises(JobRefusedError, match=r"changed during the run \(tokenizer_config\.json\)"):
        call(tokenize_chats, store, conversations, verifier, TokenizeSettings(), 0.0)

    assert not (tmp_path / "store" / "samples").exists()
    again = opened(store, model)
    assert again.identity != verifier.identity
    assert call(tokenize_chats, store, conversations, again, TokenizeSettings(), 0.0).rows == 4
