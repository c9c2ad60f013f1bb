"""What a tiny run's data look like: 24 conversations of one file, 18 seen and 6 unseen."""

from typing import Any

import pyarrow.parquet as pq

from storage import artifacts
from storage.manifest import Manifest
from storage.store import Store
from tasks.data_summary import DataSummary, summarize_data
from tests.tiny_runs import TinyRun


def summary(tiny: TinyRun, **changes: Any) -> DataSummary:
    store = Store(str(tiny.store))

    def parts(stage: str) -> list[Manifest]:
        return [artifacts.peek(store, path) for path in tiny.result["stages"][stage]["parts"]]

    found: dict[str, Any] = {
        "conversations": parts("collect"),
        "samples": parts("tokenize_chats"),
        "split": parts("split")[0],
        "vocab": parts("map_vocab")[0],
    }
    return summarize_data(store, **(found | changes))


def test_the_data_are_counted_by_source_side_and_length(tiny: TinyRun) -> None:
    data = summary(tiny)

    (file,) = tiny.store.glob("samples/*/attempt-*/samples.parquet")
    rows = pq.read_table(file).to_pylist()
    tokens = sum(len(row["input_ids"]) for row in rows)
    supervised = sum(sum(row["loss_mask"]) for row in rows)
    assert data.figures["samples"] == "24, 0 of them cut"
    assert data.figures["tokens"] == str(f"{tokens:,}")
    assert data.figures["supervised tokens"].startswith(f"{supervised:,} (")
    train, val, test = data.sources["seen"]
    assert (train + val, test) == (18, 0)
    assert data.sources["unseen"] == (0, 0, 6)
    assert data.lengths is not None
    (bars,) = data.lengths.shapes
    assert bars.path.count("M") == max(len(row["input_ids"]) for row in rows) // 2 + 1
    assert data.coverage == {"train": 1.0, "val": 1.0, "test": 1.0}
    assert data.coverage_by_size is not None
    assert data.coverage_by_size.top == "1.00"
    assert data.samples[0].count("⟦") == data.samples[0].count("⟧") == 1


def test_what_has_gone_is_left_out(tiny: TinyRun) -> None:
    data = summary(tiny, conversations=[], samples=[], split=None, vocab=None)

    assert data == DataSummary({}, {}, None, {}, None, ())
