"""The training step on a GPU: flash attention and kernels against the plain path, and the same bits at every run."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.eagle3.batches import PackedBatch
from tasks.eagle3.draft import Eagle3DraftModel, trainable_parameters
from tasks.eagle3.head_transform import HeadTransform
from tasks.eagle3.step_plan import Sequences
from tasks.eagle3.training_step import plan_batch, training_forward
from tests.tasks.eagle3.draft_cases import make_batch, make_draft

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "qwen3": {"arch": "qwen3"},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "two layers": {"num_layers": 2},
}


def step(
    draft: Eagle3DraftModel, batch: PackedBatch, **options: Any
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    draft.zero_grad()
    result = training_forward(draft, batch.to("cuda"), **({"ttt_steps": 3} | options))
    result.loss.backward()  # type: ignore[no-untyped-call]
    gradients = {}
    for name, weight in trainable_parameters(draft).items():
        assert weight.grad is not None, name
        gradients[name] = weight.grad.clone()
    return result.loss.detach(), result.metrics, gradients


def assert_close(mine: Any, exact: Any) -> None:
    # bf16 keeps 8 bits: 0.4 % a product
    torch.testing.assert_close(mine[0], exact[0], rtol=2e-2, atol=0)
    largest = max(float(gradient.norm()) for gradient in exact[2].values())
    for name, gradient in exact[2].items():
        # with a single visible key the gradient of its projection is rounding alone
        off = (mine[2][name] - gradient).norm() / gradient.norm().clamp(min=1e-2 * largest)
        assert float(off) < 5e-2, f"{name}: {float(off):.1e}"


@pytest.mark.parametrize("ttt_steps", [1, 3, 5])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_bf16_step_stays_close_to_fp32(options: dict[str, Any], ttt_steps: int) -> None:
    draft, batch = make_draft(**options).cuda(), make_batch(lengths=(9, 2, 117, 3, 230))
    exact = step(draft, batch, ttt_steps=ttt_steps)

    assert_close(step(draft, batch, ttt_steps=ttt_steps, precision="bf16"), exact)


def test_fp32_products_on_the_gpu_equal_the_cpus() -> None:
    draft, batch = make_draft(), make_batch()
    result = training_forward(draft, batch, ttt_steps=3)
    on_gpu = step(draft.cuda(), batch)

    torch.testing.assert_close(on_gpu[0].cpu(), result.loss.detach(), rtol=1e-5, atol=0)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_an_embedding_and_heads_on_the_host_change_no_bit(precision: str) -> None:
    draft, batch = make_draft().cuda(), make_batch(lengths=(9, 2, 117, 3, 230))
    there = step(draft, batch, precision=precision)
    for table in (draft.embed_tokens, draft.lm_head, draft.verifier_lm_head):
        table.cpu()
    here = step(draft, batch, precision=precision)

    assert torch.equal(here[0], there[0])
    for name, gradient in there[2].items():
        assert torch.equal(here[2][name], gradient), name


@pytest.mark.parametrize(
    "rows",
    [[0], [-1], [7, 8], [0, 20, 140, -1]],
    ids=["first row", "last row", "across a border", "scattered"],
)
def test_sparse_supervision_is_exact_whatever_lies_between(rows: list[int]) -> None:
    draft, dense = make_draft().cuda(), make_batch(lengths=(9, 2, 117, 3, 230))
    mask = torch.zeros_like(dense.loss_mask)
    mask[rows] = True
    batch = dataclasses.replace(dense, loss_mask=mask)
    plan = plan_batch(draft, batch, ttt_steps=3, precision="bf16")
    assert all(isinstance(rows.visible, Sequences) for rows in plan.steps)

    assert_close(step(draft, batch, precision="bf16", plan=plan), step(draft, batch))


def test_a_capped_target_is_capped() -> None:
    draft, batch = make_draft().cuda(), make_batch()
    options: dict[str, Any] = {"transform": HeadTransform(logit_softcap=3.0)}

    assert_close(step(draft, batch, precision="bf16", **options), step(draft, batch, **options))


def test_two_runs_give_the_same_bits() -> None:
    draft, batch = make_draft().cuda(), make_batch(lengths=(9, 2, 117, 3, 630))
    first, second = (step(draft, batch, precision="bf16") for _ in range(2))

    assert torch.equal(first[0], second[0])
    for name, gradient in first[2].items():
        assert torch.equal(gradient, second[2][name]), name
