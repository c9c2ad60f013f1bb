"""A verifier whose states of one rare token are no numbers: samples with it are left out, counted, not tried again."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.drop_budget import DroppedTooManyError
from tasks.engines.transformers import CapturedStates
from tasks.jobs.capture import find_fault
from tests.tiny_models import make_tokenizer
from tests.tiny_runs import chat, computed, manifests, run_flow, tiny_values

RARE = "~"


@pytest.fixture
def values(tmp_path: Path) -> dict[str, Any]:
    """Settings of a run on 24 plain conversations and 2 with the rare token."""
    values = tiny_values(tmp_path)
    weights = Path(values["verifier"]["model"]) / "model.safetensors"
    tensors = load_file(weights)
    (rare,) = make_tokenizer().encode(RARE)
    # a number itself, and infinite as a state in bf16
    tensors["model.embed_tokens.weight"][rare] = torch.finfo(torch.float32).max
    save_file(tensors, weights, metadata={"format": "pt"})
    with Path(values["data"]["sources"][0]).open("a") as file:
        for number in (1, 2):
            row = chat(number, source="seen")
            row["messages"][0]["content"] += RARE
            file.write(json.dumps(row) + "\n")
    return values | {"capture": {"rows_per_shard": 13}, "export": {"dtype": "float32"}}


def said(log: io.StringIO) -> str:
    """What was said of the plan since the last call."""
    (line,) = [x for x in log.getvalue().splitlines() if x.startswith("capture: ") and "done," in x]
    log.truncate(0)
    log.seek(0)
    return line


def test_samples_without_usable_states_are_quarantined_within_the_budget(
    values, prefect_api, run_log
):
    store = Path(values["store"])

    with pytest.raises(DroppedTooManyError) as caught:
        run_flow(values, prefect_api)
    assert "of 26 samples are quarantined (NaN or infinite values in aux: " in str(caught.value)
    assert "more than data.max_dropped 1.00% allows" in str(caught.value)
    assert said(run_log) == "capture: 0 of 26 samples done, 26 to do in 2 shards, 0 quarantined"
    assert not (store / "checkpoints").exists()

    values["data"]["max_dropped"] = 0.1
    record = run_flow(values, prefect_api)

    said(run_log)
    assert record["stages"]["capture"]["rows"] == 24
    shards = [json.loads((store / path).read_text()) for path in manifests(store, "capture")]
    left_out = [entry for shard in shards for entry in shard["facts"]["quarantined"]]
    assert len(left_out) == 2
    assert {entry["reason"] for entry in left_out} == {"NaN or infinite values in aux"}
    assert sum(shard["rows"] for shard in shards) == 24
    # what is left of a shard is held against the verifier all the same
    assert all(
        shard["rows"] and shard["facts"]["canary"]["argmax_agreement"] >= 0.98 for shard in shards
    )
    (trained,) = record["stages"]["train"]["parts"]
    facts = json.loads((store / trained / "manifest.json").read_text())["facts"]
    assert facts["nonfinite_steps"] == 0

    before = manifests(store)
    assert computed(run_flow(values, prefect_api)) == []
    assert said(run_log) == "capture: 24 of 26 samples done, 0 to do in 0 shards, 2 quarantined"
    assert manifests(store) == before

    values["capture"] |= {"retry_quarantined": True}
    for _ in range(2):  # as often as it is asked for
        assert computed(run_flow(values, prefect_api)) == ["capture"]
        assert said(run_log) == "capture: 24 of 26 samples done, 2 to do in 1 shards, 0 quarantined"


@pytest.mark.parametrize(
    ("aux", "last", "reason"),
    [
        (torch.zeros(5, 6), torch.zeros(5, 2), None),
        (torch.full((5, 6), torch.nan), torch.zeros(5, 2), "NaN or infinite values in aux"),
        (torch.zeros(5, 6), torch.full((5, 2), -torch.inf), "NaN or infinite values in last"),
    ],
)
def test_states_that_are_no_numbers_are_faults(aux, last, reason):
    assert find_fault(CapturedStates(aux, last)) == reason
