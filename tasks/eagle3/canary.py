"""The canary: proof that captured states are the verifier's own, by another way than our hooks.

N = tokens of one text, B = texts of one length, P = probed positions, A = captured layers, H = verifier hidden size,
L = decoder layers, V = vocabulary.
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tasks.eagle3.head import VerifierHead
from tasks.eagle3.hidden_states import FINAL_STATE, find_decoder
from tasks.eagle3.verifier import check_layer_ids

MAX_PROBED_POSITIONS = 256
"""Of the texts that go through the verifier together."""
NEAR_TIE = 12
"""Rounding errors of the model's dtype, as shares of the logits' spread, within which two logits tie: what the layers
of a deep model add up to. In bf16 that is 9 %, in fp32 a millionth."""
TIE_ERRORS = 4
"""Differences that the logits of two computations show, within which two logits tie. One is off by as much in the root
of the mean square, the difference of two by 1.4 times that, and the largest of many by more."""


class CanaryError(ValueError):
    """Captured states that are not the verifier's; the message says which and why."""


@dataclass(frozen=True)
class CanaryScore:
    """What check_states measured."""

    argmax_agreement: float
    """Share of the positions at which the rebuilt head chooses the verifier's own token."""
    positions: int
    """How many positions were compared."""
    logit_error: float
    """Relative error of the rebuilt logits against the verifier's own, without their mean, which no softmax sees."""
    aux_error: tuple[float, ...]
    """Relative error of each captured layer against transformers' own hidden states."""
    stored_agreement: float
    """Share of the positions at which the head chooses on the last states as stored what it chooses on the captured."""


@dataclass(frozen=True)
class OwnStates:
    """What the verifier itself makes of one text, without hooks, batches or padding."""

    states: tuple[Tensor, ...]
    """transformers' hidden_states: L + 1 of [N, H], the last behind the final norm."""
    positions: Tensor
    """The probed ones, [P]."""
    logits: Tensor
    """[P, V]"""


