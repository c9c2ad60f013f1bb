from pathlib import Path
from typing import Any

import pytest
import yaml

from flows.settings import SettingsError, describe_settings, load_settings, parse_settings
from tests.tiny_runs import ROOT

LEAST = "name: small\nstore: ./runs\nverifier: {model: /m}\ndata: {sources: [chats.jsonl]}\n"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "settings.yaml"
    path.write_text(LEAST)
    return path


def refusal(path: Path, *overrides: str) -> str:
    with pytest.raises(SettingsError) as caught:
        load_settings(path, list(overrides))
    return str(caught.value)


def test_a_file_with_the_required_keys_gets_every_default(file):
    settings = load_settings(file)

    assert settings.train.lr == 3e-5
    assert settings.vocab.draft_size == 32_000
    assert settings.evaluate.draft_tokens == 3


@pytest.mark.parametrize(
    ("key", "nearest"),
    [
        ("train.epoch", "epochs"),
        ("train.ttt_step", "ttt_steps"),
        ("capture.gpu", "gpus"),
        ("data.source", "sources"),
        ("vocab.size", "draft_size"),
        ("train.learning_rate", "lr"),
    ],
)
def test_an_unknown_key_is_refused_with_the_nearest_known_one(file, key, nearest):
    assert refusal(file, f"{key}=1") == (
        f"{key}: there is no such setting; did you mean {nearest}?"
    )


def test_an_unknown_group_is_refused_with_the_nearest_known_one(file):
    assert refusal(file, "trian.lr=1") == ("trian: there is no such setting; did you mean train?")


def test_a_key_without_its_group_is_refused_with_the_group(file):
    assert refusal(file, "epochs=1") == (
        "epochs: there is no such setting; did you mean train.epochs?"
    )


@pytest.mark.parametrize(
    ("override", "way_out"),
    [
        ("capture.layers='2,4'", "write a list, for example [a, b] (given: '2,4')"),
        ("data.sources=chats.jsonl", "write a list, for example [a, b] (given: 'chats.jsonl')"),
        ("verifier=/models/x", "write a group of settings, {key: value}, of model, "),
    ],
)
def test_a_value_of_another_form_is_refused_with_the_form(file, override, way_out):
    assert way_out in refusal(file, override)


def test_a_key_that_is_there_twice_is_refused_with_its_line(file):
    file.write_text(file.read_text() + "\ntrain: {epochs: 1}\ntrain: {lr: 1.0e-4}\n")
    assert "the key train is there twice" in refusal(file)


def test_every_problem_is_named_not_only_the_first(file):
    message = refusal(file, "train.epochs=0", "train.lr=fast", "capture.rows=3")

    assert "train.epochs: Input should be greater than 0 (given: 0)" in message
    assert "train.lr: " in message
    assert "(given: 'fast')" in message
    assert "capture.rows: there is no such setting" in message


@pytest.mark.parametrize("group", ["name", "store", "verifier", "data"])
def test_a_missing_required_key_is_named(file, group):
    values = yaml.safe_load(LEAST)
    del values[group]
    file.write_text(yaml.safe_dump(values))

    assert refusal(file) == f"{group}: this setting is required"


@pytest.mark.parametrize(
    ("override", "value"),
    [
        ("train.lr=1e-4", 1e-4),
        ("train.lr=2.5E-3", 2.5e-3),
        ("train.epochs=7", 7),
        ("vocab.draft_size=null", None),
        ("capture.layers=[1, 3]", (1, 3)),
        ("data.regenerate=true", True),
        ("store=s3://bucket/a=b", "s3://bucket/a=b"),
        ("split.holdout_sources=[news]", ("news",)),
    ],
)
def test_set_changes_one_setting(file, override, value):
    found: Any = load_settings(file, [override])
    for name in override.split("=")[0].split("."):
        found = getattr(found, name)

    assert found == value
    assert type(found) is type(value)


def test_a_later_set_wins(file):
    assert load_settings(file, ["train.lr=0.1", "train.lr=0.2"]).train.lr == 0.2


@pytest.mark.parametrize("override", ["train.lr", "=1"])
def test_a_set_without_key_or_value_is_refused_with_its_form(file, override):
    assert f"--set {override!r}: write it as key=value" in refusal(file, override)


def test_a_set_below_a_value_is_refused(file):
    assert refusal(file, "store.path=x") == (
        "--set 'store.path=x': store is a value, not a group of settings"
    )


@pytest.mark.parametrize("override", ["train.lr=[", "train.lr={a: b"])
def test_a_set_that_is_no_yaml_is_refused(file, override):
    assert f"--set {override!r}" in refusal(file, override)


def test_a_set_of_a_group_that_the_file_leaves_empty_is_taken(file):
    file.write_text(LEAST + "train:\n")

    assert load_settings(file, ["train.lr=1"]).train.lr == 1


