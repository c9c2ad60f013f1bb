"""Which states of the verifier a draft sees, and the hooks that record them.

B = batch, S = sequence, A = captured layers, H = verifier hidden size, L = decoder layers.

The convention, here and nowhere else: layer id i is the *input* of decoder layer i, which is
transformers' `hidden_states[i]` and vLLM's id i. `last` is the *input of the final norm*: the state
that transformers does not return (its own last entry is behind the norm).
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from torch import Tensor, nn

from tasks.eagle3.verifier import check_layer_ids

FINAL_STATE = "pre_norm"


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
