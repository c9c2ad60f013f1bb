"""fp8 against float arithmetic: T tokens of A = 3 layers, H = 64."""

import pytest
import torch

from storage.codecs import CODECS, Fp8Codec, as_stored, codec_named

H = 64
FP8 = Fp8Codec()


def round_trip(states: torch.Tensor) -> torch.Tensor:
    return FP8.decode("aux", FP8.encode("aux", states, hidden_size=H))


def draw(tokens: int, *, size: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return size * torch.randn(tokens, 3 * H, generator=generator)


def largest_of_layer(states: torch.Tensor) -> torch.Tensor:
    """The largest value of each token's layer, beside each of the layer's values."""
    layers = states.abs().unflatten(1, (-1, H))
    return layers.amax(dim=2, keepdim=True).expand_as(layers).flatten(1)


@pytest.mark.parametrize("size", [1e-30, 1e-3, 1.0, 300.0, 24_900.0, 1e30])
def test_values_are_off_by_a_sixteenth_or_less_whatever_their_size(size: float) -> None:
    states = draw(500, size=size)
    error = (round_trip(states).float() - states).abs()
    bound = torch.maximum(states.abs() / 16, largest_of_layer(states) / 2**17)
    assert bool((error <= bound).all())
    # a bound that is not reached would say nothing: e4m3 has no more than 3 bits of mantissa
    assert bool((error > states.abs() / 20).any())


def test_a_scale_of_its_own_keeps_a_tokens_and_a_layers_small_values_beside_24900() -> None:
    states = draw(4)
    states[1, 5] = 24_900.0  # one value of token 1, layer 0
    found = round_trip(states).float()
    others = torch.ones_like(states, dtype=torch.bool)
    others[1, :H] = False
    torch.testing.assert_close(found[others], round_trip(draw(4)).float()[others], rtol=0, atol=0)
    assert found[1, 5] == pytest.approx(24_900, rel=1 / 16)
    beside = (found[1, :H] - states[1, :H]).abs()
    assert float(beside[6:].max()) <= max(float(states[1, 6:H].abs().max()) / 16, 24_900 / 2**17)


def test_decoding_gives_what_torch_makes_of_every_e4m3_value() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn)
    codes = codes[codes.float().isfinite()]  # NaN is in the scale
    for scale in (2.0**-124, 2.0**-9, 1.0, 2.0**119):
        parts = {"last": codes[None], "last.scale": torch.full((1, 1), scale).bfloat16()}
        assert torch.equal(FP8.decode("last", parts)[0].float(), codes.float() * scale)


def test_what_e4m3_can_hold_comes_back_exactly() -> None:
    codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    exact = codes[codes.isfinite()]  # 254 values, 448 the largest
    padded = torch.zeros(4, H)
    padded[:, 0] = 448.0
    padded.view(-1)[torch.arange(256) % H > 0] = torch.cat([exact, exact[:2]])[
        torch.arange(256) % H > 0
    ]
    for scale in (2.0**-9, 1.0, 2.0**5):
        states = padded * scale
        assert torch.equal(as_stored("fp8", states).float(), states)


def test_zero_rows_and_layers_of_zeros_stay_zero() -> None:
    states = draw(3)
    states[0] = 0.0
    states[2, H : 2 * H] = 0.0
    found = round_trip(states)
    assert bool((found[0] == 0).all())
    assert bool((found[2, H : 2 * H] == 0).all())
    assert bool((found[2, :H] != 0).any())
    assert round_trip(states[:0]).shape == (0, 3 * H)


def test_equal_states_give_equal_bytes_in_whatever_company_they_are_encoded() -> None:
    states = draw(50).bfloat16()
    whole = FP8.encode("aux", states, hidden_size=H)
    alone = FP8.encode("aux", states[17:23], hidden_size=H)
    assert whole.keys() == alone.keys() == {"aux", "aux.scale"}
    for name, part in alone.items():
        assert torch.equal(whole[name][17:23].view(torch.uint8), part.view(torch.uint8)), name
    wide = FP8.encode("aux", states.float(), hidden_size=H)
    assert torch.equal(wide["aux"].view(torch.uint8), whole["aux"].view(torch.uint8))


def test_the_bytes_that_are_reckoned_with_are_those_that_are_stored() -> None:
    for codec in CODECS.values():
        tensors = codec.encode("aux", draw(7), hidden_size=H)
        stored = sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())
        assert stored == 7 * 3 * codec.state_bytes(H)
        assert {n: t.shape[1] for n, t in tensors.items()} == codec.widths("aux", 3 * H, H)


def test_an_unknown_codec_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="codec 'fp3' is unknown; choose one of bf16, fp8"):
        codec_named("fp3")
