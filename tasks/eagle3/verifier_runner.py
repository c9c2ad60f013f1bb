"""The verifier of speculative decoding: it reads prompts, then blocks of proposed tokens, many rows at once.

B = rows, S = longest prompt, Q = tokens of a block, A = captured layers, H = hidden size,
V = verifier vocabulary

Two runners do the same. One keeps keys and values in a slot cache. The other keeps none and reads each row
from its start every round: for models with a state that cannot be taken back (linear attention, state spaces).
"""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.eagle3.acceptance import rounding_margin
from tasks.eagle3.hidden_states import StateHooks
from tasks.eagle3.slot_cache import SlotCache, attend_to_slots

PLACED_ATTENTION = {"full_attention", "sliding_attention", "chunked_attention"}
"""Layers whose whole memory is one key and value for each place."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The verifier's best token after each of Q tokens, and whether rounding decided it; [B, Q]."""

    ids: Tensor
    is_tie: Tensor


def make_runner(
    model: PreTrainedModel, hooks: StateHooks, *, rows: int, slots: int
) -> "VerifierRunner":
    """Return a runner for `rows` rows of up to `slots` tokens: with a cache where the model allows one."""
    if keeps_places(model, slots=slots):
        return CachedRunner(model, hooks, rows=rows, slots=slots)
    return RecomputingRunner(model, hooks)


def keeps_places(model: Any, *, slots: int) -> bool:
    """Whether all that the model remembers of a row of `slots` tokens is a key and a value for each place."""
    config = model.config.get_text_config()
    # Llama-4 scales queries by a count of the tokens it has seen, one for all rows, from floor_scale on.
    counts_tokens = getattr(config, "attn_temperature_tuning", False)
    return bool(
        model._supports_attention_backend
        and not model._is_stateful
        and set(getattr(config, "layer_types", None) or []) <= PLACED_ATTENTION
        and not (counts_tokens and slots >= config.floor_scale)
    )


class VerifierRunner(ABC):
    """The verifier over B ragged rows; what it rejects is as if never read."""

    def __init__(self, model: PreTrainedModel, hooks: StateHooks) -> None:
        parts: Any = model  # transformers gives this method no types
        self._decoder: nn.Module = hooks.decoder.base
        self._head: nn.Module = parts.get_output_embeddings()
        self._hooks = hooks
        self._device = model.device

    @abstractmethod
    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Choice, Tensor]:
        """Read the prompts; return the first choice [B, 1] and the states [B, S, A * H]."""

    @abstractmethod
    def verify(self, block: Tensor) -> tuple[Choice, Tensor]:
        """Read a block [B, Q] after what is read; return its choices and states [B, Q, A * H]."""

    @abstractmethod
    def advance(self, counts: Tensor) -> None:
        """Count the first `counts` [B] tokens of the last block as read."""

    @abstractmethod
    def keep(self, order: list[int]) -> None:
        """Go on with the rows of `order` (see `slot_cache.survivors`)."""

    def _forward(self, token_ids: Tensor, **inputs: Any) -> tuple[Tensor, Tensor]:
        """[B, S] tokens -> normed last states [B, S, H] and captured states [B, S, A * H]."""
        hidden: Tensor = self._decoder(input_ids=token_ids, **inputs).last_hidden_state
        layers, _last = self._hooks.take()
        # layers may lie on several devices
        return hidden, torch.cat([layer.to(self._device) for layer in layers], dim=-1)

    def _choose(self, hidden: Tensor) -> Choice:
        """[B, Q, H] -> best tokens [B, Q]; a second maximum shows ties, cheaper than topk.

        Scales and caps of the logits keep their order, so the bare head is enough.
        """
        logits = self._head(hidden)  # [B, Q, V]
        best, ids = logits.max(dim=-1)
        second = logits.scatter_(2, ids[..., None], float("-inf")).amax(dim=-1)
        is_tie = best - second <= rounding_margin(logits.dtype) * best.abs()
        return Choice(ids.to(self._device), is_tie)


