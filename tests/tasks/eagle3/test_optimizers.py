"""AdamW and Muon as one: against speculators' optimizers, and what a step that is no number leaves behind."""

import math
from types import SimpleNamespace

import pytest
import torch
from speculators.train.optimizers import build_optimizers, split_named_params_for_muon
from torch import Tensor

from tasks.eagle3.draft import Eagle3DraftModel, trainable_parameters
from tasks.eagle3.optimizers import Optimizers, is_matrix, learning_rate
from tasks.eagle3.training_settings import TrainSettings
from tests.tasks.eagle3.draft_cases import make_draft

NAMES = ["adamw", "muon"]
LOSS = torch.tensor(1.0)


def give_gradients(draft: Eagle3DraftModel, *, seed: int, scale: float = 1.0) -> None:
    generator = torch.Generator().manual_seed(seed)
    for value in trainable_parameters(draft).values():
        value.grad = torch.randn(value.shape, generator=generator) * scale


def make_optimizers(draft: Eagle3DraftModel, name: str, **settings: float) -> Optimizers:
    chosen = TrainSettings.model_validate({"optimizer": name, "lr": 1e-2, **settings})
    return Optimizers(trainable_parameters(draft).values(), chosen)


def everything(draft: Eagle3DraftModel, optimizers: Optimizers) -> dict[str, Tensor]:
    """Copies of all weights and moments."""
    found = {}
    for name, value in trainable_parameters(draft).items():
        found[name] = value.detach().clone()
        for key, moment in optimizers.state[value].items():
            found[f"{key} of {name}"] = moment.clone()
    return found


def test_muon_is_for_the_matrices_that_speculators_gives_it() -> None:
    draft = make_draft()
    theirs, rest = split_named_params_for_muon(draft)
    ours = [name for name, value in trainable_parameters(draft).items() if is_matrix(value)]
    assert ours == sorted(name for name, _ in theirs)
    assert "fc.weight" in ours
    assert len(rest) == len(trainable_parameters(draft)) - len(ours) > 0


