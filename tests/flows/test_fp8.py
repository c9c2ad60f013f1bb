"""A whole run whose states are stored in fp8."""

import json

from storage import artifacts
from storage.shards import open_shard
from storage.store import Store
from tests.tiny_runs import computed, manifests, run_flow


def test_a_run_on_fp8_states_stores_half_the_bytes_and_trains_on_them(tiny, tmp_path, prefect_api):
    copy = tiny.copy(tmp_path)
    before = set(manifests(copy.store, "capture"))

    record = run_flow(copy.changed(capture={"codec": "fp8"}), prefect_api)

    assert computed(record) == ["capture", "train", "evaluate", "export", "promote"]
    assert record["stages"]["capture"]["rows"] == 24
    assert 1.0 <= record["acceptance_length"] <= 4.0
    store = Store(str(copy.store))
    bytes_of = {"bf16": 0, "fp8": 0}
    for path in sorted(manifests(copy.store, "capture")):
        shard = artifacts.require(store, path.removesuffix("/manifest.json"))
        with open_shard(store, shard) as reader:
            assert reader.codec == ("bf16" if path in before else "fp8")
            bytes_of[reader.codec] += shard.files["states.safetensors"].bytes
        if reader.codec == "fp8":
            canary = json.loads((copy.store / path).read_text())["facts"]["canary"]
            # judged as captured, measured as stored
            assert canary["argmax_agreement"] >= 0.98
            assert max(canary["aux_error"]) < 0.01
            assert 0.8 < canary["stored_agreement"] <= 1.0
    # (H + 2) bytes a state instead of 2 H, H = 64, and the same headers
    assert 0.5 < bytes_of["fp8"] / bytes_of["bf16"] < 0.54
