"""The whole pipeline, by the command line, on verifiers that are not plain: Kimi-K2.5's form, a transformed head."""

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tasks.load_verifier import VerifierFacts
from tests.families.dense import build_cohere, build_gemma2
from tests.families.nested import build_kimi_k25_int4
from tests.tiny_runs import (
    CONVERSATIONS,
    STAGES,
    Values,
    environment,
    outrider,
    write_chats,
    write_settings,
)

pytestmark = pytest.mark.slow


def run_on(
    build: Callable[[Path], Any], directory: Path, api: str, *, gpus: int = 1
) -> tuple[Values, VerifierFacts]:
    """Run the pipeline on the verifier that `build` writes; returns the result and the facts it found."""
    build(directory / "verifier")
    values = {
        "name": "family",
        "store": str(directory / "store"),
        "verifier": {"model": str(directory / "verifier")},
        "data": {"sources": [str(write_chats(directory / "chats.jsonl", range(CONVERSATIONS)))]},
        "tokenize": {"max_tokens": 96},
        "capture": {"layers": [1, 3, 4], "gpus": gpus, "rows_per_shard": 8},
        "vocab": {"draft_size": 128},
        "split": {"holdout_sources": ["unseen"]},
        "train": {"epochs": 1, "lr": 1e-3, "tokens_per_batch": 128},
        "evaluate": {"prompts": 4, "max_new_tokens": 12},
    }
    file = write_settings(values, directory / "settings.yaml")
    env = environment(directory / "prefect", PREFECT_API_URL=api)
    done = outrider("run", file, "--json", env=env)
    assert done.returncode == 0, done.stderr
    (facts,) = (directory / "store").glob("verifier/*/attempt-*/facts.json")
    found = VerifierFacts.model_validate(json.loads(facts.read_text())["facts"])
    return json.loads(done.stdout.splitlines()[-1]), found


def test_a_run_on_a_verifier_of_kimi_k25s_form_takes_less_than_two_minutes(tmp_path, prefect_api):
    pytest.importorskip("compressed_tensors")
    started = time.monotonic()

    result, facts = run_on(build_kimi_k25_int4, tmp_path, prefect_api, gpus=2)

    assert time.monotonic() - started < 120
    assert tuple(result["stages"]) == STAGES
    assert result["stages"]["capture"]["rows"] == CONVERSATIONS
    assert result["acceptance_length"] >= 1
    assert facts.config_path == ("text_config",)
    assert facts.embed_key == "language_model.model.embed_tokens.weight"
    config = json.loads((Path(result["speculator"]) / "config.json").read_text())
    layer = config["transformer_layer_config"]
    assert (layer["model_type"], layer["num_hidden_layers"]) == ("llama", 1)
    assert config["draft_vocab_size"] == 128


@pytest.mark.parametrize("build", [build_gemma2, build_cohere])
def test_a_run_on_a_verifier_with_a_transformed_head_writes_its_own_text(
    build, tmp_path, prefect_api
):
    # the canary of every shard and the equality of all texts are part of the run
    result, facts = run_on(build, tmp_path, prefect_api)

    assert not facts.transform.plain
    assert tuple(result["stages"]) == STAGES