class CachedRunner(VerifierRunner):
    """Keeps keys and values in a slot cache; rejected tokens are written over."""

    def __init__(self, model: PreTrainedModel, hooks: StateHooks, *, rows: int, slots: int) -> None:
        super().__init__(model, hooks)
        self._config = model.config.get_text_config()
        self._cache = SlotCache(rows, slots)
        self._read = torch.zeros(rows, dtype=torch.long, device=model.device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Choice, Tensor]:
        """Read the prompts; return the first choice [B, 1] and the states [B, S, A * H]."""
        token_ids, self._read = _padded(prompts, device=self._device)
        places = torch.arange(token_ids.shape[1], device=self._device)[None]  # [1, S]
        hidden, aux = self._forward_at(places, token_ids)
        return self._choose(_rows_at(hidden, self._read - 1, count=1)), aux

    def verify(self, block: Tensor) -> tuple[Choice, Tensor]:
        """Read a block [B, Q] after what is read; return its choices and states [B, Q, A * H]."""
        places = self._read[:, None] + torch.arange(block.shape[1], device=block.device)
        hidden, aux = self._forward_at(places, block)
        return self._choose(hidden), aux

    def advance(self, counts: Tensor) -> None:
        """Count the first `counts` [B] tokens of the last block as read."""
        self._read = self._read + counts

    def keep(self, order: list[int]) -> None:
        """Go on with the rows of `order` (see `slot_cache.survivors`)."""
        self._cache.keep(order)
        self._read = self._read[order]

    def _forward_at(self, places: Tensor, token_ids: Tensor) -> tuple[Tensor, Tensor]:
        self._cache.write_at(places.expand(token_ids.shape))
        with attend_to_slots(self._config, self._cache):
            return self._forward(
                token_ids, position_ids=places, past_key_values=self._cache, use_cache=True
            )


class RecomputingRunner(VerifierRunner):
    """Keeps the rows' tokens alone and reads each row from its start every time."""

    def __init__(self, model: PreTrainedModel, hooks: StateHooks) -> None:
        super().__init__(model, hooks)
        self._rows: list[list[int]] = []
        self._block: list[list[int]] = []

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[Choice, Tensor]:
        """Read the prompts; return the first choice [B, 1] and the states [B, S, A * H]."""
        self._rows = [list(prompt) for prompt in prompts]
        hidden, aux, lengths = self._forward_rows(self._rows)
        return self._choose(_rows_at(hidden, lengths - 1, count=1)), aux

    def verify(self, block: Tensor) -> tuple[Choice, Tensor]:
        """Read a block [B, Q] after what is read; return its choices and states [B, Q, A * H]."""
        self._block = block.tolist()
        rows = [row + new for row, new in zip(self._rows, self._block, strict=True)]
        hidden, aux, lengths = self._forward_rows(rows)
        count = block.shape[1]
        chosen = self._choose(_rows_at(hidden, lengths - count, count=count))
        return chosen, _rows_at(aux, lengths - count, count=count)

    def advance(self, counts: Tensor) -> None:
        """Count the first `counts` [B] tokens of the last block as read."""
        for row, new, count in zip(self._rows, self._block, counts.tolist(), strict=True):
            row.extend(new[:count])

    def keep(self, order: list[int]) -> None:
        """Go on with the rows of `order` (see `slot_cache.survivors`)."""
        self._rows = [self._rows[row] for row in order]

    def _forward_rows(self, rows: Sequence[Sequence[int]]) -> tuple[Tensor, Tensor, Tensor]:
        # Padding stands on the right, where nothing that is real can see it: no mask is needed.
        token_ids, lengths = _padded(rows, device=self._device)
        return *self._forward(token_ids, use_cache=False), lengths


def _padded(rows: Sequence[Sequence[int]], *, device: torch.device) -> tuple[Tensor, Tensor]:
    """Ragged rows -> tokens [B, S] with zeros on the right, and lengths [B]."""
    longest = max(map(len, rows))
    padded = torch.tensor([[*row, *[0] * (longest - len(row))] for row in rows])
    return padded.to(device), torch.tensor([len(row) for row in rows], device=device)


def _rows_at(states: Tensor, starts: Tensor, *, count: int) -> Tensor:
    """The states [B, count, H] of each row from its start on, out of [B, S, H]."""
    columns = starts.to(states.device)[:, None] + torch.arange(count, device=states.device)
    return states[torch.arange(len(states), device=states.device)[:, None], columns]
