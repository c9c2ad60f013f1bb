"""Wrong input: one clear error each, with its exit status, before anything is captured."""

import json
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from tests.tiny_models import make_llama
from tests.tiny_runs import chat, write_settings


def write(path: Path, *rows: Any) -> str:
    path.write_text("".join((r if isinstance(r, str) else json.dumps(r)) + "\n" for r in rows))
    return str(path)


QUESTION = {"messages": [{"role": "user", "content": "Why?"}]}


def test_a_missing_source(refusal, tmp_path):
    assert refusal(data={"sources": [str(tmp_path / "none.jsonl")]}).endswith(
        "none.jsonl: there is no such file or directory; correct data.sources"
    )


def test_a_wildcard_that_matches_nothing(refusal, tmp_path):
    assert "no file matches; correct data.sources" in refusal(
        data={"sources": [str(tmp_path / "*.jsonl")]}
    )


def test_an_empty_source(refusal, tmp_path):
    assert "empty.jsonl holds no conversation" in refusal(
        data={"sources": [write(tmp_path / "empty.jsonl")]}
    )


def test_a_source_without_any_assistant_turn(refusal, tmp_path):
    message = refusal(data={"sources": [write(tmp_path / "asked.jsonl", QUESTION, QUESTION)]})

    assert "none of the 2 conversations in " in message
    assert "has an assistant turn" in message
    assert "data.regenerate" in message


def test_a_broken_line_is_named_with_its_file(refusal, tmp_path):
    rows = [chat(0, source="seen"), '{"messages": [', chat(1, source="seen")]

    message = refusal(data={"sources": [write(tmp_path / "broken.jsonl", *rows)]})

    assert "broken.jsonl line 2: not JSON" in message


def test_too_many_unusable_conversations(refusal, tmp_path):
    rows = [*(chat(n, source="seen") for n in range(8)), QUESTION, {"text": "no turns"}]

    message = refusal(data={"sources": [write(tmp_path / "mixed.jsonl", *rows)]})

    assert "2 of 10 conversations are unusable" in message
    assert "no_assistant_turn: 1" in message
    assert "no_messages: 1" in message
    assert "more than data.max_dropped 1.00% allows" in message


def test_nothing_supervised_within_the_longest_sample(refusal):
    message = refusal(tokenize={"max_tokens": 8})

    assert "24 of 24 conversations are unusable (nothing_supervised: 24)" in message


def test_a_draft_vocabulary_larger_than_the_verifiers(refusal):
    assert refusal(vocab={"draft_size": 321}).startswith(
        "vocab.draft_size 321 exceeds the verifier's vocabulary 320; lower it"
    )


def test_a_draft_config_of_another_verifier(refusal, tmp_path):
    layer = {
        "model_type": "llama", "hidden_size": 128, "vocab_size": 320, "intermediate_size": 96,
        "num_hidden_layers": 1, "num_attention_heads": 4, "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6, "rope_theta": 10_000.0,
    }  # fmt: skip
    file = tmp_path / "draft.json"
    file.write_text(json.dumps(layer))

    assert refusal(draft={"config": str(file)}).startswith(
        f"draft.config {file}: hidden_size 128 differs from the verifier's 64"
    )


def test_a_draft_config_beside_settings_that_it_decides(refusal):
    assert "draft.num_layers 2 is set beside draft.config draft.json" in refusal(
        status=2, draft={"config": "draft.json", "num_layers": 2}
    )


def test_a_verifier_with_fewer_layers_than_asked_for(refusal):
    assert refusal(capture={"layers": [2, 4, 8]}).startswith(
        "capture.layers [2, 4, 8] must lie in [0, 8): the verifier has 8 layers"
    )


def test_a_layer_id_below_zero(refusal):
    error = refusal(status=2, capture={"layers": [-1, 4, 5]})

    assert "capture.layers [-1, 4, 5] must not be negative" in error


def test_a_layer_id_beyond_the_verifier(refusal):
    assert "capture.layers [1, 4, 8] must lie in [0, 8)" in refusal(capture={"layers": [1, 4, 8]})


