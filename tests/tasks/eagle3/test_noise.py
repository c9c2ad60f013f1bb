"""Noise on captured states."""

import pytest
import torch

from tasks.eagle3.noise import add_noise

PLACE = {"seed": 3, "epoch": 1, "batch": 4}


def test_noise_is_uniform_within_its_width() -> None:
    noise = add_noise(torch.zeros(200, 500), 0.25, **PLACE)
    assert float(noise.abs().max()) <= 0.25
    assert float(noise.abs().max()) > 0.2499
    assert float(noise.mean()) == pytest.approx(0.0, abs=2e-3)
    assert float(noise.var()) == pytest.approx(0.5**2 / 12, rel=0.02)  # of a uniform of that width


def test_noise_is_added_to_the_states_in_fp32() -> None:
    states = torch.tensor([[256.0, -3.0]], dtype=torch.bfloat16)
    noise = add_noise(torch.zeros(1, 2), 0.1, **PLACE)
    noisy = add_noise(states, 0.1, **PLACE)
    assert noisy.dtype == torch.float32
    assert torch.equal(noisy, states.float() + noise)
    assert not torch.equal(noisy.bfloat16()[0, 0].float(), noisy[0, 0])  # bf16 would have lost it


def test_noise_depends_on_seed_epoch_and_batch_and_on_no_random_state() -> None:
    states = torch.zeros(4, 8)
    first = add_noise(states, 1.0, **PLACE)
    torch.manual_seed(99)
    assert torch.equal(add_noise(states, 1.0, **PLACE), first)
    others = [add_noise(states, 1.0, **{**PLACE, name: value + 1}) for name, value in PLACE.items()]
    swapped = add_noise(states, 1.0, seed=3, epoch=4, batch=1)
    assert not any(torch.equal(other, first) for other in [*others, swapped])


def test_drawing_noise_leaves_the_global_random_state_alone() -> None:
    before = torch.get_rng_state()
    add_noise(torch.zeros(4, 8), 1.0, **PLACE)
    assert torch.equal(torch.get_rng_state(), before)
