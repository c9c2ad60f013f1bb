"""Capture on a GPU: copies behind the compute, the canary beside it."""

import pytest
import torch

from tasks.eagle3.canary import check_states, run_verifier
from tasks.eagle3.head import read_head
from tasks.eagle3.verifier import read_facts
from tasks.engines.loading import load_verifier_model
from tasks.engines.transformers import CapturedStates, CaptureEngine
from tasks.jobs.capture import check_shard, run_probes
from tests.tiny_models import make_qwen3

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU"),
]

LAYERS = (2, 4, 5)
LENGTHS = (5, 300, 9, 40, 40, 3, 700, 299, 301, 12)


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    return make_qwen3(tmp_path_factory.mktemp("model"))


def texts(seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(3, 300, (n,), generator=generator).tolist() for n in LENGTHS]


def assert_same(found: CapturedStates, wanted: CapturedStates) -> None:
    for part, expected in zip(found, wanted, strict=True):
        assert part.device.type == "cpu"
        torch.testing.assert_close(part, expected, atol=1e-4, rtol=1e-4)


def test_the_states_are_those_of_a_cpu_also_when_the_next_samples_are_queued_before_they_are_there(
    directory,
):
    on_gpu, on_cpu = (
        CaptureEngine(load_verifier_model(directory, device=d), LAYERS, store_dtype=torch.float32)
        for d in ("cuda", "cpu")
    )
    first = on_gpu.start(texts(1), tokens_per_batch=800)
    second = on_gpu.start(texts(2), tokens_per_batch=800)

    for seed, finish in ((1, first), (2, second)):
        assert_same(finish(), on_cpu.capture(texts(seed), tokens_per_batch=800))


def test_the_canary_beside_a_capture_passes_right_states_and_no_others(directory):
    model = load_verifier_model(directory, device="cuda", dtype=torch.bfloat16)
    head = read_head(directory, read_facts(directory))
    engine = CaptureEngine(model, LAYERS)
    finish = engine.start(texts(1), tokens_per_batch=800)
    probes = run_probes(model, texts(1))
    engine.start(texts(2), tokens_per_batch=800)

    states = finish()
    score = check_shard(probes, head, states, LAYERS)

    assert score is not None
    assert score["argmax_agreement"] >= 0.98
    (own,) = run_verifier(model, [texts(1)[0]])
    aux, last = (part.cuda() for part in states.split(LENGTHS)[0])
    with pytest.raises(ValueError, match="as layer 2 are off by"):
        check_states(own, head, aux.roll(1, dims=0), last, LAYERS)
