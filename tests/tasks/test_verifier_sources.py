"""Where a verifier may lie: this machine, a bucket, the hub and its cache."""

import json
import logging
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from flows.cli import main
from storage.store import Store
from tasks.eagle3.verifier import VerifierError, identity, read_facts
from tasks.verifier_sources import VerifierSettings, find_model
from tests.hub_server import MODEL, Hub, served_model
from tests.storage.conftest import (  # noqa: F401 - fixtures
    s3_endpoint,
    s3_environment,
    s3_store,
)
from tests.synthetic_checkpoints import CONFIG, PLAIN, write_checkpoint, write_weights
from tests.tiny_runs import ROOT, environment, outrider, write_chats, write_settings

NEEDED = {
    "config.json",
    "generation_config.json",
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
}


def write_model(directory: Path) -> Path:
    """A checkpoint in two files, with code and with weights in other formats beside it."""
    write_checkpoint(directory, CONFIG, PLAIN, files=2)
    (directory / "generation_config.json").write_text('{"eos_token_id": 7}')
    (directory / "tokenizer.json").write_text("{}")
    (directory / "modeling_own.py").write_text("raise SystemExit")
    (directory / "README.md").write_text("# A model")
    (directory / "pytorch_model.bin").write_bytes(b"1" * 1000)
    write_weights(directory / "consolidated.safetensors", PLAIN)
    return directory


def names(directory: Path) -> set[str]:
    return {path.name for path in directory.iterdir()}