def test_layer_ids_out_of_order(refusal):
    assert "use [2, 4, 5]" in refusal(status=2, capture={"layers": [4, 2, 5]})


def test_a_verifier_too_shallow_for_the_default_layers(refusal, tmp_path):
    shallow = make_llama(tmp_path / "shallow", num_hidden_layers=4)

    assert (
        "need 7 layers or more, the verifier has 4; name the layers in capture.layers"
        in refusal(verifier={"model": str(shallow)})
    )


def test_an_unknown_holdout_source(refusal):
    assert refusal(split={"holdout_sources": ["unsene"]}).startswith(
        "holdout sources unsene are not in the data; there are: seen, unseen"
    )


def test_nothing_held_out_to_evaluate_on(refusal):
    assert "no conversation is held out from training" in refusal(
        split={"holdout_sources": [], "val_ratio": 0}
    )


def test_a_checkpoint_to_start_from_that_is_not_there(refusal):
    assert refusal(train={"init": "/no/such/draft"}).startswith(
        "train.init /no/such/draft is no directory"
    )


def test_a_checkpoint_to_start_from_that_is_no_draft(refusal, plain):
    verifier = plain["verifier"]["model"]

    assert refusal(train={"init": verifier}).startswith(
        f"train.init {verifier}: its speculators_model_type is None, not 'eagle3'"
    )


def test_a_batch_shorter_than_the_longest_sample(refusal):
    message = refusal(train={"tokens_per_batch": 16})

    assert message.startswith("train.tokens_per_batch 16 is less than the longest sample of ")


def test_a_store_below_a_regular_file(refusal, tmp_path):
    (tmp_path / "file").write_text("in the way")

    message = refusal(store=str(tmp_path / "file" / "store"))

    assert "cannot be written" in message
    assert "a file stands where a directory is needed" in message


def test_a_store_in_memory(refusal):
    assert "store: a store in memory ends with its process" in refusal(
        status=2, store="memory://runs"
    )


def test_a_store_of_an_unknown_kind(refusal):
    assert "nonsense" in refusal(status=2, store="nonsense://runs")


@pytest.mark.parametrize(
    ("model", "message"),
    [
        ("/no/such/model", "is neither a directory, a .gguf file"),
        ("./model.gguf", "there is no file model.gguf"),
        ("package://no_such_package/model.gguf", "no package 'no_such_package' is installed"),
        ("no-such-organization/no-such-model", "could not be fetched from the hub"),
    ],
)
def test_a_verifier_that_is_not_there(refusal, model, message):
    error = refusal(verifier={"model": model})

    assert error.startswith(f"verifier.model {model}") or repr(model) in error
    assert message in error


def test_a_directory_that_holds_no_model(refusal, tmp_path):
    (tmp_path / "no-model").mkdir()

    assert "no-model" in refusal(verifier={"model": str(tmp_path / "no-model")})


def test_what_this_machine_alone_can_refuse_is_refused_before_a_server_starts(
    plain, tmp_path, monkeypatch, capsys, own_loggers
):
    monkeypatch.delenv("PREFECT_API_URL", raising=False)
    wrong: list[tuple[str, dict[str, str], str]] = [
        ("verifier", {"model": "/no/such/model"}, "/no/such/"),
        ("draft", {"config": "/no/such/draft.json"}, "/no/such/"),
        ("train", {"device": "cuda:1"}, "train.device is cuda:1, and this machine has no GPU"),
    ]
    monkeypatch.setattr("tasks.hardware.NVIDIA_DEVICE", tmp_path / "no-driver")
    for group, value, refused in wrong:
        file = write_settings(plain | {group: value}, tmp_path / "settings.yaml")

        assert main(["run", str(file)]) == 1

        said = capsys.readouterr().err
        assert refused in said
        assert "Prefect server" not in said


def test_an_unknown_setting_and_a_wrong_type(refusal):
    assert "train.rate: there is no such setting" in refusal(status=2, train={"rate": 1})
    assert "train.epochs: " in refusal(status=2, train={"epochs": "two"})
