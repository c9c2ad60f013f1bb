from pathlib import Path

import pytest
import torch
from torch import Tensor

from tasks.eagle3.canary import (
    MAX_PROBED_POSITIONS,
    CanaryError,
    CanaryScore,
    check_states,
    run_verifier,
)
from tasks.eagle3.head import VerifierHead, read_head
from tasks.eagle3.hidden_states import StateHooks
from tasks.eagle3.verifier import read_facts
from tests.tasks.eagle3.verifier_samples import HIDDEN, LAYERS, VerifierSample, make_sample
from tests.tiny_models import load_model, make_llama


@pytest.fixture(scope="module", params=["llama", "qwen3", "tied"])
def sample(request, tmp_path_factory) -> VerifierSample:
    return make_sample(tmp_path_factory.mktemp("verifier"), request.param)


def check(
    sample: VerifierSample,
    aux: Tensor,
    last: Tensor,
    *,
    head: VerifierHead | None = None,
    tokens: int = 60,
    generator: torch.Generator | None = None,
) -> CanaryScore:
    (own,) = run_verifier(sample.model, sample.ids[None, :tokens], generator=generator)
    return check_states(own, head or sample.head, aux, last, LAYERS)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_canary_passes_right_states_also_after_bf16(sample, dtype):
    aux, last = sample.aux(LAYERS).to(dtype), sample.last.to(dtype)

    score = check(sample, aux, last)

    assert score.positions == 60
    assert score.argmax_agreement >= 59 / 60
    # bf16 keeps 8 bits: relative errors up to 2^-9, about 0.0017 in the mean square
    assert all(e == 0 if dtype == torch.float32 else 1e-4 < e < 2**-9 for e in score.aux_error)


@pytest.fixture(scope="module")
def many_tokens(tmp_path_factory) -> Path:
    """A random verifier of 50,000 tokens: at most positions the best two logits are close."""
    return make_llama(tmp_path_factory.mktemp("many-tokens"), vocab_size=50_000)


def capture_with_noise(
    directory: Path, dtype: torch.dtype, *, share: float = 0.02
) -> tuple[VerifierSample, Tensor]:
    """A verifier's own states, and the last ones off by a share as rounding in deep layers leaves them."""
    model = load_model(directory).to(dtype)
    generator = torch.Generator().manual_seed(3)
    ids = torch.randint(3, 50_000, (500,), generator=generator)
    with torch.inference_mode(), StateHooks(model, LAYERS) as hooks:
        model(ids[None])
        aux, last = hooks.take()
    head = read_head(directory, read_facts(directory))
    states = {i: state[0].float() for i, state in zip(LAYERS, aux, strict=True)}
    noise = 1 + share * torch.randn(last[0].shape, generator=generator)
    return VerifierSample(model, head, ids, [states.get(i, last[0]) for i in range(9)], last[0]), (
        last[0].float() * noise
    )


def test_near_ties_agree_as_far_as_the_models_dtype_explains_them(many_tokens):
    for share in (0.02, 0.03):
        sample, last = capture_with_noise(many_tokens, torch.bfloat16, share=share)
        assert check(sample, sample.aux(LAYERS), last, tokens=500).argmax_agreement >= 0.98

    exact, last = capture_with_noise(many_tokens, torch.float32)
    with pytest.raises(CanaryError, match=r"at 9\d\.\d% of 256 positions, below the threshold"):
        check(exact, exact.aux(LAYERS), last, tokens=500)


@pytest.mark.parametrize(
    ("captured", "message"),
    [
        ([1, 4, 5], r"as layer 2 are off by .* the nearest is hidden_states\[1\].*shifted"),
        ([3, 5, 6], r"as layer 2 are off by .* the nearest is hidden_states\[3\].*shifted"),
        ([2, 4, 6], r"as layer 5 are off by .* the nearest is hidden_states\[6\].*shifted"),
        ([4, 2, 5], r"as layer 2 are off by .* the nearest is hidden_states\[4\].*shifted"),
    ],
)
def test_the_canary_names_a_shifted_layer(sample, captured, message):
    with pytest.raises(CanaryError, match=message):
        check(sample, sample.aux(captured), sample.last)


