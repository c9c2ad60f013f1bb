"""Memory that a GPU copies to behind the compute: locked, of the right shapes, given back and got again."""

import gc

import pytest
import torch

from tasks.eagle3.pinned_memory import PinnedMemory

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]


CUDA = torch.device("cuda")


@pytest.mark.parametrize("expected", [0, 100, 1 << 20], ids=["unforeseen", "too small", "foreseen"])
def test_it_is_page_locked_and_holds_what_is_copied_to_it(expected: int) -> None:
    values = {
        "w": torch.randn(1000, 33, device="cuda"),
        "half": torch.randn(7, device="cuda").bfloat16(),
        "step": torch.tensor(3.0, device="cuda"),
        "rng": torch.get_rng_state(),
        "none": torch.empty(0, 4, device="cuda"),
    }
    memory = PinnedMemory(CUDA, expected).like(values)
    for name, value in values.items():
        memory[name].copy_(value, non_blocking=True)
        assert memory[name].is_pinned() or not value.numel()
        assert memory[name].shape == value.shape
    torch.cuda.synchronize()
    for name, value in values.items():
        assert torch.equal(memory[name], value.cpu()), name


def test_memory_is_given_back_with_its_last_tensor_and_can_be_got_again() -> None:
    value = {"w": torch.ones(64 << 20, device="cuda"), "v": torch.ones(3, device="cuda")}
    for _ in range(40):  # 10 GB, were it kept
        last = PinnedMemory(CUDA, 0).like(value)["v"]
        gc.collect()
        assert last.is_pinned()
    assert PinnedMemory(CUDA, 0).like({"none": torch.empty(0)})["none"].shape == (0,)
