"""Stage capture: samples -> the verifier's hidden states, in shards, only for samples that have none yet.

What determines a sample's states is the verifier, the layers and the token ids. All shards of one such
combination lie under one *capture key*, whatever run made them; `plan_capture` subtracts their samples from
the wanted ones.
"""

import logging
from collections.abc import Iterable, Sequence
from dataclasses import asdict, replace

import numpy as np
import pyarrow as pa
from prefect import task
from prefect.cache_policies import NO_CACHE

from storage import artifacts
from storage.artifacts import Identity
from storage.codecs import codec_named
from storage.layout import CAPTURE_PLAN, STATES, shard_directory
from storage.manifest import Manifest, canonical_digest
from storage.plans import PlannedShard, read_shards, write_plan
from storage.row_ranges import RowRange
from storage.store import Store
from tasks.capture_settings import CaptureSettings
from tasks.child import JobFailedError
from tasks.disk_space import check_states_space
from tasks.drop_budget import check_quarantined
from tasks.eagle3.shard_plan import cut_into_shards
from tasks.hardware import capture_dtype
from tasks.load_verifier import Verifier
from tasks.progress import ProgressMeter
from tasks.sample_index import (
    capture_order,
    column_of,
    count_distinct,
    forget_quarantined,
    is_in,
    read_captured,
    read_ids,
    read_lengths,
    read_placed,
    read_quarantined,
)
from tasks.stage import (
    RETRIES,
    RETRY_SECONDS,
    StageResult,
    stage_task,
    worth_a_retry,
)
from tasks.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

VERSION = 1
PLAN_VERSION = 2
MODULE = "tasks.jobs.capture"


class CapturePlan:
    """What a capture has to do, as published: the missing samples, cut into shards.

    No dataclass: Prefect would go through all of it for each task it is given to.
    """

    def __init__(self, manifest: Manifest, shards: Sequence[PlannedShard]) -> None:
        self.manifest = manifest
        self.capture_key: str = manifest.facts["capture_key"]
        self.layer_ids: tuple[int, ...] = tuple(manifest.facts["layer_ids"])
        self._shards = {shard.rows: shard for shard in shards}

    @property
    def ranges(self) -> tuple[RowRange, ...]:
        """Rows of each shard, in order."""
        return tuple(self._shards)

    def within(self, rows: RowRange) -> tuple[RowRange, ...]:
        """Rows of the shards that lie in `rows`, in order."""
        return tuple(r for r in self._shards if rows.start <= r.start and r.stop <= rows.stop)

    def missing(self, store: Store, ranges: Sequence[RowRange]) -> tuple[RowRange, ...]:
        """Those of some row ranges whose shards are not in the store."""
        found = artifacts.find_all(store, map(self.identity, ranges))
        return tuple(r for r, shard in zip(ranges, found, strict=True) if shard is None)

    def tokens(self, ranges: Iterable[RowRange]) -> int:
        """Tokens of some shards together."""
        return sum(self._shards[rows].tokens for rows in ranges)

    def identity(self, rows: RowRange) -> Identity:
        """Identity of the shard of one row range: the capture key and the samples in it."""
        identity = Identity(
            stage=STATES,
            version=VERSION,
            settings={},
            inputs={"capture": self.capture_key, "samples": self._shards[rows].samples},
        )
        return replace(identity, directory=shard_directory(self.capture_key, identity.key))


def capture_key(verifier: Verifier, settings: CaptureSettings) -> str:
    """Digest of all that determines a sample's states besides its token ids."""
    layer_ids = settings.layer_ids(verifier.facts.num_hidden_layers)
    return canonical_digest(
        [
            VERSION,
            verifier.states_identity,
            list(layer_ids),
            settings.codec,
            settings.engine,
            capture_dtype(settings.dtype, settings.device),
        ]
    )[:24]


def bytes_per_token(verifier: Verifier, settings: CaptureSettings) -> int:
    """Bytes of one token's states: A captured layers and the last one."""
    layers = len(settings.layer_ids(verifier.facts.num_hidden_layers))
    return (layers + 1) * codec_named(settings.codec).state_bytes(verifier.facts.hidden_size)


