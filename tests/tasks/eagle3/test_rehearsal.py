"""The rehearsal of a training's first step: what it leaves ready, and that nothing else changes."""

import logging
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

from tasks.eagle3.draft import Eagle3DraftModel
from tasks.eagle3.head_transform import PLAIN
from tasks.eagle3.rehearsal import Rehearsal, rehearse
from tasks.eagle3.training_settings import TrainSettings
from tests.tasks.eagle3.draft_cases import TEXT_CONFIG, make_batch, make_draft

SETTINGS = TrainSettings(ttt_steps=3)


def on(device: torch.device, draft: Eagle3DraftModel) -> Callable[[], None]:
    options: dict[str, Any] = {"precision": "bf16", "transform": PLAIN, "device": device}
    return partial(rehearse, draft.config, SETTINGS, **options)


@pytest.mark.parametrize("options", [{}, {"arch": "qwen3"}, {"num_layers": 2}, {"fc_norm": True}])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_it_takes_a_step_and_leaves_random_state_and_config_as_they_were(
    options: dict[str, Any], precision: Any
) -> None:
    config = make_draft(**options).config
    before, state = config.to_dict(), torch.get_rng_state()
    device = torch.device("cpu")
    rehearse(config, SETTINGS, precision=precision, transform=PLAIN, device=device)
    assert torch.equal(torch.get_rng_state(), state)
    assert config.to_dict() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about a GPU that is not there")
def test_what_goes_wrong_in_it_does_not_end_the_training(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        Rehearsal(on(torch.device("cuda"), make_draft()), torch.device("cuda")).wait()
    assert "kernels are compiled at the first step: " in caplog.text


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_first_step_after_it_compiles_no_kernel() -> None:
    from tasks.eagle3.kernels import fold, loss, own_keys, rows
    from tests.tasks.eagle3.test_training_step_gpu import step

    def compiled() -> int:
        kernels = [
            kernel
            for module in (fold, loss, own_keys, rows)
            for kernel in vars(module).values()
            if hasattr(kernel, "device_caches")
        ]
        return sum(len(cache[0]) for kernel in kernels for cache in kernel.device_caches.values())

    draft = make_draft(text_config=TEXT_CONFIG | {"intermediate_size": 160})
    draft.embed_tokens.to(torch.bfloat16)  # as verifiers' are
    at_first = compiled()
    device = torch.device("cuda")
    Rehearsal(on(device, draft), device).wait()
    rehearsed = compiled()
    assert rehearsed > at_first
    step(draft.cuda(), make_batch(lengths=(9, 2, 117, 3, 231)), precision="bf16")
    assert compiled() == rehearsed
