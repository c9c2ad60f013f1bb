"""Job of capture: one row range of the plan -> one shard of hidden states, checked before it is published."""

import dataclasses
import functools
import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from transformers import PreTrainedModel

from storage import artifacts
from storage.artifacts import Identity
from storage.codecs import as_stored
from storage.plans import read_samples
from storage.row_ranges import RowRange
from storage.shards import ShardRows, is_finite, write_shard
from storage.store import Store
from tasks.child import ProgressCallback
from tasks.eagle3.head import VerifierHead
from tasks.eagle3.hidden_states import (
    CanaryError,
    CanaryScore,
    check_states,
    find_decoder,
    rope_switch,
)
from tasks.engines.transformers import CapturedStates, CaptureEngine
from tasks.jobs.models import check_unchanged, load_model
from tasks.jobs.verifiers import open_head

logger = logging.getLogger(__name__)

PREFIX_TOKENS = 256
"""Of a sample that the canary compares."""
WHOLE_EVERY = 4
"""The canary compares a whole sample in the first shard and in one of so many others."""


class _Where(NamedTuple):
    """Which model this process keeps, and how it computes."""

    directory: str
    device: str
    dtype: str
    gpus: int
    trust_remote_code: bool


def run(request: dict[str, Any], progress: ProgressCallback) -> Callable[[], dict[str, Any]]:
    """Capture `request["rows"]` and return what publishes their shard.

    Samples without usable states are left out of it, and named with the reason in its manifest. CanaryError when
    the others' are not the verifier's.
    """
    store, wanted = Store(request["store"]), Identity(**request["identity"])
    settings, layer_ids = request["settings"], tuple(request["layer_ids"])
    where = _Where(
        request["directory"],
        device=settings["device"],
        dtype=settings["dtype"],
        gpus=settings["gpus_per_process"],
        trust_remote_code=request["trust_remote_code"],
    )
    start, stop = request["rows"]
    plan = artifacts.require(store, request["plan"])
    rows = read_samples(store, plan, RowRange(start, stop)).to_pylist()
    tokens = [row["input_ids"] for row in rows]
    reported = 0

    def report(done: int) -> None:
        nonlocal reported
        progress({"tokens": done - reported})
        reported = done

    states = _engine(where, layer_ids, settings["compile"]).capture(
        tokens, tokens_per_batch=settings["tokens_per_batch"], progress=report
    )
    kept, quarantined = sort_out(rows, states)
    if quarantined:
        logger.warning(
            "%s: %d of %d samples are quarantined", wanted.path, len(quarantined), len(rows)
        )
        samples = states.split(list(map(len, tokens)))
        rows = [rows[i] for i in kept]
        tokens = [row["input_ids"] for row in rows]
        usable = [CapturedStates(states.aux[:0], states.last[:0]), *(samples[i] for i in kept)]
        states = CapturedStates(*(torch.cat(parts) for parts in zip(*usable, strict=True)))
    canary = None
    if rows:
        head = _head(request["store"], request["verifier"])
        try:
            canary = check_shard(
                _model(where),
                head,
                tokens,
                states,
                layer_ids,
                codec=settings["codec"],
                whole=start == 0 or int(wanted.key, 16) % WHOLE_EVERY == 0,
            )
        except CanaryError as error:
            raise CanaryError(f"{wanted.path}, rows [{start}, {stop}): {error}") from error

    def publish() -> dict[str, Any]:
        check_unchanged(request)
        with artifacts.write(store, wanted) as writer:
            write_shard(
                writer,
                aux=states.aux,
                last=states.last,
                rows=ShardRows.from_lists([row["sample_id"] for row in rows], tokens),
                layer_ids=list(layer_ids),
                codec=settings["codec"],
            )
            writer.publish(
                rows=len(rows),
                facts={
                    "tokens": sum(map(len, tokens)),
                    "rows": [start, stop],
                    "canary": canary,
                    "quarantined": quarantined,
                },
            )
        return {}

    return publish