@pytest.fixture
def cache(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


@pytest.fixture
def bucket(s3_store, tmp_path) -> Store:  # noqa: F811 - the fixture
    """A store in a bucket that holds the model in its directory `model`."""
    for path in write_model(tmp_path / "model").iterdir():
        s3_store.write_bytes(f"model/{path.name}", path.read_bytes())
    return s3_store


def test_a_model_in_a_bucket_is_copied_once_without_what_it_does_not_need(
    bucket, tmp_path, cache, caplog
):
    settings = VerifierSettings(model=f"{bucket.url}/model")
    with caplog.at_level(logging.INFO):
        found = find_model(settings)

    assert found.is_relative_to(cache)
    assert names(found) == NEEDED
    for name in NEEDED:
        assert (found / name).read_bytes() == (tmp_path / "model" / name).read_bytes()
    assert "copy model: " in caplog.text
    assert "(100 %)" in caplog.text
    before = {path: path.stat().st_mtime_ns for path in cache.rglob("*")}
    assert find_model(settings) == found
    assert {path: path.stat().st_mtime_ns for path in cache.rglob("*")} == before


def test_a_copied_model_is_the_same_model(bucket, tmp_path, cache):
    (tmp_path / "model" / "modeling_own.py").unlink()
    found = find_model(VerifierSettings(model=f"{bucket.url}/model"))

    assert identity(found) == identity(tmp_path / "model")
    assert read_facts(found) == read_facts(tmp_path / "model")


def test_code_is_copied_only_when_it_is_trusted(bucket, cache):
    settings = VerifierSettings(model=f"{bucket.url}/model", trust_remote_code=True)

    assert names(find_model(settings)) == NEEDED | {"modeling_own.py"}


def test_a_model_that_cannot_be_used_is_refused_before_it_is_copied(bucket, cache):
    bucket.write_bytes("model/config.json", json.dumps(CONFIG | {"vocab_size": 97}).encode())

    with pytest.raises(VerifierError, match=r"s3://.*shape \[96, 64\], the config says \[97, 64\]"):
        find_model(VerifierSettings(model=f"{bucket.url}/model"))
    assert not cache.exists()


@pytest.mark.slow
def test_a_model_that_moves_into_a_bucket_keeps_every_artifact(
    s3_store,  # noqa: F811
    tmp_path,
    cache,
    capsys,
):
    from tests.tiny_models import make_llama

    local = make_llama(tmp_path / "verifier")
    for path in local.iterdir():
        s3_store.write_bytes(f"model/{path.name}", path.read_bytes())
    values = {
        "name": "moved",
        "vocab": {"draft_size": 128},
        "store": str(tmp_path / "store"),
        "data": {"sources": [str(write_chats(tmp_path / "chats.jsonl", range(6)))]},
    }
    figures = []
    for model in (str(local), f"{s3_store.url}/model"):
        file = write_settings(values | {"verifier": {"model": model}}, tmp_path / "settings.yaml")
        assert main(["estimate", str(file), "--json"]) == 0
        figures.append(json.loads(capsys.readouterr().out) | {"free_bytes": None})
        made = sorted((tmp_path / "store").glob("*/*/manifest.json"))

    assert figures[0] == figures[1]
    assert [path.parts[-3] for path in made] == ["conversations", "samples", "verifier"]


@pytest.mark.parametrize("url", ["s3://outrider-tests/none", "memory://none"])
def test_a_url_without_a_model_is_refused_by_name(s3_environment, url):  # noqa: F811
    with pytest.raises(VerifierError, match=rf"verifier\.model {url}: .*correct the URL"):
        find_model(VerifierSettings(model=url))


def test_a_url_of_an_unknown_kind_is_refused():
    with pytest.raises(VerifierError, match=r"verifier\.model nope://x: .*not a URL of a known"):
        find_model(VerifierSettings(model="nope://x"))


def test_a_cache_that_is_no_directory_is_refused(bucket, monkeypatch):
    monkeypatch.setenv("OUTRIDER_CACHE", "s3://outrider-tests/cache")

    with pytest.raises(VerifierError, match=r"OUTRIDER_CACHE is s3://.*name a local directory"):
        find_model(VerifierSettings(model=f"{bucket.url}/model"))


@pytest.mark.parametrize("prefix", ["", "file://"])
def test_a_model_on_this_machine_is_used_where_it_is(tmp_path, cache, prefix):
    model = write_model(tmp_path / "model")

    assert find_model(VerifierSettings(model=f"{prefix}{model}")) == model
    assert not cache.exists()


FIND = """
import json, sys
from tasks.verifier_sources import VerifierSettings, find_model
print(find_model(VerifierSettings(**json.loads(sys.argv[1]))))
"""


def find(env: dict[str, str], **settings: object) -> subprocess.CompletedProcess[str]:
    """find_model in a process of its own: the hub's client reads its environment once."""
    return subprocess.run(
        [sys.executable, "-c", FIND, json.dumps(settings)],
        env={**os.environ, **env, "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
    )


@pytest.fixture
def hub(tmp_path) -> Iterator[Hub]:
    with served_model(write_model(tmp_path / "model")) as found:
        yield found


def test_of_a_hub_model_only_the_files_needed_are_fetched_and_only_once(hub, tmp_path):
    env = hub.environment(tmp_path / "home")
    done = find(env, model=MODEL)

    assert done.returncode == 0, done.stderr
    found = Path(done.stdout.strip())
    assert found.is_relative_to(tmp_path / "home")
    assert found.name == hub.commit
    assert names(found) == NEEDED
    assert set(hub.sent) == NEEDED
    hub.sent.clear()
    assert find(env, model=MODEL, revision=hub.commit).stdout == done.stdout
    # its config and headers are looked at again, its weights are not
    assert sum(hub.sent.values()) < 3000
    offline = find({**env, "HF_HUB_OFFLINE": "1"}, model=MODEL)
    assert offline.stdout == done.stdout


def test_code_on_the_hub_is_fetched_only_when_it_is_trusted(hub, tmp_path):
    done = find(hub.environment(tmp_path / "home"), model=MODEL, trust_remote_code=True)

    assert names(Path(done.stdout.strip())) == NEEDED | {"modeling_own.py"}


def test_a_hub_model_is_inspected_without_its_weights(hub, tmp_path):
    big = {**PLAIN, "model.layers.0.mlp.up_proj.weight": ("BF16", (1 << 12, 1 << 12))}
    shutil.rmtree(hub.directory)
    write_checkpoint(hub.directory, CONFIG, big)
    header_bytes = write_weights(tmp_path / "again.safetensors", big)
    env = {**environment(tmp_path / "prefect"), **hub.environment(tmp_path / "home")}

    done = outrider("inspect", MODEL, "--json", env=env)

    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["directory"] == f"hf://{MODEL}"
    assert found["parameters"] == 2 * 96 * 64 + 64 + (1 << 24)
    assert hub.sent["model.safetensors"] == header_bytes
    assert not list((tmp_path / "home").rglob("*.safetensors"))


def test_what_the_hub_does_not_have_is_refused_by_name(hub, tmp_path):
    env = {**environment(tmp_path / "prefect"), **hub.environment(tmp_path / "home")}

    done = outrider("inspect", MODEL, "--revision", "v9", env=env)

    assert done.returncode == 1
    assert done.stderr.startswith(
        f"outrider: verifier.model '{MODEL}' (revision v9) is no directory here and could not be fetched"
    )
    assert len(done.stderr.splitlines()) == 1


COMMIT = "0123456789abcdef0123456789abcdef01234567"


def hub_cache(directory: Path) -> Path:
    """A cache as the hub's client lays it out, with the branch main at COMMIT."""
    model = directory / f"models--{MODEL.replace('/', '--')}"
    (model / "refs").mkdir(parents=True)
    (model / "refs" / "main").write_text(COMMIT)
    return write_model(model / "snapshots" / COMMIT)


@pytest.mark.parametrize("revision", [None, "main", COMMIT])
def test_without_a_network_a_model_is_found_in_the_hubs_cache(tmp_path, revision):
    snapshot = hub_cache(tmp_path)
    env = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    done = find(env, model=MODEL, revision=revision)

    assert done.stdout.strip() == str(snapshot), done.stderr


def test_a_cache_whose_download_was_cut_off_is_refused(tmp_path):
    snapshot = hub_cache(tmp_path)
    (snapshot / "model-00002-of-00002.safetensors").unlink()
    env = {"HF_HUB_CACHE": str(tmp_path), "HF_HUB_OFFLINE": "1"}

    done = find(env, model=MODEL)

    assert "names 2 weight files, 1 of them are not there" in done.stderr
    assert find(env, model=MODEL, revision="other").returncode == 1