def test_the_canary_sees_a_final_norm_applied_twice(sample):
    normed = sample.head.normed(sample.last)

    with pytest.raises(CanaryError, match=r"below the threshold of 98\.0%.*norm is applied twice"):
        check(sample, sample.aux(LAYERS), normed)


def test_the_canary_names_a_last_state_taken_one_layer_early(sample):
    with pytest.raises(CanaryError, match=r"equal hidden_states\[7\], the input of layer 7"):
        check(sample, sample.aux(LAYERS), sample.states[7])


def test_the_canary_sees_a_head_of_another_model(sample):
    other = torch.randn(sample.head.head.shape, generator=torch.Generator().manual_seed(9))
    head = VerifierHead(sample.head.embed, sample.head.norm, other, sample.head.eps)

    with pytest.raises(CanaryError, match=r"head tensors or a transform of the logits differ"):
        check(sample, sample.aux(LAYERS), sample.last, head=head)


def test_the_canary_sees_states_of_other_tokens(sample):
    # as when a prefix cache returns only a tail: the second half stands where the first should
    rolled = sample.aux(LAYERS).roll(30, dims=0)

    with pytest.raises(CanaryError, match="as layer 2 are off by"):
        check(sample, rolled, sample.last)


@pytest.mark.parametrize("name", ["aux", "last"])
def test_the_canary_refuses_states_that_are_not_finite(sample, name):
    states = {"aux": sample.aux(LAYERS).clone(), "last": sample.last.clone()}
    states[name][7, 3] = float("nan")

    with pytest.raises(CanaryError, match=r"off by nan|not finite"):
        check(sample, states["aux"], states["last"])


def test_what_a_codec_makes_of_the_last_states_is_measured_and_not_judged(sample):
    (own,) = run_verifier(sample.model, sample.ids[None])
    aux, last = sample.aux(LAYERS), sample.last
    stored = torch.cat([last[:45], last[45:].roll(1, dims=0)])

    score = check_states(own, sample.head, aux, last, LAYERS, stored_last=stored)

    assert score.argmax_agreement == 1.0
    # three quarters are as they were, and one token in 300 may be its neighbor's by chance
    assert 0.75 <= score.stored_agreement < 0.9
    assert check_states(own, sample.head, aux, last, LAYERS).stored_agreement == 1.0


def test_probed_positions_can_be_drawn(sample):
    generator = torch.Generator().manual_seed(0)

    score = check(sample, sample.aux(LAYERS), sample.last, generator=generator)

    assert score.argmax_agreement == 1.0


def test_a_short_capture_is_refused_by_its_shape(sample):
    aux = sample.aux(LAYERS)[:-1]

    with pytest.raises(
        ValueError, match=rf"aux has shape \[59, 192\], expected \[60, {3 * HIDDEN}\]"
    ):
        check(sample, aux, sample.last)


def test_a_short_probe_is_still_held_against_every_layer(sample):
    assert check(sample, sample.aux(LAYERS)[:3], sample.last[:3], tokens=3).positions == 3
    with pytest.raises(CanaryError, match="as layer 5 are off by"):
        check(sample, sample.aux([2, 4, 6])[:3], sample.last[:3], tokens=3)


def test_texts_of_one_length_go_through_together_and_share_the_probed_positions(sample):
    texts = torch.stack([sample.ids, sample.ids.flip(0)])
    together = run_verifier(sample.model, texts)
    for text, own in zip(texts, together, strict=True):
        (alone,) = run_verifier(sample.model, text[None])
        assert len(own.states) == len(alone.states)
        for state, wanted in zip(
            (*own.states, own.logits), (*alone.states, alone.logits), strict=True
        ):
            torch.testing.assert_close(state, wanted, atol=1e-4, rtol=1e-4)

    many = sample.ids.repeat(4, 20)
    (first, *_) = run_verifier(sample.model, many)
    assert len(first.positions) == len(first.logits) == MAX_PROBED_POSITIONS // 4
