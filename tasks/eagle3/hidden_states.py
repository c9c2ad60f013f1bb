"""Which states of the verifier a draft sees, and the canary that proves they are the right ones.

B = batch, S = sequence, N = tokens of one sample, P = probed positions, A = captured layers,
H = verifier hidden size, L = decoder layers, V = vocabulary.

The convention, here and nowhere else: layer id i is the *input* of decoder layer i, which is
transformers' `hidden_states[i]` and vLLM's id i. `last` is the *input of the final norm*: the state
that transformers does not return (its own last entry is behind the norm).
"""

import inspect
import math
from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor, nn

from tasks.eagle3.head import VerifierHead
from tasks.eagle3.verifier import check_layer_ids

FINAL_STATE = "pre_norm"
MAX_PROBED_POSITIONS = 512
NEAR_TIE = 8
"""Rounding errors of the model's dtype, as shares of the logits' spread, within which two logits tie: what the layers
of a deep model add up to. In bf16 that is 6 %, in fp32 a millionth."""


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
    """As `argmax_agreement`, of the last states as they are stored."""


@dataclass(frozen=True)
class Decoder:
    """The parts of a language model that the hooks need."""

    base: nn.Module
    """Token ids to normed states, without the head."""
    layers: nn.ModuleList
    norm: nn.Module


def find_decoder(model: nn.Module) -> Decoder:
    """Find the decoder inside any transformers model, however deeply it is wrapped.

    It is the module that directly holds the model's input embedding, one list of layers and the
    final norm. Raises ValueError when there is no such module.
    """
    get_embedding = getattr(model, "get_input_embeddings", None)
    embedding = get_embedding() if callable(get_embedding) else None
    for name, module in model.named_modules():
        children = dict(module.named_children())
        if embedding is None or not any(child is embedding for child in children.values()):
            continue
        lists = [c for c in children.values() if isinstance(c, nn.ModuleList) and len(c) > 0]
        norm = children.get("norm")
        if len(lists) == 1 and norm is not None:
            return Decoder(base=module, layers=lists[0], norm=norm)
        raise ValueError(
            f"{type(model).__name__}.{name or '(itself)'} holds {len(lists)} layer lists and "
            f"{'a' if norm is not None else 'no'} child named norm; expected one of each: "
            "this architecture is not supported"
        )
    raise ValueError(
        f"{type(model).__name__} has no module that holds its token embedding; "
        "this architecture is not supported"
    )


def rope_switch(config: Any) -> int | None:
    """Return the length above which transformers turns all positions of a batch by other angles, if there is one.

    Long rope (Phi-3 128k, Phi-4-mini) does: one long row changes the states of all rows beside it.
    """
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") != "longrope":
        return None
    length = rope.get("original_max_position_embeddings")
    return int(length or config.original_max_position_embeddings)