def sort_out(
    rows: list[dict[str, Any]], states: CapturedStates
) -> tuple[list[int], list[dict[str, str]]]:
    """Return the indices of the samples whose states are usable, and the others' ids with the reason."""
    if all(map(is_finite, states)):  # one pass for all of them
        return list(range(len(rows))), []
    kept, quarantined = [], []
    samples = states.split([len(row["input_ids"]) for row in rows])
    for index, (row, sample) in enumerate(zip(rows, samples, strict=True)):
        fault = find_fault(sample)
        if fault is None:
            kept.append(index)
        else:
            quarantined.append({"sample_id": row["sample_id"], "reason": fault})
    return kept, quarantined


def find_fault(sample: CapturedStates) -> str | None:
    """What is wrong with one sample's states; None when nothing is."""
    wrong = [name for name, part in sample._asdict().items() if not is_finite(part)]
    return f"NaN or infinite values in {wrong[0]}" if wrong else None


def check_shard(
    model: PreTrainedModel,
    head: VerifierHead,
    tokens: list[list[int]],
    states: CapturedStates,
    layer_ids: tuple[int, ...],
    *,
    codec: str = "bf16",
    whole: bool = True,
) -> dict[str, Any]:
    """Hold the canary against samples from a shard's start, middle and end; returns its scores taken together.

    The verifier runs once more for them, so they are cut to PREFIX_TOKENS, with `whole` all but the middle one.
    The states as captured are judged. What a codec makes of them is measured besides: the share of positions at
    which the head still chooses the verifier's token is `stored_agreement`.

    Raises CanaryError when the states are not those of these layers, or not before the final norm.
    """
    lengths = [len(sample) for sample in tokens]
    samples = states.split(lengths)
    device = next(model.parameters()).device  # where the comparisons are quick
    switch = rope_switch(find_decoder(model).base.config)
    scores = [
        check_states(
            model,
            head,
            tokens[i][:count],
            samples[i].aux[:count].to(device),
            samples[i].last[:count].to(device),
            layer_ids,
            stored_last=as_stored(codec, samples[i].last[:count]).to(device),
        )
        for i, count in _probes(lengths, whole=whole, switch=switch).items()
    ]
    positions = sum(score.positions for score in scores)

    def share(agreement: Callable[[CanaryScore], float]) -> float:
        return round(sum(agreement(s) * s.positions for s in scores) / positions, 4)

    return {
        "argmax_agreement": share(lambda score: score.argmax_agreement),
        "stored_agreement": share(lambda score: score.stored_agreement),
        "positions": positions,
        "logit_error": round(max(score.logit_error for score in scores), 5),
        "aux_error": [round(max(e), 5) for e in zip(*(s.aux_error for s in scores), strict=True)],
    }


def _probes(lengths: Sequence[int], *, whole: bool, switch: int | None) -> dict[int, int]:
    """Index of each sample that is compared -> how many of its first tokens.

    A text longer than `switch` cannot be cut: its states are not those of its beginning alone.
    """
    middle = len(lengths) // 2
    entire = {
        i for i, n in enumerate(lengths) if (whole and i == middle) or (switch and n > switch)
    }
    chosen = sorted({0, middle, len(lengths) - 1})
    return {i: lengths[i] if i in entire else min(lengths[i], PREFIX_TOKENS) for i in chosen}


@functools.cache
def _head(store_url: str, path: str) -> VerifierHead:
    store = Store(store_url)
    head = open_head(store, artifacts.require(store, path))
    if not torch.cuda.is_available():
        return head
    return dataclasses.replace(
        head, head=head.head.pin_memory()
    )  # it goes to the GPU for every shard


def _model(where: _Where) -> PreTrainedModel:
    return load_model(
        where.directory,
        device=where.device,
        dtype=where.dtype,
        gpus=where.gpus,
        trust_remote_code=where.trust_remote_code,
    )


@functools.cache
def _engine(where: _Where, layer_ids: tuple[int, ...], compiled: bool) -> CaptureEngine:
    return CaptureEngine(_model(where), layer_ids, store_dtype=torch.bfloat16, compiled=compiled)
