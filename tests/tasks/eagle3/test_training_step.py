"""The training step against speculators' own forward: loss, metrics and every gradient."""

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers.activations import ACT2FN
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from tasks.eagle3 import step_plan
from tasks.eagle3.batches import PackedBatch
from tasks.eagle3.draft import Eagle3DraftModel, eager_loss, trainable_parameters
from tasks.eagle3.head_transform import HeadTransform
from tasks.eagle3.step_plan import plan_steps
from tasks.eagle3.training_step import (
    expected_acceptance_length,
    plan_batch,
    training_forward,
)
from tests.tasks.eagle3.draft_cases import make_batch, make_draft

OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "norm_before_fc": {"norm_before_fc": True},
    "fc_norm": {"fc_norm": True},
    "norm_output": {"norm_output": True},
    "norm_before_residual": {"norm_before_residual": True},
    "two layers": {"num_layers": 2},
    "all": {"num_layers": 2, "fc_norm": True, "norm_output": True, "norm_before_residual": True},
    "two captured layers": {"layer_ids": (3, 8), "norm_before_fc": True},
}


def reference(
    draft: Eagle3DraftModel, batch: PackedBatch, *, ttt_steps: int, decay: float, loss: Any
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    """speculators' loss, metrics and gradients."""
    draft.zero_grad()
    _, total, metrics = draft(
        batch.aux[None],
        batch.input_ids[None],
        batch.document_ids[None],
        loss_mask=batch.loss_mask[None],
        position_ids=batch.position_ids[None],
        verifier_last_hidden_states=batch.last[None],
        ttt_steps=ttt_steps,
        ttt_step_loss_decay=decay,
        loss_config={"loss": (loss, 1.0)},
    )
    total.backward()
    return total.detach(), metrics, gradients(draft)


def gradients(draft: Eagle3DraftModel) -> dict[str, Tensor]:
    found = {}
    for name, weight in trainable_parameters(draft).items():
        assert weight.grad is not None, name
        found[name] = weight.grad.clone()
    draft.zero_grad()
    return found


def ours(
    draft: Eagle3DraftModel, batch: PackedBatch, *, ttt_steps: int, decay: float, **options: Any
) -> tuple[Tensor, dict[str, Tensor], dict[str, Tensor]]:
    draft.zero_grad()
    result = training_forward(draft, batch, ttt_steps=ttt_steps, step_loss_decay=decay, **options)
    result.loss.backward()  # type: ignore[no-untyped-call]
    return result.loss.detach(), result.metrics, gradients(draft)


def assert_equal_steps(
    mine: tuple[Tensor, dict[str, Tensor], dict[str, Tensor]],
    theirs: tuple[Tensor, dict[str, Tensor], dict[str, Tensor]],
    *,
    tolerance: float,
) -> None:
    torch.testing.assert_close(mine[0], theirs[0], rtol=tolerance, atol=0, check_dtype=False)
    assert mine[1].keys() == theirs[1].keys()
    for name, value in theirs[1].items():
        torch.testing.assert_close(
            mine[1][name].double(),
            value.double(),
            rtol=tolerance if "loss" in name else 0,
            atol=0,
            msg=lambda text, name=name: f"{name}: {text}",
        )
    assert mine[2].keys() == theirs[2].keys()
    largest = max(float(gradient.abs().max()) for gradient in theirs[2].values())
    for name, gradient in theirs[2].items():
        # Relative to the largest entry: small ones are sums that nearly cancel, and with a single
        # visible key the gradient of its projection is rounding alone.
        scale = gradient.abs().max().clamp(min=1e-2 * largest)
        off = (mine[2][name] - gradient).abs().max() / scale
        assert float(off) < tolerance, f"{name}: {float(off):.1e}"


@pytest.mark.parametrize("ttt_steps", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_step_equals_speculators_forward_in_fp32(
    options: dict[str, Any], arch: str, ttt_steps: int
) -> None:
    draft = make_draft(arch=arch, **options)
    batch = make_batch(layers=len(options.get("layer_ids", (0, 0, 0))))
    theirs = reference(draft, batch, ttt_steps=ttt_steps, decay=0.8, loss=eager_loss("kl_div"))
    # fp32 sums in another order: 1e-7 a sum, amplified through layers and steps. The float64 test
    # below holds the same formulas to 1e-9.
    assert_equal_steps(ours(draft, batch, ttt_steps=ttt_steps, decay=0.8), theirs, tolerance=5e-5)


@pytest.fixture
def float64_norms(monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers' norms round to fp32 whatever comes; here they keep float64."""

    def forward(self: Any, hidden_states: Tensor) -> Tensor:
        variance = hidden_states.pow(2).mean(-1, keepdim=True)
        scaled: Tensor = hidden_states * torch.rsqrt(variance + self.variance_epsilon)
        return self.weight * scaled

    for norm in (LlamaRMSNorm, Qwen3RMSNorm):
        monkeypatch.setattr(norm, "forward", forward)


def kl_float64(logits: Tensor, targets: Tensor) -> Tensor:
    p = targets.softmax(-1)
    return (p * (p.log() - logits.log_softmax(-1))).sum(-1)


@pytest.mark.usefixtures("float64_norms")
@pytest.mark.parametrize("arch", ["llama", "qwen3"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_the_step_equals_speculators_forward_in_float64(options: dict[str, Any], arch: str) -> None:
    draft = make_draft(arch=arch, **options)
    # The eager attention rounds to fp32 inside; sdpa does not.
    draft.config.transformer_layer_config._attn_implementation = "sdpa"
    source = draft.state_dict()
    draft = Eagle3DraftModel(draft.config)
    draft.load_state_dict(source)
    draft = draft.double()
    small = make_batch(layers=len(options.get("layer_ids", (0, 0, 0))))
    batch = PackedBatch(**{**vars(small), "aux": small.aux.double(), "last": small.last.double()})
    theirs = reference(draft, batch, ttt_steps=3, decay=0.8, loss=kl_float64)
    mine = ours(draft, batch, ttt_steps=3, decay=0.8)
    for name, gradient in theirs[2].items():
        off = (mine[2][name] - gradient).abs().max() / gradient.abs().max()
        assert float(off) < 1e-9, f"{name}: {float(off):.1e}"
    # speculators adds the steps' losses up in an fp32 zero.
    assert_equal_steps(mine, theirs, tolerance=1e-6)


@pytest.mark.parametrize("loss", ["rkl", "jsd", "ce", "tv", "nla", "lk_hybrid"])
def test_other_losses_equal_speculators_too(loss: str) -> None:
    draft, batch = make_draft(), make_batch()
    theirs = reference(draft, batch, ttt_steps=3, decay=1.0, loss=eager_loss(loss))
    mine = ours(draft, batch, ttt_steps=3, decay=1.0, loss=loss)
    assert_equal_steps(mine, theirs, tolerance=3e-5)


@pytest.mark.parametrize("arch", ["llama", "qwen3"])
def test_accuracies_follow_a_row_as_long_as_it_is_right(arch: str) -> None:
    # Four draft tokens: about one guess in four is right by chance, so that chains occur.
    draft = make_draft(arch=arch, draft_vocab=4)
    batch = make_batch(lengths=(60, 3, 2, 80, 40, 2, 70))
    theirs = reference(draft, batch, ttt_steps=4, decay=1.0, loss=eager_loss("kl_div"))
    mine = ours(draft, batch, ttt_steps=4, decay=1.0)
    assert float(theirs[1]["cond_acc_1_sum"]) > 0
    assert_equal_steps(mine, theirs, tolerance=3e-5)


@pytest.mark.parametrize(
    "rows",
    [[0], [-1], [7, 8], [0, 20, -1]],
    ids=["first row", "last row", "across a border", "scattered"],
)
def test_single_supervised_rows_are_enough(rows: list[int]) -> None:
    draft, dense = make_draft(), make_batch()
    mask = torch.zeros_like(dense.loss_mask)
    mask[rows] = True
    batch = PackedBatch(**{**vars(dense), "loss_mask": mask})
    theirs = reference(draft, batch, ttt_steps=3, decay=0.5, loss=eager_loss("kl_div"))
    assert_equal_steps(ours(draft, batch, ttt_steps=3, decay=0.5), theirs, tolerance=3e-5)


def test_a_document_longer_than_a_tile_is_cut_exactly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(step_plan, "QUERIES_PER_TILE", 4)
    monkeypatch.setattr(step_plan, "PAIRS_PER_GROUP", 100)
    draft, batch = make_draft(), make_batch(lengths=(30, 3, 17, 11))
    theirs = reference(draft, batch, ttt_steps=3, decay=1.0, loss=eager_loss("kl_div"))
    assert_equal_steps(ours(draft, batch, ttt_steps=3, decay=1.0), theirs, tolerance=3e-5)


def test_bf16_products_stay_close_to_fp32() -> None:
    draft, batch = make_draft(), make_batch()
    exact = ours(draft, batch, ttt_steps=3, decay=1.0)
    rounded = ours(draft, batch, ttt_steps=3, decay=1.0, precision="bf16")
    # bf16 keeps 8 bits: 0.4 % a product.
    torch.testing.assert_close(rounded[0], exact[0], rtol=2e-2, atol=0)
    for name, gradient in exact[2].items():
        assert rounded[2][name].dtype == torch.float32
        off = (rounded[2][name] - gradient).norm() / gradient.norm()
        assert float(off) < 5e-2, f"{name}: {float(off):.1e}"


def test_frozen_tensors_get_no_gradient() -> None:
    draft, batch = make_draft(), make_batch()
    training_forward(draft, batch, ttt_steps=2).loss.backward()  # type: ignore[no-untyped-call]
    frozen = {name for name, value in draft.named_parameters() if value.grad is None}
    assert frozen == {
        "embed_tokens.weight",
        "lm_head.weight",
        "verifier_lm_head.weight",
        "verifier_norm.weight",
    }


def test_two_runs_give_the_same_bits() -> None:
    draft, batch = make_draft(), make_batch()
    first, second = (ours(draft, batch, ttt_steps=3, decay=1.0) for _ in range(2))
    assert torch.equal(first[0], second[0])
    assert all(torch.equal(gradient, second[2][name]) for name, gradient in first[2].items())


def test_evaluating_without_gradients_gives_the_same_numbers() -> None:
    draft, batch = make_draft(), make_batch()
    trained = training_forward(draft, batch, ttt_steps=3)
    with torch.no_grad():
        evaluated = training_forward(draft, batch, ttt_steps=3)
    assert not evaluated.loss.requires_grad
    assert all(torch.equal(value, evaluated.metrics[k]) for k, value in trained.metrics.items())


def test_other_activations_than_silu_are_applied() -> None:
    draft = make_draft()
    draft.layers[0].mlp.act_fn = ACT2FN["gelu_pytorch_tanh"]
    batch = make_batch()
    theirs = reference(draft, batch, ttt_steps=2, decay=1.0, loss=eager_loss("kl_div"))
    assert_equal_steps(ours(draft, batch, ttt_steps=2, decay=1.0), theirs, tolerance=3e-5)


def test_only_rows_that_a_target_depends_on_are_planned() -> None:
    # One supervised row, the last of five; a second document without any.
    mask = torch.tensor([0, 0, 0, 0, 1, 0, 0]).bool()
    plan = plan_steps(mask, torch.tensor([0, 0, 0, 0, 0, 1, 1]), ttt_steps=3)
    # Step k scores row 4 - k; row 4 itself is followed to the last but one step for its accuracy.
    assert [step.positions.tolist() for step in plan.steps] == [[2, 3, 4], [2, 3, 4], [2]]
    assert plan.key_rows.tolist() == [0, 1, 2, 3, 4]
    assert plan.targets.tolist() == [4, 5]
    assert plan.weights.tolist() == [[1, 1, 1], [0, 0, 0]]
    assert plan.supervised == (1, 1, 1)


def test_a_batch_without_supervision_is_refused() -> None:
    draft, dense = make_draft(), make_batch()
    batch = PackedBatch(**{**vars(dense), "loss_mask": torch.zeros_like(dense.loss_mask)})
    with pytest.raises(ValueError, match="none of the batch's 56 rows is supervised"):
        training_forward(draft, batch, ttt_steps=3)


def test_a_plan_of_another_batch_is_refused() -> None:
    draft = make_draft()
    plan = plan_batch(draft, make_batch(lengths=(9, 9)), ttt_steps=3)
    with pytest.raises(ValueError, match="16 rows and 3 steps, the batch has 56"):
        training_forward(draft, make_batch(), ttt_steps=3, plan=plan)


def test_the_expected_acceptance_length_multiplies_conditional_accuracies() -> None:
    sums = {"cond_acc_0_sum": 6, "cond_acc_0_total": 12, "cond_acc_1_sum": 4, "cond_acc_1_total": 8}
    assert expected_acceptance_length({k: float(v) for k, v in sums.items()}) == 1.75


@pytest.mark.parametrize(
    "transform",
    [
        HeadTransform(norm="layer"),
        HeadTransform(logit_softcap=3.0),
        HeadTransform(norm="layer", logit_softcap=3.0),
    ],
    ids=["layer norm", "soft-cap", "both"],
)
@pytest.mark.parametrize("loss", ["kl_div", "ce"])
def test_a_verifiers_head_transform_shapes_the_targets(transform: HeadTransform, loss: str) -> None:
    draft = make_draft()
    batch = make_batch()
    batch = dataclasses.replace(batch, last=batch.last + 2.0)  # a mean worth taking off
    plain = ours(draft, batch, ttt_steps=3, decay=1.0, loss=loss)
    mine = ours(draft, batch, ttt_steps=3, decay=1.0, loss=loss, transform=transform)
    # speculators' own forward, its two modules for the targets changed to what such a verifier does
    if transform.norm == "layer":
        draft.verifier_norm.register_forward_pre_hook(
            lambda _, args: (args[0] - args[0].mean(-1, keepdim=True),)
        )
    cap = transform.logit_softcap
    if cap is not None:
        draft.verifier_lm_head.register_forward_hook(
            lambda _, __, logits: cap * torch.tanh(logits / cap)
        )
    theirs = reference(draft, batch, ttt_steps=3, decay=1.0, loss=eager_loss(loss))

    assert_equal_steps(mine, theirs, tolerance=5e-5)
    if loss == "kl_div":  # ce only knows the best token, which a cap does not change
        assert not torch.allclose(plain[0], mine[0], rtol=1e-2)
