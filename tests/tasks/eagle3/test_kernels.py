"""The kernels of the training step against the plain arithmetic: on a GPU, or by Triton's interpreter."""

import pytest
import torch
from torch import Tensor

from tasks.eagle3.head import softcapped_
from tasks.eagle3.head_transform import HeadTransform
from tasks.eagle3.kernels import fold as fold_kernels
from tasks.eagle3.kernels import loss as loss_kernels
from tasks.eagle3.kernels import own_keys as own_kernels
from tasks.eagle3.kernels import rows as kernels

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def uniform(*shape: int, seed: int = 0) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


@pytest.mark.parametrize("shape", [(5, 64), (3, 48), (2, 3, 40)])
def test_rows_are_normed_and_their_gradient_is_autograds(shape):
    rows = (random(*shape) * 3).requires_grad_()
    gradient = random(*shape, seed=1)
    expected = rows * torch.rsqrt(rows.square().mean(-1, keepdim=True) + 1e-5)
    expected.backward(gradient)

    normed, inverse = kernels.normalize(rows.detach(), eps=1e-5, dtype=torch.float32)
    d_rows = kernels.normalize_backward(gradient, normed, inverse, dtype=torch.float32)

    torch.testing.assert_close(normed, expected.detach())
    torch.testing.assert_close(d_rows, rows.grad)


