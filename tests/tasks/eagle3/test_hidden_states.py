import pytest
import torch
from torch import nn

from tasks.eagle3.hidden_states import StateHooks, find_decoder
from tests.tasks.eagle3.verifier_samples import LAYERS, VerifierSample, make_sample


@pytest.fixture(scope="module", params=["llama", "qwen3", "tied"])
def sample(request, tmp_path_factory) -> VerifierSample:
    return make_sample(tmp_path_factory.mktemp("verifier"), request.param)


def test_hooks_return_the_inputs_of_the_asked_layers_and_of_the_final_norm(sample):
    with torch.inference_mode(), StateHooks(sample.model, LAYERS) as hooks:
        sample.model(sample.ids[None])
        aux, last = hooks.take()

    for state, layer_id in zip(aux, LAYERS, strict=True):
        assert torch.equal(state[0], sample.states[layer_id])
    assert torch.equal(last[0], sample.last)


def test_the_id_behind_the_last_layer_means_the_last_state(sample):
    with torch.inference_mode(), StateHooks(sample.model, [0, 8]) as hooks:
        sample.model(sample.ids[None])
        (first, eighth), last = hooks.take()

    assert torch.equal(first[0], sample.states[0])
    assert torch.equal(eighth, last)


def test_states_missing_or_left_over_from_another_pass_are_an_error(sample):
    with torch.inference_mode(), StateHooks(sample.model, LAYERS) as hooks:
        with pytest.raises(ValueError, match="expected one state of each"):
            hooks.take()
        sample.model(sample.ids[None])
        sample.model(sample.ids[None])
        with pytest.raises(ValueError, match=r"\{2: 2, 4: 2, 5: 2, 8: 2\}"):
            hooks.take()
        sample.model(sample.ids[None])
        assert len(hooks.take()[0]) == 3


def test_leaving_the_context_removes_every_hook(sample):
    with StateHooks(sample.model, LAYERS):
        pass

    assert not any(module._forward_pre_hooks for module in sample.model.modules())


def test_a_model_that_is_no_decoder_is_refused():
    with pytest.raises(ValueError, match="Linear has no module that holds its token embedding"):
        find_decoder(nn.Linear(2, 2))