def plan_capture(
    store: Store,
    samples: StageResult,
    verifier: Verifier,
    settings: CaptureSettings,
    max_dropped: float,
) -> Manifest | None:
    """Compare what is wanted with what is captured and publish the plan; None when nothing is missing.

    Raises DiskSpaceError when the store has no room for what is missing, DroppedTooManyError when too much of what is
    wanted is quarantined.
    """
    key = capture_key(verifier, settings)
    ids = read_ids(store, samples.parts)
    captured = read_captured(store, key)
    if settings.retry_quarantined:
        forget_quarantined(store, captured)
    quarantined = {} if settings.retry_quarantined else read_quarantined(captured, ids)
    lost = is_in(ids, column_of(quarantined))
    missing = ~is_in(ids, captured.sample_ids) & ~lost
    lengths = read_lengths(store, samples.parts, missing)
    order = capture_order(ids, lengths, missing)
    ranges = cut_into_shards(
        lengths[order],
        rows_per_shard=settings.rows_per_shard,
        bytes_per_token=bytes_per_token(verifier, settings),
        shard_bytes=settings.shard_megabytes * 1_000_000,
    )
    total = count_distinct(ids, np.ones(len(ids), bool))
    done = total - len(order) - len(quarantined)
    check_quarantined(quarantined, total, max_dropped=max_dropped)
    logger.info(
        "capture: %d of %d samples done, %d to do in %d shards, %d quarantined",
        done,
        total,
        len(order),
        len(ranges),
        len(quarantined),
    )
    if not ranges:
        return None
    check_states_space(
        store,
        samples=len(order),
        tokens=int(lengths[order].sum(dtype=np.int64)),
        bytes_per_token=bytes_per_token(verifier, settings),
        codec=settings.codec,
    )
    planned = ids.take(pa.array(order))
    shards = [
        PlannedShard(
            RowRange(start, stop),
            tokens=int(lengths[order[start:stop]].sum()),
            samples=canonical_digest(planned.slice(start, stop - start).to_pylist()),
        )
        for start, stop in ranges
    ]
    wanted = Identity(
        stage=CAPTURE_PLAN,
        version=PLAN_VERSION,
        settings={},
        inputs={
            "capture": key,
            "shards": canonical_digest([[s.rows.start, s.rows.stop, s.samples] for s in shards]),
        },
    )
    found = artifacts.find(store, wanted)
    if found is not None:
        return found
    positions = np.full(len(ids), -1)
    positions[order] = np.arange(len(order))
    with artifacts.write(store, wanted) as writer:
        write_plan(writer, shards, planned, read_placed(store, samples.parts, positions))
        return writer.publish(
            rows=len(order),
            facts={
                "capture_key": key,
                "layer_ids": list(settings.layer_ids(verifier.facts.num_hidden_layers)),
                "dtype": capture_dtype(settings.dtype, settings.device),
            },
        )


def open_plan(store: Store, path: str) -> CapturePlan:
    """Return the plan that was published at `path`."""
    manifest = artifacts.require(store, path)
    return CapturePlan(manifest, read_shards(store, manifest))


@task(
    name="capture_shard",
    task_run_name="capture {rows}",
    cache_policy=NO_CACHE,
    persist_result=False,
    retries=RETRIES,
    retry_delay_seconds=RETRY_SECONDS,
    retry_condition_fn=worth_a_retry,
)
def capture_shard(
    store: Store,
    plan: CapturePlan,
    rows: RowRange,
    *,
    verifier: Verifier,
    settings: CaptureSettings,
    pool: WorkerPool,
    meter: ProgressMeter,
) -> Manifest:
    """Capture one row range of the plan in a worker process and return the shard's manifest."""
    identity = plan.identity(rows)
    found = artifacts.find(store, identity)
    if found is not None:
        return found
    request = {
        "store": store.url,
        "identity": asdict(identity),
        "plan": plan.manifest.path,
        "rows": [rows.start, rows.stop],
        "layer_ids": list(plan.layer_ids),
        **verifier.place,
        "verifier": verifier.manifest.path,
        "settings": settings.model_dump(mode="json") | {"dtype": plan.manifest.facts["dtype"]},
    }
    with meter.share() as share:
        pool.request(request, lambda message: share.advance(message["tokens"]))
    found = artifacts.find(store, identity)
    if found is None:
        raise JobFailedError(f"the worker ended {rows} well but left no complete shard")
    return found


@stage_task
def capture(
    store: Store,
    samples: StageResult,
    verifier: Verifier,
    settings: CaptureSettings,
    max_dropped: float,
    *,
    reused: bool,
) -> StageResult:
    """Check that every wanted sample has its states or is quarantined, and return the shards that hold them.

    The ids of the quarantined ones are the result's note `quarantined`.

    Raises DroppedTooManyError when more are quarantined than the settings allow.
    """
    ids = read_ids(store, samples.parts)
    captured = read_captured(store, capture_key(verifier, settings))
    quarantined = read_quarantined(captured, ids)
    missing = ~is_in(ids, captured.sample_ids) & ~is_in(ids, column_of(quarantined))
    total = count_distinct(ids, np.ones(len(ids), bool))
    check_quarantined(quarantined, total, max_dropped=max_dropped)
    if missing.any():
        lacking = count_distinct(ids, missing)
        raise JobFailedError(
            f"capture: {lacking} of {total} samples have no states; run again to capture them"
        )
    used = np.unique(captured.shard_of[is_in(captured.sample_ids, ids)])
    parts = sorted((captured.shards[i] for i in used), key=lambda manifest: manifest.key)
    return StageResult(tuple(parts), reused, notes={"quarantined": sorted(quarantined)})