@pytest.mark.parametrize(("heads", "width", "rotated"), [(3, 16, 16), (9, 24, 24), (2, 16, 8)])
def test_heads_are_turned_and_turned_back(heads, width, rotated):
    rows = random(5, heads, width)
    angles = uniform(5, rotated // 2).repeat(1, 2)
    cos, sin = angles.cos(), angles.sin()
    first, second, rest = rows.tensor_split([rotated // 2, rotated], dim=-1)
    half_cos, half_sin = (t[:, None, : rotated // 2] for t in (cos, sin))
    expected = torch.cat(
        [first * half_cos - second * half_sin, second * half_cos + first * half_sin, rest], -1
    )

    turned = kernels.rotate(rows, cos=cos, sin=sin)

    torch.testing.assert_close(turned, expected)
    torch.testing.assert_close(kernels.rotate(turned, cos=cos, sin=sin, backward=True), rows)


def test_strided_heads_are_turned_where_they_lie():
    rows = random(4, 2, 3, 8)[:, 0]  # keys beside values
    cos, sin = (random(4, 8, seed=s) for s in (1, 2))

    torch.testing.assert_close(
        kernels.rotate(rows, cos=cos, sin=sin), kernels.rotate(rows.contiguous(), cos=cos, sin=sin)
    )


def test_the_gate_and_its_gradient_are_autograds():
    gate_up = random(3, 2 * 1500).requires_grad_()
    gradient = random(3, 1500, seed=1)
    gate, up = gate_up.chunk(2, dim=-1)
    expected = torch.nn.functional.silu(gate) * up
    expected.backward(gradient)

    torch.testing.assert_close(kernels.silu_gate(gate_up.detach()), expected.detach())
    torch.testing.assert_close(kernels.silu_gate_backward(gradient, gate_up.detach()), gate_up.grad)


@pytest.mark.parametrize("softcap", [None, 3.0])
@pytest.mark.parametrize("vocabulary", [50, 9000])  # one block and several, none of them full
def test_the_loss_is_the_divergence_and_leaves_its_gradient(softcap, vocabulary):
    targets, steps = 4, 3
    logits = (random(targets * steps, vocabulary) * 4).requires_grad_()
    wanted = random(targets, vocabulary, seed=1) * 4
    factors = uniform(targets, steps)
    factors[1, 2] = 0.0
    capped = softcapped_(wanted.clone(), HeadTransform(logit_softcap=softcap))
    p = capped.softmax(-1)[:, None]
    log_q = logits.log_softmax(-1).view(targets, steps, -1)
    expected = (p * (p.log() - log_q)).sum(-1) * factors
    expected.sum().backward()

    left = logits.detach().clone()
    losses, matches = loss_kernels.kl_loss(left, wanted, factors, softcap=softcap, gradient=True)

    torch.testing.assert_close(losses, expected.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(left, logits.grad, rtol=1e-4, atol=1e-6)
    best = logits.argmax(-1).view(targets, steps) == wanted.argmax(-1)[:, None]
    assert torch.equal(matches, best)


def test_of_equal_logits_the_first_is_the_most_likely():
    logits = torch.zeros(2, 9000, device=DEVICE)
    logits[0, [17, 8000]] = 5.0
    logits[1, 8000] = 5.0
    target = torch.zeros(2, 9000, device=DEVICE)
    target[:, [17, 8000]] = 5.0

    _, matches = loss_kernels.kl_loss(
        logits, target, torch.ones(2, 1, device=DEVICE), softcap=None, gradient=False
    )

    assert matches.tolist() == [[True], [False]]


@pytest.mark.parametrize(("groups", "width"), [(1, 24), (3, 16), (4, 16)])
def test_own_keys_are_taken_into_a_softmax_that_is_there(groups, width):
    rows, slots, kv_heads, jobs, scale = 18, 21, 2, 2, 0.3
    queries = random(rows, kv_heads, groups, width).requires_grad_()
    keys, values = (random(jobs, rows, kv_heads, width, seed=s).requires_grad_() for s in (1, 2))
    shared_keys, shared_values = (random(5, kv_heads, width, seed=s) for s in (3, 4))
    places = uniform(slots).argsort()[:rows].sort().values
    gradient = random(rows, kv_heads, groups, width, seed=6)

    def scores(query: Tensor, own: Tensor) -> tuple[Tensor, Tensor]:
        return (
            torch.einsum("nvgc,mvc->nvgm", query, shared_keys) * scale,
            torch.einsum("nvgc,jnvc->nvgj", query, own) * scale,
        )

    shared, own = scores(queries, keys)
    weights = torch.cat([shared, own], -1).softmax(-1)
    mixed = torch.einsum("nvgm,mvc->nvgc", weights[..., :5], shared_values)
    mixed = mixed + torch.einsum("nvgj,jnvc->nvgc", weights[..., 5:], values)
    mixed.backward(gradient)

    def spread(tensor: Tensor) -> Tensor:
        return tensor.new_full((slots, *tensor.shape[1:]), 7.0).index_copy_(0, places, tensor)

    with torch.no_grad():
        part = torch.einsum("nvgm,mvc->nvgc", shared.softmax(-1), shared_values).flatten(1, 2)
        got, normalizer = spread(part), spread(shared.logsumexp(-1).flatten(1, 2)).T.contiguous()
        own_kernels.merge(
            queries, keys, values, mixed=got, normalizer=normalizer, places=places, scale=scale
        )
        # what the step-0 keys give, by the formulas of the softmax
        d_weights = torch.einsum("nvgc,mvc->nvgm", gradient, shared_values)
        balance = (gradient * mixed).sum(-1, keepdim=True)
        d_shared = weights[..., :5] * (d_weights - balance) * scale
        d_queries = spread(torch.einsum("nvgm,mvc->nvgc", d_shared, shared_keys).flatten(1, 2))
        d_keys, d_values = own_kernels.merge_backward(
            queries,
            keys,
            values,
            mixed=got,
            normalizer=normalizer,
            places=places,
            gradient=spread(gradient.flatten(1, 2)),
            d_queries=d_queries,
            scale=scale,
        )

    torch.testing.assert_close(got[places].view_as(mixed), mixed.detach())
    total = torch.cat([shared, own], -1).logsumexp(-1).flatten(1, 2)
    torch.testing.assert_close(normalizer.T[places], total.detach())
    untouched = torch.ones(slots, dtype=torch.bool, device=DEVICE).index_fill_(0, places, False)
    assert bool((got[untouched] == 7).all())
    assert bool((d_queries[untouched] == 7).all())
    torch.testing.assert_close(d_queries[places].view_as(queries), queries.grad)
    torch.testing.assert_close(d_keys, keys.grad)
    torch.testing.assert_close(d_values, values.grad)


def test_a_folded_matrix_gives_its_gradient_back_to_weights_and_gain():
    weights = [random(40, 2 * 150, seed=s) for s in (0, 1)]  # two column groups
    halves = [weight[:, 150:] for weight in weights]
    gain, d_value = random(150, seed=2), random(80, 150, seed=3)
    into = torch.empty(80, 300, device=DEVICE)

    fold_kernels.fold(halves[0], gain, into=into[:40, 150:])
    torch.testing.assert_close(into[:40, 150:], halves[0] * gain)

    d_gain = fold_kernels.unfold(d_value, halves, gain, into=into[:, 150:])

    torch.testing.assert_close(into[:, 150:], d_value * gain)
    torch.testing.assert_close(d_gain, (d_value * torch.cat(halves)).sum(0), rtol=1e-4, atol=1e-4)
