"""Captured samples as training reads them: states memory-mapped from the shards, masks from the samples."""

from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch

from storage import artifacts
from storage.layout import SAMPLES_TABLE, SPLIT_TABLE
from storage.shards import ShardReader, open_shard
from storage.store import Store
from storage.tables import read_table
from tasks.eagle3.batches import TrainingSample


@dataclass(frozen=True)
class _Where:
    reader: ShardReader
    start: int
    stop: int
    input_ids: list[int]
    loss_mask: list[bool]


class CapturedSamples(Sequence[TrainingSample]):
    """The samples of one side, read when they are asked for."""

    def __init__(self, rows: list[_Where]) -> None:
        self._rows = rows
        self.lengths = [row.stop - row.start for row in rows]

    def __len__(self) -> int:
        """Count the samples."""
        return len(self._rows)

    def __getitem__(self, index: Any) -> Any:
        """Read one sample's states."""
        row = self._rows[index]
        return TrainingSample(
            input_ids=torch.tensor(row.input_ids),
            aux=row.reader.aux(row.start, row.stop),
            last=row.reader.last(row.start, row.stop),
            loss_mask=torch.tensor(row.loss_mask),
        )


def open_samples(
    stack: ExitStack, store: Store, request: dict[str, Any], *, max_tokens: int
) -> dict[str, CapturedSamples]:
    """Open the shards for the length of `stack` and return the samples of the sides train and val.

    Left out are samples that teach nothing, without a supervised token or shorter than two, and quarantined ones.
    """
    readers = _open_shards(stack, store, request["states"])
    quarantined = set(request["quarantined"])
    with artifacts.open_file(
        store, artifacts.require(store, request["split"]), SPLIT_TABLE
    ) as path:
        side_of = {row["conversation_id"]: row["side"] for row in read_table(path).to_pylist()}
    sides: dict[str, dict[str, _Where]] = {"train": {}, "val": {}, "test": {}}
    for part in request["samples"]:
        with artifacts.open_file(store, artifacts.require(store, part), SAMPLES_TABLE) as path:
            rows = read_table(path).to_pylist()
        for row in rows:
            if row["sample_id"] in quarantined:
                continue
            reader, start, stop = readers[row["sample_id"]]
            stop = min(stop, start + max_tokens)
            mask = row["loss_mask"][: stop - start]
            if stop - start >= 2 and any(mask[1:]):
                where = _Where(reader, start, stop, row["input_ids"][: stop - start], mask)
                sides[side_of[row["conversation_id"]]].setdefault(row["sample_id"], where)
    if not sides["train"]:
        raise ValueError(
            "train: the train side has no sample with a supervised token; add data or lower split.val_ratio"
        )
    return {
        side: CapturedSamples([rows[key] for key in sorted(rows)])
        for side, rows in sides.items()
        if side != "test"
    }


def _open_shards(
    stack: ExitStack, store: Store, paths: Sequence[str]
) -> dict[str, tuple[ShardReader, int, int]]:
    where: dict[str, tuple[ShardReader, int, int]] = {}
    for path in paths:
        reader = stack.enter_context(open_shard(store, artifacts.require(store, path)))
        offsets = reader.rows.offsets.tolist()
        for sample, start, stop in zip(reader.rows.sample_ids, offsets, offsets[1:], strict=False):
            where.setdefault(sample, (reader, start, stop))
    return where
