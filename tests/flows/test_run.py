"""Whole runs: what is said, what is reused, what a change makes anew."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flows.cli import main
from tasks.verify import verify_store
from tests.tiny_runs import (
    ROOT,
    STAGES,
    TinyRun,
    computed,
    environment,
    manifests,
    outrider,
    run_flow,
    states,
    write_chats,
    write_settings,
)


def test_the_last_line_of_a_run_has_the_shape_of_the_contract(tiny):
    assert sorted(tiny.result) == ["acceptance_length", "run", "seconds", "speculator", "stages"]
    assert tuple(tiny.result["stages"]) == STAGES
    for stage in tiny.result["stages"].values():
        assert {"state", "seconds", "key", "rows"} <= stage.keys()
        assert stage["state"] == "computed"
        assert stage["seconds"] >= 0
        assert len(stage["key"]) == 24
        assert stage["rows"] > 0
    assert tiny.result["stages"]["collect"]["rows"] == 24
    assert 1.0 <= tiny.result["acceptance_length"] <= 4.0
    assert (Path(tiny.result["speculator"]) / "config.json").is_file()


def test_every_shard_holds_the_score_of_its_canary(tiny):
    found = [
        json.loads((tiny.store / path).read_text()) for path in manifests(tiny.store, "capture")
    ]

    assert [shard["rows"] for shard in found] == [8, 8, 8]
    for shard in found:
        canary = shard["facts"]["canary"]
        assert canary["argmax_agreement"] >= 0.98
        assert len(canary["aux_error"]) == 3
        assert max(canary["aux_error"]) < 0.01


def test_a_training_says_beforehand_what_it_will_be_and_afterwards_what_it_was(tiny):
    (path,) = tiny.result["stages"]["train"]["parts"]
    facts = json.loads((tiny.store / path / "manifest.json").read_text())["facts"]
    steps, share = facts["steps"], 100 * facts["batch_fill"]

    total, trainable = facts["parameters"] / 1e6, facts["trainable"] / 1e6
    assert f"{total:.2f} M parameters, {trainable:.2f} M of them trainable; " in tiny.log
    assert (
        f"{steps} steps of 128 tokens, {share:.1f} % of them used; adamw at 0.001, reached after "
        f"{-(-steps // 20)} steps, then cosine; {facts['precision']}"
    ) in tiny.log
    assert facts["tokens_per_batch"] == 128
    assert 0.5 < facts["batch_fill"] <= 1
    assert facts["seconds_waiting_for_data"] >= 0


def test_a_second_run_reuses_every_stage_and_writes_nothing(tiny, tmp_path, prefect_api):
    copy = tiny.copy(tmp_path)
    before = manifests(copy.store)

    record = run_flow(copy.values, prefect_api)

    assert computed(record) == []
    assert manifests(copy.store) == before
    assert record["acceptance_length"] == tiny.result["acceptance_length"]
    assert {n: s["key"] for n, s in record["stages"].items()} == {
        n: s["key"] for n, s in tiny.result["stages"].items()
    }


def test_samples_are_no_longer_than_the_verifiers_context(tiny, tmp_path, prefect_api):
    copy = tiny.copy(tmp_path)
    context = 512  # tests/tiny_models.py

    assert computed(run_flow(copy.changed(tokenize={"max_tokens": context}), prefect_api)) == [
        "tokenize_chats"
    ]
    longer = copy.changed(tokenize={"max_tokens": 100_000})
    assert computed(run_flow(longer, prefect_api)) == []


def test_checkpoints_that_a_killed_job_left_beside_its_draft_go(tiny, tmp_path, prefect_api):
    copy = tiny.copy(tmp_path)
    (trained,) = (copy.store / "checkpoints").iterdir()
    for place in ("steps", "best"):
        (trained / place / "step-000000001").mkdir(parents=True)
        (trained / place / "step-000000001" / "manifest.json").write_text("{}")

    assert computed(run_flow(copy.values, prefect_api)) == []
    assert not (trained / "steps").exists()
    assert not (trained / "best").exists()


def test_a_draft_config_counts_by_its_content(tiny, tmp_path, prefect_api):
    copy = tiny.copy(tmp_path)
    file = tmp_path / "draft.json"
    shutil.copyfile(Path(tiny.result["speculator"]) / "config.json", file)
    described = copy.changed(draft={"config": str(file)})

    assert computed(run_flow(described, prefect_api)) == []

    config = json.loads(file.read_text())
    config["transformer_layer_config"]["intermediate_size"] = 80
    file.write_text(json.dumps(config))
    record = run_flow(described, prefect_api)

    assert computed(record) == ["train", "evaluate", "export", "promote"]
    exported = json.loads((Path(record["speculator"]) / "config.json").read_text())
    assert exported["transformer_layer_config"]["intermediate_size"] == 80


def remove_artifact(manifest: Path) -> None:
    shutil.rmtree(manifest.parent)


def truncate_file(manifest: Path) -> None:
    largest = max(manifest.parent.glob("attempt-*/*"), key=lambda path: path.stat().st_size)
    os.truncate(largest, largest.stat().st_size - 1)


@pytest.mark.parametrize("stage", STAGES)
def test_a_removed_artifact_is_made_anew_and_nothing_else(stage, tiny, tmp_path, prefect_api):
    check_repair(stage, remove_artifact, tiny, tmp_path, prefect_api)


@pytest.mark.parametrize("stage", ["capture", "split"])
def test_a_truncated_artifact_is_made_anew_and_nothing_else(stage, tiny, tmp_path, prefect_api):
    check_repair(stage, truncate_file, tiny, tmp_path, prefect_api)


def check_repair(
    stage: str, harm: Callable[[Path], None], tiny: TinyRun, tmp_path: Path, api: str
) -> None:
    copy = tiny.copy(tmp_path)
    before = manifests(copy.store)
    # of a training it is the trained draft, not one of its checkpoints; of many parts the first
    harmed = min(manifests(copy.store, stage), key=lambda path: path.count("/"))
    harm(copy.store / harmed)

    record = run_flow(copy.values, api)

    assert computed(record) == [stage]
    after = manifests(copy.store)
    gone = {path for path in before if path.startswith(harmed.removesuffix("manifest.json"))}
    changed = {path for path in after if path not in gone and after[path] != before.get(path)}
    assert after[harmed] > before[harmed]
    # a capture has a plan besides
    assert all(path.startswith("capture_plan/") for path in changed), changed
    assert record["acceptance_length"] == tiny.result["acceptance_length"]


def flip_bit(manifest: Path) -> None:
    largest = max(manifest.parent.glob("attempt-*/*"), key=lambda path: path.stat().st_size)
    content = bytearray(largest.read_bytes())
    content[len(content) // 2] ^= 1
    largest.write_bytes(content)


@pytest.mark.parametrize("stage", ["capture", "tokenize_chats", "map_vocab"])
def test_a_flipped_bit_in_what_a_stage_reads_is_mended_within_the_run(
    stage, tiny, tmp_path, prefect_api, run_log
):
    copy = tiny.copy(tmp_path, without=("train",))
    # of the capture the file with the states
    harmed = min(manifests(copy.store, stage), key=lambda path: path.count("/"))
    flip_bit(copy.store / harmed)

    record = run_flow(copy.values, prefect_api)

    assert computed(record) == [stage, "train"]
    check_repaired(record, run_log.getvalue(), tiny)


def test_a_flipped_bit_in_the_speculator_that_a_run_hands_out_is_mended(
    tiny, tmp_path, prefect_api, run_log
):
    copy = tiny.copy(tmp_path)
    (harmed,) = manifests(copy.store, "export")
    flip_bit(copy.store / harmed)

    record = run_flow(copy.values, prefect_api)

    assert computed(record) == ["export"]
    check_repaired(record, run_log.getvalue(), tiny)
    assert verify_store(str(copy.store), deep=True)[1] == []


def test_what_verify_finds_in_reused_artifacts_it_sets_aside_and_the_next_run_makes_anew(
    tiny, tmp_path, prefect_api, capsys
):
    copy = tiny.copy(tmp_path)
    file = str(write_settings(copy.values, tmp_path / "settings.yaml"))
    flip_bit(copy.store / min(manifests(copy.store, "capture")))

    assert main(["verify", file, "--deep"]) == 1
    assert "add --repair to set aside what is wrong" in capsys.readouterr().out
    assert main(["verify", file, "--deep", "--repair"]) == 0
    assert "problems: 1" in capsys.readouterr().out

    assert computed(run_flow(copy.values, prefect_api)) == ["capture"]
    assert main(["verify", file, "--deep"]) == 0


@pytest.mark.parametrize("stage", ["collect", "capture", "export"])
def test_verify_misses_what_a_run_refers_to_until_it_is_made_anew(
    tiny, tmp_path, prefect_api, capsys, stage
):
    copy = tiny.copy(tmp_path)
    file = str(write_settings(copy.values, tmp_path / "settings.yaml"))
    assert main(["verify", file]) == 0
    gone = Path(max(manifests(copy.store, stage))).parent
    shutil.rmtree(copy.store / gone)

    assert main(["verify", file]) == 1
    out = capsys.readouterr().out
    who = "the draft verifier in service" if stage == "export" else f"run {tiny.result['run']}"
    assert f"{gone}: it is missing, and {who} refers to it; run its settings again" in out
    assert computed(run_flow(copy.values, prefect_api)) == [stage]
    assert main(["verify", file]) == 0


def check_repaired(record: dict[str, Any], log: str, tiny: TinyRun) -> None:
    assert "is corrupt; going through the stages again to make it anew" in log
    assert log.count("is set aside: ") == 1
    assert record["acceptance_length"] == tiny.result["acceptance_length"]
    # no stage's time holds another's
    seconds = [stage["seconds"] for stage in record["stages"].values()]
    assert sum(seconds) <= record["seconds"] + 0.1


def test_a_removed_reference_is_decoded_anew_and_the_drafts_texts_are_not(
    tiny, tmp_path, prefect_api
):
    copy = tiny.copy(tmp_path)
    shutil.rmtree(copy.store / "reference")
    before = manifests(copy.store, "evaluate")

    record = run_flow(copy.values, prefect_api)

    assert computed(record) == ["evaluate"]
    assert manifests(copy.store, "evaluate") == before
    assert list((copy.store / "reference").glob("*/manifest.json"))


CHANGES = {
    "train": ({"train": {"lr": 2e-3}}, ["train", "evaluate", "export", "promote"]),
    "vocabulary": (
        {"vocab": {"draft_size": 64}},
        ["map_vocab", "train", "evaluate", "export", "promote"],
    ),
    "split": (
        {"split": {"val_ratio": 0.4}},
        ["split", "map_vocab", "train", "evaluate", "export", "promote"],
    ),
    "layers": (
        {"capture": {"layers": [1, 4, 5]}},
        ["capture", "train", "evaluate", "export", "promote"],
    ),
    "draft tokens": ({"evaluate": {"draft_tokens": 2}}, ["evaluate", "export", "promote"]),
    "processes": (
        {"capture": {"gpus": 2}, "train": {"keep_checkpoints": 1, "tracker": "none"}},
        [],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_setting_makes_anew_what_depends_on_it(change, tiny, tmp_path, prefect_api):
    groups, expected = CHANGES[change]
    copy = tiny.copy(tmp_path)
    shards = manifests(copy.store, "capture")

    record = run_flow(copy.changed(**groups), prefect_api)

    assert computed(record) == expected
    assert (manifests(copy.store, "capture") == shards) == ("capture" not in expected)


@pytest.mark.slow
def test_new_conversations_are_captured_and_the_old_ones_are_not(tiny, tmp_path, prefect_api):
    copy = tiny.copy(tmp_path)
    shards = manifests(copy.store, "capture")
    more = write_chats(tmp_path / "more.jsonl", [3, *range(100, 104)])  # 3 was there before
    sources = [*copy.values["data"]["sources"], str(more)]

    record = run_flow(copy.changed(data={"sources": sources}), prefect_api)

    assert states(record)["load_verifier"] == "reused"
    after = manifests(copy.store, "capture")
    assert {path: after[path] for path in shards} == shards
    (new,) = after.keys() - shards.keys()
    assert json.loads((copy.store / new).read_text())["rows"] == 4
    assert record["stages"]["collect"]["rows"] == 24 + 5
    assert record["stages"]["capture"]["rows"] == 24 + 4


@pytest.mark.slow
def test_two_runs_at_once_on_one_store_both_succeed(tiny, tmp_path, prefect_api):
    copy = tiny.copy(tmp_path, without=("split", "map_vocab", "train", "evaluate", "export"))
    file = write_settings(copy.values, tmp_path / "settings.yaml")
    command = [sys.executable, "-m", "flows.cli", "run", str(file), "--json"]
    env = environment(tmp_path / "prefect", PREFECT_API_URL=prefect_api)

    runs = [
        subprocess.Popen(
            command, cwd=ROOT, env=env, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        for _ in range(2)
    ]
    outputs = [run.communicate(timeout=300) for run in runs]

    for run, (stdout, stderr) in zip(runs, outputs, strict=True):
        assert run.returncode == 0, stderr
        result = json.loads(stdout.splitlines()[-1])
        assert result["acceptance_length"] == tiny.result["acceptance_length"]
    assert computed(run_flow(copy.values, prefect_api)) == []


def test_refused_settings_end_with_status_2_and_one_line(tiny, tmp_path):
    file = write_settings(tiny.changed(train={"learning_rate": 1}), tmp_path / "settings.yaml")

    done = outrider("run", file, env=environment(tmp_path))

    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.startswith("outrider: train.learning_rate: there is no such setting; did")
    assert len(done.stderr.splitlines()) == 1


def test_a_failure_ends_with_status_1_and_its_cause_in_the_last_line(tiny, tmp_path, prefect_api):
    values = tiny.changed(vocab={"draft_size": 1000}) | {"store": str(tmp_path / "store")}
    file = write_settings(values, tmp_path / "settings.yaml")
    env = environment(tmp_path / "prefect", PREFECT_API_URL=prefect_api)

    done = outrider("run", file, "--json", env=env)

    assert done.returncode == 1
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("outrider: vocab.draft_size 1000 exceeds")
    assert done.stderr.count("vocab.draft_size 1000 exceeds") == 1

    debug = outrider("run", file, "--debug", env=env)

    assert debug.returncode == 1
    assert "Traceback" in debug.stderr
    assert "vocab.draft_size 1000 exceeds" in debug.stderr.splitlines()[-1]


def test_status_says_in_which_stage_a_run_failed_and_why(tiny, tmp_path, prefect_api, capsys):
    copy = tiny.copy(tmp_path)
    values = copy.changed(data={"sources": [str(tmp_path / "nosuch.jsonl")]})
    with pytest.raises(ValueError, match=r"nosuch\.jsonl"):
        run_flow(values, prefect_api)
    assert main(["status", "--store", str(copy.store)]) == 0
    *_, last = capsys.readouterr().out.splitlines()
    assert " failed " in last
    assert " collect" in last
    assert main(["status", "latest", "--store", str(copy.store)]) == 0
    assert "in collect: " in capsys.readouterr().out
