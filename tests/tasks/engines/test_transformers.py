import json
import logging
import shutil

import pytest
import torch
from accelerate import infer_auto_device_map
from accelerate.utils import get_balanced_memory
from safetensors.torch import load_file, save_file
from torch._dynamo.utils import counters

from tasks.eagle3.canary import check_states, run_verifier
from tasks.eagle3.head import read_head
from tasks.eagle3.verifier import VerifierError, read_facts
from tasks.engines.loading import load_verifier_model, spread_over
from tasks.engines.transformers import (
    CaptureEngine,
    CaptureMemoryError,
    plan_batches,
)
from tests.families.dense import build_phi4_mini
from tests.tasks.engines.conftest import LENGTHS
from tests.tiny_models import make_kimi, make_llama

LAYERS = [2, 4, 5]


def test_captured_states_are_transformers_own_of_each_sample_alone(model, samples):
    engine = CaptureEngine(model, LAYERS, store_dtype=torch.float32)

    captured = engine.capture(samples, tokens_per_batch=80).split(LENGTHS)

    for sample, states in zip(samples, captured, strict=True):
        with torch.inference_mode():
            own = model(torch.tensor([sample]), output_hidden_states=True).hidden_states
        wanted = torch.cat([own[i][0] for i in LAYERS], dim=-1)
        # fp32 rounding in another summation order; activations are of size 1 to 10
        torch.testing.assert_close(states.aux, wanted, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(model.model.norm(states.last), own[-1][0], atol=1e-4, rtol=1e-4)


def test_the_batch_does_not_change_a_samples_states_beyond_rounding(model, samples):
    engine = CaptureEngine(model, LAYERS, store_dtype=torch.float32)

    alone = [engine.capture([sample], tokens_per_batch=1) for sample in samples]

    together = engine.capture(samples, tokens_per_batch=999).split(LENGTHS)
    for batched, single in zip(together, alone, strict=True):
        torch.testing.assert_close(batched.aux, single.aux, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(batched.last, single.last, atol=1e-4, rtol=1e-4)


def test_captured_states_pass_the_canary_in_bf16(directory, model, samples):
    head = read_head(directory, read_facts(directory))

    states = CaptureEngine(model, LAYERS).capture([samples[3]], tokens_per_batch=80)

    assert states.aux.dtype == states.last.dtype == torch.bfloat16
    (own,) = run_verifier(model, [samples[3]])
    score = check_states(own, head, states.aux, states.last, LAYERS)
    assert score.positions == 40


def test_progress_counts_tokens_up_to_all_of_them(model, samples):
    done: list[int] = []

    CaptureEngine(model, LAYERS).capture(samples, tokens_per_batch=80, progress=done.append)

    # 40 + 40 fill the first batch; 17, 9, 5 and 3 tokens, padded to 68, the second
    assert done == [80, 114]


def out_of_memory_beyond(tokens: int):
    """Refuse what the device could not hold, as CUDA's allocator does."""

    def refuse(module, args):
        if args[0].shape[0] * args[0].shape[1] > tokens:
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried {args[0].shape}")

    return refuse


def test_after_a_batch_that_does_not_fit_all_are_smaller_and_nothing_is_lost(
    model, samples, caplog
):
    engine = CaptureEngine(model, LAYERS, store_dtype=torch.float32)
    wanted = engine.capture(samples, tokens_per_batch=80)
    handle = model.model.layers[4].mlp.register_forward_pre_hook(out_of_memory_beyond(40))
    tried: list[int] = []
    spy = model.model.register_forward_pre_hook(
        lambda _, __, given: tried.append(given["input_ids"].numel()), with_kwargs=True
    )
    try:
        with caplog.at_level(logging.WARNING):
            first = engine.capture(samples, tokens_per_batch=240)
            again = engine.capture(samples, tokens_per_batch=240)
    finally:
        handle.remove()
        spy.remove()

    # 6 x 40 and 2 x 40 do not fit, each halves what follows; the second call tries none of them again
    assert tried == [240, 80, 40, 40, 17, 27, 40, 40, 17, 27]
    assert [record.args[-1] for record in caplog.records] == [120, 40]
    for captured in (first, again):
        torch.testing.assert_close(captured.aux, wanted.aux, atol=1e-4, rtol=1e-4)
        torch.testing.assert_close(captured.last, wanted.last, atol=1e-4, rtol=1e-4)


def test_a_sample_that_alone_does_not_fit_is_named(model, samples):
    engine = CaptureEngine(model, LAYERS)
    handle = model.model.layers[4].mlp.register_forward_pre_hook(out_of_memory_beyond(20))
    try:
        with pytest.raises(CaptureMemoryError, match=r"one sample of 40 tokens .*max_tokens"):
            engine.capture(samples, tokens_per_batch=240)
    finally:
        handle.remove()


def test_batches_hold_like_lengths_within_the_budget():
    # longest first: 9 alone (2 x 9 > 12), 5 + 5, then 2 + 1 + 1 + 1 (4 x 2 <= 12)
    assert plan_batches([1, 5, 9, 5, 1, 2, 1], 12) == [[2], [3, 1], [5, 6, 4, 0]]
    # longer than the budget: runs alone
    assert plan_batches([20, 3], 12) == [[0], [1]]
    with pytest.raises(ValueError, match="drop empty samples"):
        plan_batches([3, 0], 12)


def test_samples_on_either_side_of_a_length_share_no_batch():
    assert plan_batches([1, 5, 9, 5, 6], 100) == [[2, 4, 3, 1, 0]]
    assert plan_batches([1, 5, 9, 5, 6], 100, apart_above=5) == [[2, 4], [3, 1, 0]]


def test_a_long_sample_does_not_change_the_long_rope_of_a_short_one(tmp_path):
    model = build_phi4_mini(tmp_path)  # its rope changes above 128 tokens
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in (60, 140)]
    engine = CaptureEngine(model, LAYERS, store_dtype=torch.float32)

    together = engine.capture(samples, tokens_per_batch=999).split([60, 140])

    for sample, states in zip(samples, together, strict=True):
        alone = engine.capture([sample], tokens_per_batch=999)
        torch.testing.assert_close(states.aux, alone.aux, atol=1e-4, rtol=1e-4)


def test_a_checkpoint_that_lacks_weights_is_refused(tmp_path):
    directory = make_llama(tmp_path / "m")
    weights = load_file(directory / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, directory / "model.safetensors", metadata={"format": "pt"})

    with pytest.raises(VerifierError, match=r"first: model\.layers\.3\.mlp\.up_proj\.weight"):
        load_verifier_model(directory)


def test_a_model_is_spread_in_whole_layers_over_its_gpus_and_nowhere_else(model):
    """Where transformers puts the modules is worked out by accelerate, which needs no GPU for that."""
    weights = sum(p.numel() * p.element_size() for p in model.parameters())

    def places(free_bytes):
        options = spread_over([free_bytes, free_bytes])
        assert options["device_map"] == "balanced"
        whole = model._no_split_modules
        room = get_balanced_memory(model, options["max_memory"], no_split_module_classes=whole)
        return infer_auto_device_map(model, room, no_split_module_classes=whole)

    found = places(2 * weights)
    layers = [found[f"model.layers.{i}"] for i in range(len(model.model.layers))]
    assert layers == sorted(layers)
    assert set(found.values()) == {0, 1}
    # too little: what is left over goes to no RAM, so that loading fails instead of crawling
    assert set(places(weights // 3).values()) <= {0, 1, "disk"}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # torch.compile's own, about its internals
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a compiler on a CPU")
def test_compiled_layers_give_the_same_states_and_leave_the_model_as_it_was(tmp_path, monkeypatch):
    monkeypatch.delenv("TORCHDYNAMO_DISABLE", raising=False)  # set for all other tests
    monkeypatch.setattr(torch._dynamo.config, "disable", False)
    model = load_verifier_model(make_llama(tmp_path))
    generator = torch.Generator().manual_seed(1)
    samples = [torch.randint(3, 300, (n,), generator=generator).tolist() for n in LENGTHS]
    plain = CaptureEngine(model, LAYERS, store_dtype=torch.float32)
    compiled = CaptureEngine(model, LAYERS, store_dtype=torch.float32, compiled=True)

    wanted = plain.capture(samples, tokens_per_batch=80)
    counters.clear()
    states = compiled.capture(samples, tokens_per_batch=80)

    assert counters["stats"]["unique_graphs"] >= 1
    assert not counters["graph_break"]
    assert "forward" not in vars(model.model.layers[0])
    torch.testing.assert_close(states.aux, wanted.aux, atol=1e-4, rtol=1e-4)
    torch.testing.assert_close(states.last, wanted.last, atol=1e-4, rtol=1e-4)


def test_a_composite_model_gives_its_language_model_alone(tmp_path):
    directory = make_kimi(tmp_path / "m")

    model = load_verifier_model(directory)

    stored = load_file(directory / "model.safetensors")
    assert type(model).__name__ == "DeepseekV3ForCausalLM"
    key = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(model.state_dict()[key], stored[f"language_model.{key}"])
    assert json.loads((directory / "config.json").read_text())["model_type"] == "kimi_k25"
