import pytest
import torch

from tasks.engines.loading import load_verifier_model
from tests.tiny_models import make_kimi, make_llama, make_qwen3

LENGTHS = (5, 17, 9, 40, 40, 3)


@pytest.fixture(scope="module", params=[make_llama, make_qwen3, make_kimi])
def directory(request, tmp_path_factory):
    return request.param(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def model(directory):
    return load_verifier_model(directory)


@pytest.fixture(scope="module")
def samples():
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in LENGTHS]
