"""Stage capture: samples -> the verifier's hidden states, in shards, only for samples that have none yet.

What determines a sample's states is the verifier, the layers and the token ids. All shards of one such
combination lie under one *capture key*, whatever run made them; `plan_capture` subtracts their samples from
the wanted ones.
"""

import logging
from dataclasses import asdict, dataclass, replace
from typing import ClassVar, Literal, Self

from prefect import task
from prefect.cache_policies import NO_CACHE
from pydantic import Field, PositiveInt, field_validator, model_validator

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import (
    CAPTURE_PLAN,
    PLAN_TABLE,
    ROWS_TABLE,
    SAMPLES_TABLE,
    STATES,
    capture_directory,
    shard_directory,
)
from storage.manifest import Manifest, canonical_digest
from storage.row_ranges import RowRange
from storage.store import Store
from storage.tables import PLAN_SCHEMA, read_table, write_table
from tasks.child import JobFailedError
from tasks.eagle3.shard_plan import ShardPlan, plan_shards
from tasks.eagle3.verifier import check_layer_ids, check_layer_order, default_layer_ids
from tasks.hardware import capture_dtype
from tasks.load_verifier import Verifier
from tasks.progress import ProgressMeter
from tasks.stage import (
    RETRIES,
    RETRY_SECONDS,
    StageResult,
    stage_task,
    worth_a_retry,
)
from tasks.stage_settings import StageSettings
from tasks.worker_pool import WorkerPool

logger = logging.getLogger(__name__)

VERSION = 1
MODULE = "tasks.jobs.capture"
BYTES_PER_VALUE = {"bf16": 2}


class CaptureSettings(StageSettings):
    """How the verifier's hidden states are captured."""

    resources: ClassVar[frozenset[str]] = frozenset(
        {
            "rows_per_shard",
            "shard_megabytes",
            "gpus",
            "gpus_per_process",
            "device",
            "tokens_per_batch",
        }
    )

    engine: Literal["transformers"] = "transformers"
    """What runs the verifier."""
    layers: tuple[int, ...] | None = None
    """Layer ids to capture: id i is the input of decoder layer i. Default: 2, half, and the last but two."""
    codec: Literal["bf16"] = "bf16"
    """How states are stored."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the verifier computes in; auto: as its weights are stored, on a CPU bfloat16 if it is native."""
    rows_per_shard: PositiveInt = 2000
    """Most samples of a shard."""
    shard_megabytes: PositiveInt = 1000
    """Size at which a shard is closed, in MB."""
    gpus: PositiveInt = 1
    """GPUs to use; on a machine without, the number of CPU processes."""
    gpus_per_process: PositiveInt = 1
    """GPUs that one process spreads the verifier over."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda)$")
    """auto, cpu or cuda."""
    tokens_per_batch: PositiveInt = 4096
    """Tokens that go through the verifier at once."""

    @field_validator("layers")
    @classmethod
    def _ordered(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is not None:
            check_layer_order(layers)
        return layers

    @model_validator(mode="after")
    def _whole_processes(self) -> Self:
        if self.gpus % self.gpus_per_process:
            raise ValueError(
                f"capture.gpus {self.gpus} is no multiple of capture.gpus_per_process {self.gpus_per_process}"
            )
        return self

    @property
    def processes(self) -> int:
        """Processes that capture at the same time."""
        return self.gpus // self.gpus_per_process

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """Return the layer ids for a verifier of `num_layers` layers; ValueError when it has too few."""
        if self.layers is None:
            return tuple(default_layer_ids(num_layers))
        check_layer_ids(self.layers, num_layers)
        return self.layers


@dataclass(frozen=True)
class CapturePlan:
    """What a capture has to do, as published: a table of the missing samples, cut into row ranges."""

    manifest: Manifest
    capture_key: str
    layer_ids: tuple[int, ...]
    ranges: tuple[RowRange, ...]
    sample_ids: tuple[str, ...]
    tokens: tuple[int, ...]


def capture_key(verifier: Verifier, settings: CaptureSettings) -> str:
    """Digest of all that determines a sample's states besides its token ids."""
    layer_ids = settings.layer_ids(verifier.facts.num_hidden_layers)
    return canonical_digest(
        [
            VERSION,
            verifier.identity,
            list(layer_ids),
            settings.codec,
            settings.engine,
            capture_dtype(settings.dtype, settings.device),
        ]
    )[:24]


def bytes_per_token(verifier: Verifier, settings: CaptureSettings) -> int:
    """Bytes of one token's states: (A + 1) * H values."""
    layers = len(settings.layer_ids(verifier.facts.num_hidden_layers))
    return (layers + 1) * verifier.facts.hidden_size * BYTES_PER_VALUE[settings.codec]


def wanted_samples(store: Store, samples: StageResult) -> dict[str, int]:
    """Return sample id -> tokens of all parts; equal samples count once."""
    wanted: dict[str, int] = {}
    for part in samples.parts:
        with artifacts.open_file(store, part, SAMPLES_TABLE) as path:
            table = read_table(path, columns=["sample_id", "input_ids"])
        lengths = table.column("input_ids").combine_chunks().value_lengths().to_pylist()
        wanted.update(zip(table.column("sample_id").to_pylist(), lengths, strict=True))
    return wanted


