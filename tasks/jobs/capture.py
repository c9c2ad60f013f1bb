"""Job of capture: one row range of the plan -> one shard of hidden states, checked before it is published.

The verifier's passes are queued first, those of the canary behind them. While a GPU computes them, the states of the
shard before are awaited, checked and written: it never waits for a check or a file.
"""

import dataclasses
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from itertools import groupby
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
from tasks.eagle3.canary import (
    CanaryError,
    CanaryScore,
    OwnStates,
    check_states,
    run_verifier,
)
from tasks.eagle3.head import VerifierHead
from tasks.eagle3.hidden_states import find_decoder, rope_switch
from tasks.engines.copies import beside
from tasks.engines.transformers import CapturedStates, CaptureEngine
from tasks.jobs.models import check_unchanged, load_model
from tasks.jobs.verifiers import open_head

logger = logging.getLogger(__name__)

_VERIFIER = threading.Lock()
"""Held by who runs the verifier: its hooks and its compiled layers are for one at a time."""

PREFIX_TOKENS = 256
"""Of a sample that the canary compares."""
WHOLE_EVERY = 8
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

    whole = start == 0 or int(wanted.key, 16) % WHOLE_EVERY == 0
    with _VERIFIER:
        finish = _engine(where, layer_ids, settings["compile"]).start(
            tokens, tokens_per_batch=settings["tokens_per_batch"], progress=report
        )
        probes = run_probes(_model(where), tokens, whole=whole)

    def publish() -> dict[str, Any]:
        states = finish()
        kept, quarantined = sort_out(rows, states)
        usable, used, found = rows, tokens, probes
        if quarantined:
            logger.warning(
                "%s: %d of %d samples are quarantined", wanted.path, len(quarantined), len(rows)
            )
            usable, used = [rows[i] for i in kept], [tokens[i] for i in kept]
            states = states.of(kept, list(map(len, tokens)))
            with _VERIFIER:
                found = run_probes(_model(where), used, whole=whole)
        try:
            head = _head(request["store"], request["verifier"], found.device)
            canary = check_shard(found, head, states, layer_ids, codec=settings["codec"])
        except CanaryError as error:
            raise CanaryError(f"{wanted.path}, rows [{start}, {stop}): {error}") from error
        for own in (probes.own, found.own):
            own.clear()  # whole texts' are large, and writing takes a while
        check_unchanged(request)
        with artifacts.write(store, wanted) as writer:
            write_shard(
                writer,
                aux=states.aux,
                last=states.last,
                rows=ShardRows.from_lists([row["sample_id"] for row in usable], used),
                layer_ids=list(layer_ids),
                codec=settings["codec"],
            )
            writer.publish(
                rows=len(usable),
                facts={
                    "tokens": sum(map(len, used)),
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


class Probes(NamedTuple):
    """What the verifier itself makes of some samples of a shard, at their beginning or whole."""

    own: dict[int, OwnStates]
    """By the sample's index."""
    lengths: list[int]
    """Of all samples."""
    device: torch.device
    """Where the comparisons are quick."""


def run_probes(model: PreTrainedModel, tokens: list[list[int]], *, whole: bool = True) -> Probes:
    """Queue the verifier once more for samples from a shard's start, middle and end.

    They are cut to PREFIX_TOKENS, with `whole` all but the middle one. Those of one length go through together.
    """
    lengths = [len(sample) for sample in tokens]
    switch = rope_switch(find_decoder(model).base.config)
    chosen = sorted(_probed(lengths, whole=whole, switch=switch).items(), key=lambda it: it[1])
    own: dict[int, OwnStates] = {}
    device = next(model.parameters()).device
    with beside(device, "canary"):
        for count, group in groupby(chosen, key=lambda item: item[1]):
            indices = [index for index, _ in group]
            states = run_verifier(model, [tokens[i][:count] for i in indices])
            own.update(zip(indices, states, strict=True))
    return Probes(own, lengths, device)


def check_shard(
    probes: Probes,
    head: VerifierHead,
    states: CapturedStates,
    layer_ids: tuple[int, ...],
    *,
    codec: str = "bf16",
) -> dict[str, Any] | None:
    """Hold the canary against the probed samples of a shard; returns its scores taken together, None of no sample.

    The states as captured are judged. What a codec makes of them is measured besides: the share of positions at
    which the head still chooses the same token is `stored_agreement`.

    Raises CanaryError when the states are not those of these layers, or not before the final norm.
    """
    samples = states.split(probes.lengths)
    scores = []
    with beside(probes.device, "canary"):
        for index, own in sorted(probes.own.items()):
            aux, last = (part[: len(own.states[0])] for part in samples[index])
            score = check_states(
                own,
                head,
                aux.to(probes.device),
                last.to(probes.device),
                layer_ids,
                stored_last=as_stored(codec, last).to(probes.device),
            )
            scores.append(score)
    if not scores:
        return None
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


def _probed(lengths: Sequence[int], *, whole: bool, switch: int | None) -> dict[int, int]:
    """Index of each sample that is compared -> how many of its first tokens.

    A text longer than `switch` cannot be cut: its states are not those of its beginning alone.
    """
    if not lengths:
        return {}
    middle = len(lengths) // 2
    entire = {
        i for i, n in enumerate(lengths) if (whole and i == middle) or (switch and n > switch)
    }
    chosen = sorted({0, middle, len(lengths) - 1})
    return {i: lengths[i] if i in entire else min(lengths[i], PREFIX_TOKENS) for i in chosen}


@functools.cache
def _head(store_url: str, path: str, device: torch.device) -> VerifierHead:
    """The verifier's head, on the GPU if it has the room."""
    store = Store(store_url)
    head = open_head(store, artifacts.require(store, path))
    try:
        return dataclasses.replace(head, head=head.head.to(device))
    except torch.OutOfMemoryError:
        return dataclasses.replace(
            head, head=head.head.pin_memory()
        )  # it goes there piece by piece


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
