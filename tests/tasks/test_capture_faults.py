"""Faults planted in a capture, with norm weights from U(0.5, 2): the canary has to stop each of them."""

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tasks.eagle3.canary import CanaryError
from tasks.eagle3.head import VerifierHead, read_head
from tasks.eagle3.head_transform import HeadTransform
from tasks.eagle3.hidden_states import find_decoder
from tasks.eagle3.verifier import read_facts
from tasks.engines.transformers import CapturedStates, CaptureEngine
from tasks.jobs.capture import PREFIX_TOKENS, check_shard, run_probes
from tests.tiny_models import load_model, make_llama

LAYER_IDS = (2, 4, 5)
TOKENS = [[(7 * i + 13 * j) % 300 + 3 for j in range(20 + i)] for i in range(5)]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> tuple[PreTrainedModel, VerifierHead]:
    directory = make_llama(tmp_path_factory.mktemp("verifier"))
    return load_model(directory), read_head(directory, read_facts(directory))


def capture(model: PreTrainedModel, layer_ids: tuple[int, ...]) -> CapturedStates:
    return CaptureEngine(model, layer_ids).capture(TOKENS, tokens_per_batch=64)


def check(
    model: PreTrainedModel,
    head: VerifierHead,
    tokens: list[list[int]],
    states: CapturedStates,
    *,
    whole: bool = True,
) -> dict[str, Any]:
    score = check_shard(run_probes(model, tokens, whole=whole), head, states, LAYER_IDS)
    assert score is not None
    return score


def test_a_right_capture_passes_with_its_score(
    verifier: tuple[PreTrainedModel, VerifierHead],
) -> None:
    model, head = verifier
    score = check(model, head, TOKENS, capture(model, LAYER_IDS))
    assert score["argmax_agreement"] >= 0.98
    assert score["positions"] == len(TOKENS[0]) + len(TOKENS[2]) + len(TOKENS[4])
    assert score["logit_error"] < 0.02
    assert len(score["aux_error"]) == 3
    assert max(score["aux_error"]) < 0.01  # bf16 storage: 8 bits of mantissa


LONG = [[(7 * i + 13 * j) % 300 + 3 for j in range(PREFIX_TOKENS + 40)] for i in range(5)]


@pytest.mark.parametrize("whole", [False, True])
def test_of_long_samples_the_beginning_is_compared_and_one_of_them_whole(
    verifier: tuple[PreTrainedModel, VerifierHead], whole: bool
) -> None:
    model, head = verifier
    states = CaptureEngine(model, LAYER_IDS).capture(LONG, tokens_per_batch=512)
    ran: list[tuple[int, ...]] = []
    handle = find_decoder(model).norm.register_forward_hook(
        lambda _, args, __: ran.append(tuple(args[0].shape[:2]))
    )
    check(model, head, LONG, states, whole=whole)
    handle.remove()
    assert ran == ([(2, PREFIX_TOKENS), (1, len(LONG[2]))] if whole else [(3, PREFIX_TOKENS)])


def test_a_fault_behind_the_beginning_stops_the_capture_where_a_sample_is_compared_whole(
    verifier: tuple[PreTrainedModel, VerifierHead],
) -> None:
    model, head = verifier
    states = CaptureEngine(model, LAYER_IDS).capture(LONG, tokens_per_batch=512)
    start = len(LONG[0]) * 2 + PREFIX_TOKENS
    rows = slice(start, start + 40)
    aux = states.aux.clone()
    aux[rows] = aux[rows].flip(0)
    states = states._replace(aux=aux)
    check(model, head, LONG, states, whole=False)
    with pytest.raises(CanaryError, match="layer"):
        check(model, head, LONG, states, whole=True)


def test_a_shard_without_usable_samples_has_no_score(
    verifier: tuple[PreTrainedModel, VerifierHead],
) -> None:
    model, head = verifier
    left = capture(model, LAYER_IDS).of([], list(map(len, TOKENS)))
    assert len(left.aux) == len(left.last) == 0
    assert check_shard(run_probes(model, []), head, left, LAYER_IDS) is None


@pytest.mark.parametrize("captured", [(3, 4, 5), (2, 3, 5), (2, 4, 6), (3, 5, 6), (1, 3, 4)])
def test_layer_ids_off_by_one_stop_the_capture(
    verifier: tuple[PreTrainedModel, VerifierHead], captured: tuple[int, ...]
) -> None:
    model, head = verifier
    states = capture(model, captured)
    with pytest.raises(CanaryError, match="layer"):
        check(model, head, TOKENS, states)


def test_the_final_norm_applied_twice_stops_the_capture(
    verifier: tuple[PreTrainedModel, VerifierHead],
) -> None:
    model, head = verifier
    norm = find_decoder(model).norm
    with torch.inference_mode():
        right = capture(model, LAYER_IDS)
        states = right._replace(last=norm(right.last.float()).to(right.last.dtype))
    with pytest.raises(CanaryError, match="norm"):
        check(model, head, TOKENS, states)


def test_the_head_of_another_verifier_stops_the_capture(
    verifier: tuple[PreTrainedModel, VerifierHead], tmp_path: Path
) -> None:
    model, head = verifier
    other = VerifierHead(head.embed, head.norm, head.head.roll(1, dims=0), head.eps)
    with pytest.raises(CanaryError):
        check(model, other, TOKENS, capture(model, LAYER_IDS))


@pytest.mark.parametrize(
    ("transform", "eps"),
    [
        (HeadTransform(logit_scale=0.125), None),
        (HeadTransform(logit_scale=1.5), None),
        (HeadTransform(logit_softcap=2.0), None),
        (HeadTransform(logit_scale=float("nan")), None),
        (HeadTransform(), 50.0),
    ],
    ids=["scaled down", "scaled up", "capped", "no number", "epsilon"],
)
def test_a_transform_that_the_verifier_does_not_make_stops_the_capture_though_no_token_changes(
    verifier: tuple[PreTrainedModel, VerifierHead], transform: HeadTransform, eps: float | None
) -> None:
    model, head = verifier
    wrong = dataclasses.replace(head, transform=transform, eps=eps or head.eps)
    with pytest.raises(
        CanaryError, match=r"a scale or cap of the logits|chooses the verifier's token"
    ):
        check(model, wrong, TOKENS, capture(model, LAYER_IDS))
