"""Which samples are missing, in which order: against sets, dictionaries and sorted()."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from storage.store import Store
from tasks.sample_index import capture_order, count_distinct, is_in
from tests.benchmarks import bench_plan
from tests.tiny_runs import ROOT

IDS = {
    "digests": [f"{n * 0x9E3779B97F4A7C15 % 2**96:024x}" for n in range(300)],
    "the same beginning": [f"sample-{n}" for n in range(300)],
    "any length": ["é" * (n % 5) + chr(ord("a") + n % 26) * (n % 12) for n in range(300)],
}


@pytest.mark.parametrize("kind", IDS)
def test_missing_samples_are_ordered_by_length_then_id_each_once(kind: str) -> None:
    random = np.random.default_rng(0)
    drawn = [IDS[kind][i] for i in random.integers(0, 300, 500)]
    length = {sample: sum(sample.encode()) % 7 for sample in drawn}
    done = set(IDS[kind][:120])
    ids = pa.chunked_array([drawn[:200], [], drawn[200:]], pa.string())
    lengths = np.array([length[sample] for sample in drawn], np.int32)

    missing = ~is_in(ids, pa.chunked_array([sorted(done)], pa.string()))
    order = capture_order(ids, lengths, missing)

    wanted = sorted((length[sample], sample) for sample in set(drawn) - done)
    assert [(int(lengths[row]), drawn[row]) for row in order] == wanted
    assert count_distinct(ids, missing) == len(wanted)
    assert count_distinct(ids, ~missing) == len(set(drawn) & done)


def test_nothing_missing_is_no_order() -> None:
    ids = pa.chunked_array([["a", "b"]])
    assert capture_order(ids, np.array([1, 2], np.int32), np.zeros(2, bool)).tolist() == []
    empty = pa.chunked_array([], pa.string())
    assert capture_order(empty, np.zeros(0, np.int32), np.zeros(0, bool)).tolist() == []
    assert is_in(ids, empty).tolist() == [False, False]


def test_a_plan_of_200_000_samples_takes_seconds_and_no_object_for_each(tmp_path: Path) -> None:
    """12.8 M tokens: as Python lists they alone would take half a GB."""
    from tasks.load_verifier import load_verifier
    from tasks.stage import call
    from tests.tiny_models import make_llama

    store = Store(str(tmp_path / "store"))
    call(load_verifier, store, str(make_llama(tmp_path / "verifier")))
    bench_plan.make_samples(store, 200_000, 64)

    # in a process of its own, for its peak memory
    command = [sys.executable, bench_plan.__file__, "--directory", str(tmp_path), "--step", "plan"]
    done = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    figures = json.loads(done.stdout.splitlines()[-1])

    assert figures["shards"] == 100
    assert figures["cpu_seconds"] < 20
    assert figures["peak_gb"] - figures["before_gb"] < 0.4