@pytest.mark.parametrize("name", NAMES)
def test_the_steps_are_those_of_speculators_optimizers(name: str) -> None:
    ours, theirs = make_draft(), make_draft()
    settings = {"beta2": 0.999, "muon_lr": 0.02, "muon_weight_decay": 0.1, "max_grad_norm": 1e9}
    mine = make_optimizers(ours, name, **settings)
    config = SimpleNamespace(
        optimizer=name,
        lr=1e-2,
        weight_decay=0.0,
        muon_lr=0.02,
        muon_momentum=0.95,
        muon_weight_decay=0.1,
        muon_ns_steps=5,
        muon_adjust_lr_fn="match_rms_adamw",
    )
    reference = build_optimizers(theirs, config)
    for seed in range(3):
        give_gradients(ours, seed=seed)
        give_gradients(theirs, seed=seed)
        mine.step(LOSS)
        for optimizer in reference:
            optimizer.step()
    wanted = trainable_parameters(theirs)
    for parameter, value in trainable_parameters(ours).items():
        torch.testing.assert_close(value, wanted[parameter], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("taken", [0, 2], ids=["the first step", "a later step"])
@pytest.mark.parametrize("bad", ["loss", "gradient"])
@pytest.mark.parametrize("name", NAMES)
def test_a_step_that_is_no_number_changes_nothing(name: str, bad: str, taken: int) -> None:
    draft, spared = make_draft(), make_draft()
    optimizers, wanted = make_optimizers(draft, name), make_optimizers(spared, name)
    for seed in range(taken):
        for one, its in ((draft, optimizers), (spared, wanted)):
            give_gradients(one, seed=seed)
            its.step(LOSS)
    before = everything(draft, optimizers)

    give_gradients(draft, seed=9)
    if bad == "gradient":
        gradient = draft.fc.weight.grad
        assert gradient is not None
        gradient[1, 2] = math.inf
    norm = optimizers.step(torch.tensor(math.nan) if bad == "loss" else LOSS)

    assert math.isfinite(norm) == (bad == "loss")
    after = everything(draft, optimizers)
    for key, value in before.items():
        assert torch.equal(after[key], value), key
    # and the next step is as if there had been none
    for one, its in ((draft, optimizers), (spared, wanted)):
        give_gradients(one, seed=10)
        its.step(LOSS)
    after = everything(draft, optimizers)
    for key, value in everything(spared, wanted).items():
        assert torch.equal(after[key], value), key


def test_gradients_are_clipped_to_their_common_norm_before_muon_and_adamw_see_them() -> None:
    draft = make_draft()
    optimizers = make_optimizers(draft, "muon", max_grad_norm=0.5)
    give_gradients(draft, seed=0)
    gradients = {
        name: value.grad.clone()
        for name, value in trainable_parameters(draft).items()
        if value.grad is not None
    }
    total = math.sqrt(
        sum(float(gradient.double().square().sum()) for gradient in gradients.values())
    )

    norm = optimizers.step(LOSS)

    assert float(norm) == pytest.approx(total, rel=1e-5)
    found = everything(draft, optimizers)
    clipped = {name: gradient * 0.5 / total for name, gradient in gradients.items()}
    # the first of a mean that forgets 5 %, and of one that forgets 10 %
    torch.testing.assert_close(
        found["momentum_buffer of fc.weight"], 0.05 * clipped["fc.weight"], rtol=1e-4, atol=1e-9
    )
    torch.testing.assert_close(
        found["exp_avg of norm.weight"], 0.1 * clipped["norm.weight"], rtol=1e-4, atol=1e-9
    )


def test_a_rate_of_zero_moves_nothing_and_muons_rate_follows_the_same_schedule() -> None:
    draft = make_draft()
    optimizers = make_optimizers(draft, "muon", muon_lr=0.5, warmup_ratio=0.0)
    before = everything(draft, optimizers)

    assert optimizers.set_rates(100, 100) == 0.0  # the cosine's end
    give_gradients(draft, seed=0)
    optimizers.step(LOSS)
    after = everything(draft, optimizers)
    assert all(torch.equal(after[name], before[name]) for name in trainable_parameters(draft))

    # half-way, at half of each peak: Muon moves a matrix by 0.2 x rate x sqrt(longer side) x a matrix that is about
    # orthogonal, whose RMS is 1 / sqrt(longer side); the iteration leaves its singular values between 0.5 and 1.5
    assert optimizers.set_rates(50, 100) == pytest.approx(0.5e-2)
    give_gradients(draft, seed=0)
    optimizers.step(LOSS)
    decayed = before["fc.weight"] * (1 - 0.25 * 0.1)
    moved = everything(draft, optimizers)["fc.weight"] - decayed
    assert float(moved.square().mean().sqrt()) == pytest.approx(0.2 * 0.25, rel=0.25)


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [
        ("constant", [0.5, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0, 1.0]),
        ("linear", [0.5, 1.0, 1.0, 0.875, 0.75, 0.625, 0.5, 0.375, 0.25, 0.125]),
    ],
)
def test_the_rate_warms_up_and_then_follows_its_schedule(schedule: str, rates: list[float]) -> None:
    settings = TrainSettings(lr=1.0, schedule=schedule, warmup_ratio=0.2)
    assert [learning_rate(step, 10, settings) for step in range(10)] == pytest.approx(rates)


def test_the_cosine_falls_from_the_peak_through_half_to_nothing() -> None:
    settings = TrainSettings(lr=1.0, schedule="cosine", warmup_ratio=0.0)
    assert learning_rate(0, 100, settings) == pytest.approx(1.0)
    assert learning_rate(50, 100, settings) == pytest.approx(0.5)
    assert learning_rate(100, 100, settings) == pytest.approx(0.0)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.filterwarnings("ignore:Synchronization debug mode")
@pytest.mark.parametrize("name", NAMES)
def test_a_step_on_a_gpu_waits_for_nothing_taken_or_not(name: str) -> None:
    draft = make_draft().cuda()
    optimizers = make_optimizers(draft, name)
    losses = [torch.tensor(value, device="cuda") for value in (1.0, math.nan, 1.0)]
    for value in trainable_parameters(draft).values():
        value.grad = torch.randn_like(value)
    optimizers.step(losses[0])  # what is made once may wait
    before = everything(draft, optimizers)
    try:
        torch.cuda.set_sync_debug_mode("error")
        for loss in losses[1:]:
            optimizers.set_rates(1, 10)
            optimizers.step(loss)
            if loss is losses[1]:
                skipped = everything(draft, optimizers)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert all(torch.equal(skipped[key], value) for key, value in before.items())
    after = everything(draft, optimizers)
    assert not any(torch.equal(after[key], before[key]) for key in trainable_parameters(draft))
