"""Finding the largest batch: the search, and the trial steps it is made of."""

import pytest
import torch

from tasks.eagle3.batch_fit import STEPS, fits_gpu, largest_fitting, try_steps, usable_bytes
from tasks.eagle3.head_transform import PLAIN
from tasks.eagle3.training_settings import TrainSettings
from tests.tasks.eagle3.draft_cases import make_draft


def search(room: int, *, smallest: int = 100, largest: int = 10_000) -> tuple[int, list[int]]:
    """The size found where `room` tokens fit, and the sizes tried."""
    tried: list[int] = []

    def fits(tokens: int) -> bool:
        tried.append(tokens)
        return tokens <= room

    return largest_fitting(fits, smallest=smallest, largest=largest), tried


@pytest.mark.parametrize(
    ("room", "found", "tried"),
    [
        (100, 100, [100, 200, 150]),
        (199, 150, [100, 200, 150]),
        (650, 600, [100, 200, 400, 800, 600]),
        (599, 400, [100, 200, 400, 800, 600]),
        (10**9, 9600, [100, 200, 400, 800, 1600, 3200, 6400, 9600]),
    ],
)
def test_sizes_double_while_they_fit_and_then_grow_by_half(
    room: int, found: int, tried: list[int]
) -> None:
    assert search(room) == (found, tried)


def test_the_largest_size_is_never_exceeded_and_the_smallest_never_undercut() -> None:
    assert search(10**9, largest=6400)[0] == 6400
    assert search(10**9, largest=50)[0] == 100


def test_a_longest_sample_that_does_not_fit_is_an_error_with_the_way_out() -> None:
    with pytest.raises(ValueError, match=r"not even 100 tokens.*train\.max_tokens"):
        search(99)


@pytest.mark.parametrize("tokens", [40, 60, 61])
def test_a_trial_takes_real_steps_on_full_batches_with_every_token_supervised(tokens: int) -> None:
    settings = TrainSettings(max_tokens=40, ttt_steps=2, optimizer="muon", noise=0.1)
    training = try_steps(make_draft(), settings, PLAIN, tokens)
    assert training.position.step == STEPS
    assert training.position.nonfinite_steps == 0
    # 61 tokens are a sample of 40 and one of 21; a sample of n tokens has n - 1 rows
    assert training.position.tokens == STEPS * (tokens - (1 if tokens == 40 else 2))
    rows = training.position.history[0]["tokens"]
    assert rows == training.position.tokens / STEPS
    assert training.unmoved() == []


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_batch_fits_a_gpu_within_the_room_it_is_given_and_leaves_nothing_behind() -> None:
    draft = make_draft().cuda()
    settings = TrainSettings(max_tokens=64, ttt_steps=2, precision="bf16")
    device = draft.fc.weight.device

    def fits(tokens: int, room_bytes: int) -> bool:
        return fits_gpu(draft, settings, PLAIN, tokens, room_bytes=room_bytes)

    assert fits(512, usable_bytes(device))
    # the states of a million tokens are 0.4 GB
    room_bytes = torch.cuda.memory_reserved(device) + (256 << 20)
    assert not fits(1 << 20, room_bytes)
    assert fits(512, room_bytes)
    torch.empty(1 << 30, dtype=torch.uint8, device=device)  # nobody else is held to that room
