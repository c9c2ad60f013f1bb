"""Job of capture: one row range of the plan -> one shard of hidden states, checked before it is published."""

import functools
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import PLAN_TABLE
from storage.shards import ShardRows, write_shard
from storage.store import Store
from storage.tables import read_table
from tasks.child import ProgressCallback
from tasks.eagle3.head import VerifierHead
from tasks.eagle3.hidden_states import check_states
from tasks.engines.transformers import CapturedStates, CaptureEngine
from tasks.jobs.models import check_unchanged, load_model
from tasks.jobs.verifiers import open_head


class _Where(NamedTuple):
    """Which model this process keeps, and how it computes."""

    directory: str
    device: str
    dtype: str
    trust_remote_code: bool


def run(request: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
    """Publish the shard of `request["rows"]`; CanaryError when its states are not the verifier's."""
    store, wanted = Store(request["store"]), Identity(**request["identity"])
    settings, layer_ids = request["settings"], tuple(request["layer_ids"])
    where = _Where(
        request["directory"],
        device=settings["device"],
        dtype=settings["dtype"],
        trust_remote_code=request["trust_remote_code"],
    )
    start, stop = request["rows"]
    plan = artifacts.require(store, request["plan"])
    with artifacts.open_file(store, plan, PLAN_TABLE) as path:
        rows = read_table(path).slice(start, stop - start).to_pylist()
    tokens = [row["input_ids"] for row in rows]
    reported = 0

    def report(done: int) -> None:
        nonlocal reported
        progress({"tokens": done - reported})
        reported = done

    states = _engine(where, layer_ids).capture(
        tokens, tokens_per_batch=settings["tokens_per_batch"], progress=report
    )
    head = _head(request["store"], request["verifier"])
    canary = check_shard(_model(where), head, tokens, states, layer_ids)
    check_unchanged(request)
    with artifacts.write(store, wanted) as writer:
        write_shard(
            writer,
            aux=torch.cat([sample.aux for sample in states]),
            last=torch.cat([sample.last for sample in states]),
            rows=ShardRows.from_lists([row["sample_id"] for row in rows], tokens),
            layer_ids=list(layer_ids),
            codec=settings["codec"],
        )
        writer.publish(
            rows=len(rows),
            facts={"tokens": sum(map(len, tokens)), "rows": [start, stop], "canary": canary},
        )
    return {}


def check_shard(
    model: PreTrainedModel,
    head: VerifierHead,
    tokens: list[list[int]],
    states: list[CapturedStates],
    layer_ids: tuple[int, ...],
) -> dict[str, Any]:
    """Hold the canary against samples from a shard's start, middle and end; returns its scores taken together.

    Raises CanaryError when the states are not those of these layers, or not before the final norm.
    """
    probes = sorted({0, len(tokens) // 2, len(tokens) - 1})
    scores = [
        check_states(model, head, tokens[i], states[i].aux, states[i].last, layer_ids)
        for i in probes
    ]
    positions = sum(score.positions for score in scores)
    agreeing = sum(score.argmax_agreement * score.positions for score in scores)
    return {
        "argmax_agreement": round(agreeing / positions, 4),
        "positions": positions,
        "logit_error": round(max(score.logit_error for score in scores), 5),
        "aux_error": [round(max(e), 5) for e in zip(*(s.aux_error for s in scores), strict=True)],
    }


@functools.cache
def _head(store_url: str, path: str) -> VerifierHead:
    store = Store(store_url)
    return open_head(store, artifacts.require(store, path))


def _model(where: _Where) -> PreTrainedModel:
    return load_model(
        where.directory,
        device=where.device,
        dtype=where.dtype,
        trust_remote_code=where.trust_remote_code,
    )


@functools.cache
def _engine(where: _Where, layer_ids: tuple[int, ...]) -> CaptureEngine:
    return CaptureEngine(_model(where), layer_ids, store_dtype=torch.bfloat16)
