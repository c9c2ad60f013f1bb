"""What a training starts from and how large its batches are: settled before it, and part of what it is."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from storage import artifacts
from storage.store import Store
from tasks.eagle3.draft_plan import plan_draft
from tasks.eagle3.draft_settings import DraftSettings
from tasks.eagle3.training_settings import TrainSettings
from tasks.fit_batch import batch_identity, fit_batch, needs_fitting, settle_batch
from tasks.load_verifier import open_verifier
from tasks.stage import StageResult, call
from tests.tiny_runs import TinyRun, computed, run_flow, states

NEW = ["train", "evaluate", "export", "promote"]


def draft_of(store: Path, record: dict, stage: str) -> dict[str, torch.Tensor]:
    (path,) = record["stages"][stage]["parts"]
    (file,) = (store / path).glob("attempt-*/draft.safetensors")
    return load_file(file)


def before(store: Path, record: dict) -> dict:
    path = record["stages"]["evaluate"]["parts"][1]
    return json.loads((store / path / "manifest.json").read_text())


def test_a_training_starts_from_the_draft_it_is_given(tiny, tmp_path, prefect_api):
    copy = tiny.copy(tmp_path)
    init = shutil.copytree(tiny.result["speculator"], tmp_path / "earlier")
    # so slow that it stays where it starts
    still = {"init": str(init), "lr": 1e-30, "epochs": 1}

    record = run_flow(copy.changed(train=still), prefect_api)

    assert computed(record) == NEW
    assert states(record)["warm_start"] == "computed"
    start, trained = (draft_of(copy.store, record, stage) for stage in ("warm_start", "train"))
    stored = load_file(init / "model.safetensors")
    assert start.keys() == trained.keys()
    for name, value in start.items():
        assert torch.equal(value, stored[name])
        assert torch.equal(value.float(), trained[name])
    # the evaluation compares with it, not with an untrained draft
    assert before(copy.store, record)["inputs"]["draft"] != "untrained"
    after = record["stages"]["evaluate"]["parts"][2]
    assert (
        before(copy.store, record)["facts"]["per_prompt"]
        == json.loads((copy.store / after / "manifest.json").read_text())["facts"]["per_prompt"]
    )

    # where it lies does not matter, what it holds does
    moved = shutil.move(init, tmp_path / "moved")
    again = run_flow(copy.changed(train=still | {"init": str(moved)}), prefect_api)
    assert computed(again) == []
    assert states(again)["warm_start"] == "reused"


@pytest.mark.slow
def test_a_draft_of_another_vocabulary_is_a_start_and_one_of_other_layers_is_not(
    tiny, tmp_path, prefect_api
):
    copy = tiny.copy(tmp_path)
    init = {"init": tiny.result["speculator"], "epochs": 1}

    record = run_flow(copy.changed(train=init, vocab={"draft_size": 64}), prefect_api)
    assert computed(record) == ["map_vocab", *NEW]

    states_before = sorted((copy.store / "states").iterdir())
    with pytest.raises(
        ValueError,
        match=r"reads the verifier's layers \[2, 4, 5\], this run captures \[1, 4, 5\]; set capture",
    ):
        run_flow(copy.changed(train=init, capture={"layers": [1, 4, 5]}), prefect_api)
    assert sorted((copy.store / "states").iterdir()) == states_before


def test_auto_needs_no_trial_without_a_gpu():
    settings = TrainSettings(tokens_per_batch="auto", device="cpu")

    assert not needs_fitting(settings)
    assert needs_fitting(settings.model_copy(update={"device": "cuda"}))
    assert not needs_fitting(TrainSettings(tokens_per_batch=512, device="cuda"))
    assert settle_batch(settings, None).tokens_per_batch == 4096
    assert settle_batch(TrainSettings(tokens_per_batch=512), None).tokens_per_batch == 512


@pytest.mark.slow
def test_auto_on_a_cpu_is_a_batch_of_4096_tokens(tiny, tmp_path, prefect_api):
    copy = tiny.copy(tmp_path)
    auto = {"tokens_per_batch": "auto", "device": "cpu"}

    assert computed(run_flow(copy.changed(train=auto), prefect_api)) == NEW
    named = copy.changed(train={"tokens_per_batch": 4096, "device": "cpu"})
    assert computed(run_flow(named, prefect_api)) == []


def test_a_batch_size_found_once_is_taken_again_whatever_else_changes(tiny, tmp_path):
    store, parts, fitting = fitting_arguments(tiny.copy(tmp_path))
    settings = TrainSettings(tokens_per_batch="auto", device="cuda", precision="bf16")
    found = batch_identity(parts["layer_ids"], draft_size=128, settings=settings, **fitting)
    with artifacts.write(store, found) as writer:
        writer.publish(rows=1536, facts={})
    same = settings.model_copy(update={"lr": 0.5, "epochs": 9, "seed": 4})

    fitted = call(
        fit_batch, store, parts["layer_ids"], vocab=parts["vocab"], settings=same, **fitting
    )

    assert fitted.reused
    assert settle_batch(same, fitted).tokens_per_batch == 1536
    longer = settings.model_copy(update={"ttt_steps": 5})
    other = batch_identity(parts["layer_ids"], draft_size=128, settings=longer, **fitting)
    assert other.key != found.key


def fitting_arguments(run: TinyRun) -> tuple[Store, dict, dict]:
    """Store, vocabulary and layers, verifier and draft of a tiny run, as its flow passes them on."""
    store = Store(str(run.store))

    def manifest(stage: str) -> artifacts.Manifest:
        return artifacts.require(store, run.result["stages"][stage]["parts"][0])

    loaded = manifest("load_verifier")
    verifier = open_verifier(store, run.values["verifier"]["model"], loaded)
    vocab = StageResult((manifest("map_vocab"),), reused=True)
    draft = plan_draft(DraftSettings(), verifier.facts.text_config)
    return (
        store,
        {"vocab": vocab, "layer_ids": (2, 4, 5)},
        {"verifier": verifier, "draft": draft},
    )
