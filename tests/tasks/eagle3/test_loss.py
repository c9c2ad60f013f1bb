"""The chunked loss against the plain formula on whole matrices."""

from typing import get_args

import pytest
import torch
from speculators.losses.utils import _EAGER_LOSS_FN_MAP
from torch import Tensor

from tasks.eagle3 import loss as loss_module
from tasks.eagle3.draft import LOSS_NAMES, eager_loss
from tasks.eagle3.head_transform import HeadTransform
from tasks.eagle3.loss import LossInputs, ttt_loss
from tasks.eagle3.training_settings import TrainSettings

TARGETS, STEPS, DRAFT, HIDDEN = 7, 2, 24, 5


def test_every_loss_of_speculators_can_be_chosen() -> None:
    chosen = get_args(TrainSettings.model_fields["loss"].annotation)
    assert set(chosen) == set(LOSS_NAMES) == set(_EAGER_LOSS_FN_MAP)


def inputs(loss: str, scored: Tensor | None = None) -> tuple[Tensor, LossInputs]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TARGETS * STEPS, HIDDEN, generator=generator, dtype=torch.float64)
    rows = torch.arange(TARGETS * STEPS).view(TARGETS, STEPS) if scored is None else scored
    return hidden, LossInputs(
        head=torch.randn(DRAFT, HIDDEN, generator=generator, dtype=torch.float64),
        target_head=torch.randn(DRAFT, HIDDEN, generator=generator, dtype=torch.float64),
        target_states=torch.randn(TARGETS, HIDDEN, generator=generator, dtype=torch.float64),
        scored=rows,
        factors=(rows < len(hidden)) * torch.tensor([0.5, 0.125], dtype=torch.float64),
        transform=HeadTransform(),
        loss_function=None if loss == "kl_div" else eager_loss(loss),
    )


def naive(hidden: Tensor, given: LossInputs, loss: str) -> Tensor:
    """Sum over targets and steps, one pair at a time."""
    total = torch.zeros((), dtype=torch.float64)
    for target, rows in enumerate(given.scored.tolist()):
        wanted = given.target_head @ given.target_states[target]
        for step, row in enumerate(rows):
            if row == len(hidden):
                continue
            logits = given.head @ hidden[row]
            if loss == "kl_div":
                p = wanted.softmax(0)
                one = (p * (p.log() - logits.log_softmax(0))).sum()
            else:
                one = eager_loss(loss)(logits[None, None], wanted[None, None])[0, 0]
            total = total + float(given.factors[target, step]) * one
    return total


@pytest.mark.parametrize("loss", LOSS_NAMES)
@pytest.mark.parametrize("chunk_bytes", [1, 3 * STEPS * DRAFT * 4, 1 << 20])
def test_loss_and_gradient_equal_the_plain_formula_for_any_chunk_size(
    loss: str, chunk_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loss_module, "CHUNK_BYTES_CPU", chunk_bytes)
    hidden, given = inputs(loss)
    ours, theirs = (hidden.clone().requires_grad_() for _ in range(2))
    total, steps, _ = ttt_loss(ours, inputs=given)
    (total * 3).backward()
    expected = naive(theirs, given, loss)
    (expected * 3).backward()
    # speculators' other losses work in fp32 inside.
    tolerance = 1e-12 if loss == "kl_div" else 1e-5
    torch.testing.assert_close(total, expected, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=tolerance, atol=tolerance)
    torch.testing.assert_close(steps.sum(), expected.detach(), rtol=tolerance, atol=tolerance)


def test_rows_without_a_score_get_no_gradient_and_add_no_loss() -> None:
    none = TARGETS * STEPS
    scored = torch.tensor([[0, none], [none, 3], [4, 5], [6, 7], [8, none], [10, 11], [12, 13]])
    hidden, given = inputs("kl_div", scored)
    hidden.requires_grad_()
    total, _, _ = ttt_loss(hidden, inputs=given)
    total.backward()
    torch.testing.assert_close(total, naive(hidden, given, "kl_div"))
    assert hidden.grad is not None
    idle = hidden.grad.abs().sum(1) == 0
    assert idle.nonzero()[:, 0].tolist() == [1, 2, 9]


def test_a_loss_that_counts_nowhere_may_be_infinite() -> None:
    hidden, given = inputs("kl_div")
    given.factors[2, 1] = 0
    hidden[given.scored[2, 1]] = float("inf")
    hidden.requires_grad_()
    total, _, _ = ttt_loss(hidden, inputs=given)
    assert torch.isfinite(total)


def test_matches_are_equal_most_likely_tokens_and_ties_go_to_the_first() -> None:
    hidden, given = inputs("kl_div")
    _, _, matches = ttt_loss(hidden, inputs=given)
    drafted = (hidden @ given.head.T).argmax(1).view(TARGETS, STEPS)
    wanted = (given.target_states @ given.target_head.T).argmax(1)
    assert torch.equal(matches, drafted == wanted[:, None])
    tied = torch.zeros(2, 24)
    tied[0, [5, 17]] = 1.0
    tied[1, [8, 9, 23]] = 2.0
    assert loss_module._argmax(tied)[:, 0].tolist() == [5, 8]


def test_a_perfect_draft_has_no_loss_and_no_gradient() -> None:
    _, given = inputs("kl_div")
    perfect = given.target_states.repeat_interleave(STEPS, 0).requires_grad_()
    same = LossInputs(**{**vars(given), "head": given.target_head})
    total, _, matches = ttt_loss(perfect, inputs=same)
    total.backward()
    assert matches.all()
    assert abs(float(total.detach())) < 1e-12
    assert perfect.grad is not None
    assert float(perfect.grad.abs().max()) < 1e-12


def test_without_gradients_the_loss_is_the_same() -> None:
    hidden, given = inputs("kl_div")
    with_gradient = ttt_loss(hidden.clone().requires_grad_(), inputs=given)[0].detach()
    with torch.no_grad():
        without, _, _ = ttt_loss(hidden, inputs=given)
    assert torch.equal(with_gradient, without)


def test_an_unknown_loss_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match=r"'kl' is unknown.*kl_div"):
        eager_loss("kl")