class StateHooks:
    """Context manager that records states of `model`'s forward passes, one at a time.

    `layer_ids` are ascending ids within [0, L]; id L gives the same state as `last`.
    """

    def __init__(self, model: nn.Module, layer_ids: Sequence[int]) -> None:
        self.decoder = find_decoder(model)
        num_layers = len(self.decoder.layers)
        self.layer_ids = tuple(layer_ids)
        check_layer_ids([i for i in self.layer_ids if i != num_layers] or [0], num_layers)
        self._places = sorted({*self.layer_ids, num_layers})
        self._states: dict[int, list[Tensor]] = {place: [] for place in self._places}
        self._handles: list[Any] = []

    def __enter__(self) -> Self:
        for place in self._places:
            last = place == len(self.decoder.layers)
            module = self.decoder.norm if last else self.decoder.layers[place]

            def record(
                _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], place: int = place
            ) -> None:
                self._states[place].append(args[0] if args else kwargs["hidden_states"])

            self._handles.append(module.register_forward_pre_hook(record, with_kwargs=True))
        return self

    def __exit__(
        self,
        error_type: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self.clear()

    def clear(self) -> None:
        """Forget what an interrupted forward pass left."""
        for states in self._states.values():
            states.clear()

    def take(self) -> tuple[list[Tensor], Tensor]:
        """Return (A tensors [B, S, H] in the order of layer_ids, last [B, S, H]) of the last pass.

        Raises ValueError unless there was exactly one forward pass since the last call, and every
        module asked for took part in it.
        """
        counts = {place: len(states) for place, states in self._states.items()}
        if set(counts.values()) != {1}:
            self.clear()
            raise ValueError(
                f"expected one state of each of the places {self._places} after one forward pass, "
                f"got (place: states) {counts}; call take() after every pass"
            )
        found = {place: states.pop() for place, states in self._states.items()}
        return [found[i] for i in self.layer_ids], found[len(self.decoder.layers)]


@torch.inference_mode()
def check_states(  # noqa: PLR0917 - one sample's parts in the order in which they are stored
    model: nn.Module,
    head: VerifierHead,
    input_ids: Tensor | Sequence[int],
    aux: Tensor,
    last: Tensor,
    layer_ids: Sequence[int],
    *,
    stored_last: Tensor | None = None,
    generator: torch.Generator | None = None,
    threshold: float = 0.98,
    aux_tolerance: float = 0.05,
    logit_tolerance: float = 0.1,
) -> CanaryScore:
    """Hold one captured sample against the verifier itself: the canary.

    `input_ids` [N], `aux` [N, A * H] and `last` [N, H] are as captured; `stored_last` [N, H] is `last`
    after its codec's round trip, of which the agreement is measured and not judged.
    Three comparisons, all independent of our hooks: the argmax of the rebuilt head on `last` with that
    of the verifier's own logits, at MAX_PROBED_POSITIONS positions at most (drawn by `generator`,
    else evenly spread), the values of these logits, which a wrong scale, cap or epsilon changes and
    the argmax does not, and `aux` with transformers' own `hidden_states[i]`. A position agrees too
    when the verifier's own logits tie there within rounding, which is twice the difference that the
    logits of the two show at this position and no more than NEAR_TIE of their spread. One position
    may always differ: in bf16 two tokens of a short sample can come that close.

    Another layer's states are caught below the tolerance of 0.05 too, since the asked layer must be
    the nearest of all.

    Raises CanaryError naming what is wrong, ValueError for shapes that do not belong together.
    """
    ids = torch.as_tensor(input_ids, dtype=torch.long)
    _check_shapes(ids, aux, last, layer_ids, hidden_size=head.norm.numel())
    decoder = find_decoder(model)
    check_layer_ids(layer_ids, len(decoder.layers))
    positions = _draw_positions(len(ids), generator)  # [P]
    device = next(decoder.base.parameters()).device
    # the head of a large vocabulary at P positions only, where the model can do that
    keep = {"logits_to_keep": positions.to(device)} if _keeps_logits(model) else {}
    own = model(input_ids=ids[None].to(device), output_hidden_states=True, use_cache=False, **keep)
    if len(own.hidden_states) != len(decoder.layers) + 1:
        raise ValueError(
            f"transformers returned {len(own.hidden_states)} hidden states of a model with "
            f"{len(decoder.layers)} layers, expected one more than layers; it is not supported"
        )
    references = [
        state[0].to(last.device).float() for state in own.hidden_states
    ]  # L + 1 of [N, H]
    layers = aux.float().chunk(len(layer_ids), dim=-1)  # A of [N, H]
    aux_error = tuple(
        _relative_error(state, references[i]) for i, state in zip(layer_ids, layers, strict=True)
    )
    own_logits = own.logits[0] if keep else own.logits[0, positions.to(device)]  # [P, V]
    own_logits = own_logits.to(last.device)
    rebuilt = head.logits(last[positions])  # [P, V]
    logit_error = _relative_error(_centered(rebuilt), _centered(own_logits.float()))
    rounding = _rounding(rebuilt, own_logits)
    agrees = _agrees(rebuilt, own_logits, within=rounding)
    agreement = agrees.float().mean().item()
    stored_agreement = agreement
    if stored_last is not None and not torch.equal(stored_last, last):
        stored = head.logits(stored_last[positions])
        stored_agreement = _agrees(stored, own_logits, within=rounding).float().mean().item()
    score = CanaryScore(agreement, len(positions), logit_error, aux_error, stored_agreement)
    _judge_aux(score, layers, references, layer_ids, tolerance=aux_tolerance)
    if not bool(torch.isfinite(last).all()) or len(agrees) - int(agrees.sum()) > max(
        1, math.floor((1 - threshold) * len(positions) + 1e-9)
    ):
        raise CanaryError(
            f"the head on the captured last states chooses the verifier's token at "
            f"{score.argmax_agreement:.1%} of {score.positions} positions, below the threshold of "
            f"{threshold:.1%}: {_explain_last(head, last.float(), references)}"
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
    return torch.minimum(2 * difference, NEAR_TIE * torch.finfo(own.dtype).eps * spread)


def _centered(logits: Tensor) -> Tensor:
    return logits - logits.mean(dim=-1, keepdim=True)


def _check_shapes(
    ids: Tensor, aux: Tensor, last: Tensor, layer_ids: Sequence[int], *, hidden_size: int
) -> None:
    wanted = {"aux": (len(ids), len(layer_ids) * hidden_size), "last": (len(ids), hidden_size)}
    for name, tensor in (("aux", aux), ("last", last)):
        if tuple(tensor.shape) != wanted[name]:
            raise ValueError(
                f"{name} has shape {list(tensor.shape)}, expected {list(wanted[name])} for "
                f"{len(ids)} tokens, {len(layer_ids)} layers and hidden size {hidden_size}"
            )


def _keeps_logits(model: nn.Module) -> bool:
    return "logits_to_keep" in inspect.signature(model.forward).parameters


def _draw_positions(tokens: int, generator: torch.Generator | None) -> Tensor:
    count = min(tokens, MAX_PROBED_POSITIONS)
    if generator is None:
        return torch.arange(count) * tokens // count
    return torch.randperm(tokens, generator=generator)[:count].sort().values


def _relative_error(state: Tensor, reference: Tensor) -> float:
    """Mean over tokens of |state - reference| / |reference|.

    Per token, because a first token's activations can be a thousand times the others'.
    """
    error = torch.linalg.vector_norm(state - reference, dim=-1)
    size = torch.linalg.vector_norm(reference, dim=-1).clamp_min(1e-12)
    return float((error / size).mean().item())


def _nearest(state: Tensor, references: Sequence[Tensor]) -> tuple[int, float]:
    errors = [_relative_error(state, reference) for reference in references]
    best = min(range(len(errors)), key=lambda i: errors[i])
    return best, errors[best]


def _judge_aux(
    score: CanaryScore,
    layers: Sequence[Tensor],
    references: Sequence[Tensor],
    layer_ids: Sequence[int],
    *,
    tolerance: float,
) -> None:
    for layer_id, state, error in zip(layer_ids, layers, score.aux_error, strict=True):
        best, best_error = _nearest(state, references)
        # "not <=" so that NaN fails
        if not error <= tolerance or best != layer_id:
            raise CanaryError(
                f"the states captured as layer {layer_id} are off by {error:.2%} from the verifier's "
                f"hidden_states[{layer_id}] (tolerance {tolerance:.0%}); the nearest is "
                f"hidden_states[{best}], off by {best_error:.2%}"
                + (": layer ids are shifted" if best_error <= tolerance else "")
            )


def _explain_last(head: VerifierHead, last: Tensor, references: Sequence[Tensor]) -> str:
    """Say what the captured last states are instead of the input of the final norm."""
    if not bool(torch.isfinite(last).all()):
        return "they are not finite"
    behind_norm = len(references) - 1
    if _relative_error(last, references[behind_norm]) < 0.05:
        return (
            "they equal the verifier's states behind the final norm, so the final norm is applied "
            f"twice; store the norm's input ({FINAL_STATE})"
        )
    best, error = _nearest(last, references[:behind_norm])
    if error < 0.05:
        return f"they equal hidden_states[{best}], the input of layer {best}, not of the final norm"
    rebuilt = _relative_error(head.normed(last), references[behind_norm])
    if rebuilt < 0.05:
        return (
            "they are the final norm's input, so the head tensors or a transform of the logits "
            "differ from the verifier's"
        )
    return (
        f"behind the final norm they are off by {rebuilt:.1%}; nothing of the verifier equals them"
    )