def captured_samples(store: Store, key: str) -> list[tuple[Manifest, list[str]]]:
    """Return every complete shard of a capture key with the ids of its samples."""
    shards = []
    for manifest in artifacts.list_manifests(store, capture_directory(key)):
        with artifacts.open_file(store, manifest, ROWS_TABLE) as path:
            ids = read_table(path, columns=["sample_id"]).column("sample_id").to_pylist()
        shards.append((manifest, ids))
    return shards


def plan_capture(
    store: Store, samples: StageResult, verifier: Verifier, settings: CaptureSettings
) -> Manifest | None:
    """Compare what is wanted with what is captured and publish the plan; None when nothing is missing."""
    key = capture_key(verifier, settings)
    wanted = wanted_samples(store, samples)
    captured = [sample for _, ids in captured_samples(store, key) for sample in ids]
    missing = plan_shards(
        wanted,
        captured,
        rows_per_shard=settings.rows_per_shard,
        bytes_per_token=bytes_per_token(verifier, settings),
        shard_bytes=settings.shard_megabytes * 1_000_000,
    )
    rows = len(missing.sample_ids)
    logger.info(
        "capture: %d of %d samples done, %d to do in %d shards",
        len(wanted) - rows,
        len(wanted),
        rows,
        len(missing.shards),
    )
    if not rows:
        return None
    return _publish_plan(store, key, missing, samples=samples, verifier=verifier, settings=settings)


def _publish_plan(
    store: Store,
    key: str,
    missing: ShardPlan,
    *,
    samples: StageResult,
    verifier: Verifier,
    settings: CaptureSettings,
) -> Manifest:
    ranges = [list(shard) for shard in missing.shards]
    layer_ids = list(settings.layer_ids(verifier.facts.num_hidden_layers))
    wanted = Identity(
        stage=CAPTURE_PLAN,
        version=VERSION,
        settings={"ranges": ranges},
        inputs={"capture": key, "samples": canonical_digest(list(missing.sample_ids))},
    )
    found = artifacts.find(store, wanted)
    if found is not None:
        return found
    tokens: dict[str, list[int]] = {}
    for part in samples.parts:
        with artifacts.open_file(store, part, SAMPLES_TABLE) as path:
            table = read_table(path, columns=["sample_id", "input_ids"])
        ids = table.column("sample_id").to_pylist()
        tokens.update(zip(ids, table.column("input_ids").to_pylist(), strict=True))
    rows = [{"sample_id": s, "input_ids": tokens[s]} for s in missing.sample_ids]
    with artifacts.write(store, wanted) as writer:
        with writer.file(PLAN_TABLE) as path:
            write_table(path, rows, schema=PLAN_SCHEMA)
        return writer.publish(
            rows=len(rows),
            facts={
                "capture_key": key,
                "layer_ids": layer_ids,
                "dtype": capture_dtype(settings.dtype, settings.device),
                "ranges": ranges,
            },
        )


def open_plan(store: Store, path: str) -> CapturePlan:
    """Return the plan that was published at `path`."""
    manifest = artifacts.require(store, path)
    with artifacts.open_file(store, manifest, PLAN_TABLE) as local:
        table = read_table(local)
    return CapturePlan(
        manifest=manifest,
        capture_key=manifest.facts["capture_key"],
        layer_ids=tuple(manifest.facts["layer_ids"]),
        ranges=tuple(RowRange(start, stop) for start, stop in manifest.facts["ranges"]),
        sample_ids=tuple(table.column("sample_id").to_pylist()),
        tokens=tuple(table.column("input_ids").combine_chunks().value_lengths().to_pylist()),
    )


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
    identity = shard_identity(plan, rows)
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
    with pool.worker() as worker, meter.share() as share:
        worker.request(request, lambda message: share.advance(message["tokens"]))
    found = artifacts.find(store, identity)
    if found is None:
        raise JobFailedError(f"the worker ended {rows} well but left no complete shard")
    return found


def shard_identity(plan: CapturePlan, rows: RowRange) -> Identity:
    """Identity of the shard of one row range: the capture key and the samples in it."""
    ids = list(plan.sample_ids[rows.start : rows.stop])
    identity = Identity(
        stage=STATES,
        version=VERSION,
        settings={},
        inputs={"capture": plan.capture_key, "samples": canonical_digest(ids)},
    )
    return replace(identity, directory=shard_directory(plan.capture_key, identity.key))


@stage_task
def capture(
    store: Store,
    samples: StageResult,
    verifier: Verifier,
    settings: CaptureSettings,
    *,
    reused: bool,
) -> StageResult:
    """Check that every wanted sample has its states and return the shards that hold them."""
    wanted = wanted_samples(store, samples)
    parts, have = [], set()
    for manifest, ids in captured_samples(store, capture_key(verifier, settings)):
        if any(sample in wanted for sample in ids):
            parts.append(manifest)
            have.update(ids)
    lacking = sum(sample not in have for sample in wanted)
    if lacking:
        raise JobFailedError(
            f"capture: {lacking} of {len(wanted)} samples have no states; run again to capture them"
        )
    parts.sort(key=lambda manifest: manifest.key)
    return StageResult(tuple(parts), reused=reused)