@torch.inference_mode()
def run_verifier(
    model: nn.Module,
    texts: Sequence[Sequence[int]] | Tensor,
    *,
    generator: torch.Generator | None = None,
) -> list[OwnStates]:
    """Run the verifier on texts of one length, [B, N], and return what it makes of each.

    Logits are taken at MAX_PROBED_POSITIONS positions at most of all texts together, at the same ones in each: drawn
    by `generator`, else evenly spread. On a GPU this returns before the verifier has computed.

    Raises ValueError for a model whose states are not understood.
    """
    ids = torch.as_tensor(texts, dtype=torch.long)
    decoder = find_decoder(model)
    positions = _draw_positions(ids.shape[1], max(1, MAX_PROBED_POSITIONS // len(ids)), generator)
    device = next(decoder.base.parameters()).device
    there = positions.to(device)
    # the head of a large vocabulary at P positions only, where the model can do that
    keep = {"logits_to_keep": there} if _keeps_logits(model) else {}
    own = model(input_ids=ids.to(device), output_hidden_states=True, use_cache=False, **keep)
    if len(own.hidden_states) != len(decoder.layers) + 1:
        raise ValueError(
            f"transformers returned {len(own.hidden_states)} hidden states of a model with "
            f"{len(decoder.layers)} layers, expected one more than layers; it is not supported"
        )
    logits = own.logits if keep else own.logits[:, there]  # [B, P, V]
    return [
        OwnStates(tuple(state[i] for state in own.hidden_states), positions, logits[i])
        for i in range(len(ids))
    ]


@torch.inference_mode()
def check_states(
    own: OwnStates,
    head: VerifierHead,
    aux: Tensor,
    last: Tensor,
    layer_ids: Sequence[int],
    *,
    stored_last: Tensor | None = None,
    threshold: float = 0.98,
    aux_tolerance: float = 0.05,
    logit_tolerance: float = 0.1,
) -> CanaryScore:
    """Hold one captured text against what the verifier itself makes of it.

    `aux` [N, A * H] and `last` [N, H] are as captured; `stored_last` [N, H] is `last` after its codec's round trip, of
    which the agreement is measured and not judged.
    Three comparisons: the argmax of the rebuilt head on `last` with that of the verifier's own logits at the probed
    positions, the values of these logits, which a wrong scale, cap or epsilon changes and the argmax does not, and
    `aux` with transformers' own `hidden_states[i]`. A position agrees too when the verifier's own logits tie there
    within rounding, which is TIE_ERRORS times the difference that the logits of the two show at this position and no
    more than NEAR_TIE of their spread. One position may always differ: in bf16 two tokens of a short text can come
    that close.

    Another layer's states are caught below the tolerance of 0.05 too, since the asked layer must be
    the nearest of all.

    Raises CanaryError naming what is wrong, ValueError for shapes that do not belong together.
    """
    _check_shapes(len(own.states[0]), aux, last, layer_ids, hidden_size=head.norm.numel())
    check_layer_ids(layer_ids, len(own.states) - 1)
    layers = aux.view(len(aux), len(layer_ids), -1).transpose(0, 1).float()  # [A, N, H]
    # of each captured layer against each of the verifier's
    errors = torch.stack([_error(layers, state) for state in own.states], dim=1)  # [A, L + 1]
    own_logits = own.logits.to(last.device)  # [P, V]
    positions = own.positions
    rebuilt = head.logits(last[positions])  # [P, V]
    logit_error = _error(_centered(rebuilt), _centered(own_logits.float())).item()
    rounding = _rounding(rebuilt, own_logits)
    agrees = _agrees(rebuilt, own_logits, within=rounding)
    agreement = agrees.float().mean().item()
    stored_agreement = 1.0
    if stored_last is not None and not torch.equal(stored_last, last):
        stored = head.logits(stored_last[positions])
        same = stored.argmax(dim=-1) == rebuilt.argmax(dim=-1)
        stored_agreement = same.float().mean().item()
    apart = errors.tolist()
    aux_error = tuple(row[i] for row, i in zip(apart, layer_ids, strict=True))
    score = CanaryScore(agreement, len(positions), logit_error, aux_error, stored_agreement)
    _judge_aux(apart, layer_ids, tolerance=aux_tolerance)
    if not bool(torch.isfinite(last).all()) or len(agrees) - int(agrees.sum()) > max(
        1, math.floor((1 - threshold) * len(positions) + 1e-9)
    ):
        raise CanaryError(
            f"the head on the captured last states chooses the verifier's token at "
            f"{score.argmax_agreement:.1%} of {score.positions} positions, below the threshold of "
            f"{threshold:.1%}: {_explain_last(head, last, own.states)}"
        )
    if not logit_error <= logit_tolerance:  # so that NaN fails
        raise CanaryError(
            f"the head on the captured last states chooses the verifier's tokens, but its logits are off by "
            f"{logit_error:.1%} from the verifier's own (tolerance {logit_tolerance:.0%}): a scale or cap of the "
            f"logits, or the norm's epsilon, is not what its config says (understood: {head.transform!r}, epsilon "
            f"{head.eps}); `outrider inspect` shows which part of the config was read"
        )
    return score


def _agrees(rebuilt: Tensor, own: Tensor, *, within: Tensor) -> Tensor:
    """Where the argmax of rebuilt logits [P, V] is the verifier's own up to `within` [P]: [P] bool."""
    chosen = rebuilt.argmax(dim=-1, keepdim=True)  # [P, 1]
    return own.gather(1, chosen)[:, 0] >= own.amax(dim=-1) - within


def _rounding(rebuilt: Tensor, own: Tensor) -> Tensor:
    """How far the verifier's own logits [P, V] may be apart at each position and still tie: [P]."""
    spread = own.float().std(dim=-1)
    difference = (_centered(rebuilt) - _centered(own.float())).square().mean(dim=-1).sqrt()
    return torch.minimum(TIE_ERRORS * difference, NEAR_TIE * torch.finfo(own.dtype).eps * spread)


def _centered(logits: Tensor) -> Tensor:
    return logits - logits.mean(dim=-1, keepdim=True)


def _check_shapes(
    tokens: int, aux: Tensor, last: Tensor, layer_ids: Sequence[int], *, hidden_size: int
) -> None:
    wanted = {"aux": (tokens, len(layer_ids) * hidden_size), "last": (tokens, hidden_size)}
    for name, tensor in (("aux", aux), ("last", last)):
        if tuple(tensor.shape) != wanted[name]:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, expected {list(wanted[name])} for "
                f"{tokens} tokens, {len(layer_ids)} layers and hidden size {hidden_size}"
            )


def _keeps_logits(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _draw_positions(tokens: int, most: int, generator: torch.Generator | None) -> Tensor:
    count = min(tokens, most)
    if generator is None:
        return torch.arange(count) * tokens // count
    return torch.randperm(tokens, generator=generator)[:count].sort().values


def _error(state: Tensor, reference: Tensor) -> Tensor:
    """Mean over tokens of |state - reference| / |reference|: [.., N, H] and [N, H] -> [..], not yet fetched from a GPU.

    Per token, because a first token's activations can be a thousand times the others'.
    """
    reference = reference.to(state.device).float()
    error = torch.linalg.vector_norm(state.float() - reference, dim=-1)
    size = torch.linalg.vector_norm(reference, dim=-1).clamp_min(1e-12)
    mean: Tensor = (error / size).mean(dim=-1)
    return mean


def _judge_aux(
    apart: Sequence[Sequence[float]], layer_ids: Sequence[int], *, tolerance: float
) -> None:
    """Judge the errors of the A captured layers against each of the verifier's L + 1 states."""
    for layer_id, errors in zip(layer_ids, apart, strict=True):
        error, best = errors[layer_id], min(range(len(errors)), key=lambda i: errors[i])
        # "not <=" so that NaN fails
        if not error <= tolerance or best != layer_id:
            raise CanaryError(
                f"the states captured as layer {layer_id} are off by {error:.2%} from the verifier's "
                f"hidden_states[{layer_id}] (tolerance {tolerance:.0%}); the nearest is "
                f"hidden_states[{best}], off by {errors[best]:.2%}"
                + (": layer ids are shifted" if errors[best] <= tolerance else "")
            )


def _explain_last(head: VerifierHead, last: Tensor, references: Sequence[Tensor]) -> str:
    """Say what the captured last states are instead of the input of the final norm."""
    if not bool(torch.isfinite(last).all()):
        return "they are not finite"
    *errors, behind_norm = (float(_error(last, reference)) for reference in references)
    if behind_norm < 0.05:
        return (
            "they equal the verifier's states behind the final norm, so the final norm is applied "
            f"twice; store the norm's input ({FINAL_STATE})"
        )
    best = min(range(len(errors)), key=lambda i: errors[i])
    if errors[best] < 0.05:
        return f"they equal hidden_states[{best}], the input of layer {best}, not of the final norm"
    rebuilt = float(_error(head.normed(last), references[-1]))
    if rebuilt < 0.05:
        return (
            "they are the final norm's input, so the head tensors or a transform of the logits "
            "differ from the verifier's"
        )
    return (
        f"behind the final norm they are off by {rebuilt:.1%}; nothing of the verifier equals them"
    )