@pytest.mark.parametrize("text", ["name: [unclosed", "\t- x", "a: b: c"])
def test_a_file_that_is_no_yaml_is_refused(file, text):
    file.write_text(text)

    assert refusal(file).startswith(f"settings file {file} is no YAML: ")


@pytest.mark.parametrize("text", ["", "- one\n- two\n", "plain text"])
def test_a_file_without_keys_is_refused(file, text):
    file.write_text(text)

    assert refusal(file) == f"settings file {file} holds no mapping of keys to values"


def test_a_missing_file_is_refused(tmp_path):
    path = tmp_path / "nowhere.yaml"

    assert refusal(path) == f"settings file {path}: No such file or directory"


def test_a_store_in_memory_is_refused_because_stages_are_other_processes(file):
    assert refusal(file, "store=memory://x").startswith("store: a store in memory ends with")


def test_gpus_that_do_not_divide_into_processes_are_refused(file):
    message = refusal(file, "capture.gpus=6", "capture.gpus_per_process=4")

    assert "capture.gpus 6 is no multiple of capture.gpus_per_process 4" in message


def test_the_reference_of_all_settings_is_up_to_date():
    assert (ROOT / "SETTINGS.md").read_text() == describe_settings() + "\n"


def test_every_setting_is_described():
    rows = [line for line in describe_settings().splitlines() if line.startswith("| `")]

    assert len(rows) > 40
    assert [row for row in rows if row.endswith("|  |")] == []


def test_the_deployed_parameters_are_those_of_the_demo():
    deployments = yaml.safe_load((ROOT / "prefect.yaml").read_text())["deployments"]
    (train,) = [entry for entry in deployments if entry["name"] == "train-draft"]
    demo = load_settings(ROOT / "deployments/smollm2-demo.yaml")

    assert parse_settings(train["parameters"]["settings"]) == demo


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("train.lr=1e30", "train.lr: Input should be less than or equal to 1"),
        (
            "train.lr=true",
            "train.lr: true and false fit only a setting that is switched on and off",
        ),
        ("capture.rows_per_shard=true", "capture.rows_per_shard: true and false fit only"),
        ("train.lr=.inf", "train.lr: Input should be a finite number"),
        ("train.weight_decay=.nan", "train.weight_decay: Input should be a finite number"),
        ("train.epochs=1000000000", "train.epochs: Input should be less than or equal to 10000"),
        ("train.ttt_steps=5000", "train.ttt_steps: Input should be less than or equal to 16"),
        ("train.muon_lr=0", "train.muon_lr: Input should be greater than 0"),
        ("train.noise=-0.1", "train.noise: Input should be greater than or equal to 0"),
        (
            "train.tokens_per_batch=most",
            "train.tokens_per_batch: write a whole number above 0, or auto (given: 'most')",
        ),
        ("train.tokens_per_batch=0", "train.tokens_per_batch: write a whole number above 0"),
        ("evaluate.draft_tokens=99", "evaluate.draft_tokens: Input should be less than or equal"),
        ("capture.layers=[]", "capture.layers is empty"),
        ("capture.layers=[4, 2]", "must be ascending and name each layer once: use [2, 4]"),
        ("capture.layers=[-1, 2]", "must not be negative"),
        ('data.sources=[""]', "data.sources.0: String should have at least 1 character"),
        ("store=ftpp://x/y", "store: ftpp://x/y: not a URL of a known kind"),
    ],
)
def test_values_without_sense_are_refused_with_the_settings(file, override, said):
    assert said in refusal(file, override)


def test_a_batch_is_a_number_of_tokens_or_auto(file):
    assert load_settings(file, ["train.tokens_per_batch=auto"]).train.tokens_per_batch == "auto"
    assert load_settings(file, ["train.tokens_per_batch=512"]).train.tokens_per_batch == 512


def test_settings_that_decide_nothing_are_not_in_the_identity_of_a_training(file):
    def identity(*overrides: str) -> dict[str, Any]:
        return load_settings(file, list(overrides)).train.identity()

    adamw, muon = identity(), identity("train.optimizer=muon")
    assert adamw != muon
    assert identity("train.muon_lr=0.5") == adamw
    assert identity("train.optimizer=muon", "train.muon_lr=0.5") != muon
    assert (
        identity("train.optimizer=muon", "train.muon_lr=3e-5") == muon
    )  # lr, what it is by default
    assert identity("train.init=elsewhere") == adamw  # its content counts, as an input
    assert identity("train.noise=0.1") != adamw


def test_a_group_without_anything_in_it_has_its_defaults(file):
    file.write_text(LEAST + "train:\ncapture:\n")

    assert load_settings(file).train.epochs == 3


def test_a_required_group_without_anything_in_it_is_named(file):
    file.write_text(LEAST.replace("verifier: {model: /m}", "verifier:"))

    assert refusal(file) == "verifier: this setting is required"
