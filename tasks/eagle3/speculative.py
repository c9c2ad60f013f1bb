"""Greedy speculative decoding in this process: the draft's acceptance without a server.

B = rows, S = prompt tokens, N = draft tokens a round, A = captured layers, H = hidden size,
V = verifier vocabulary

A round: the draft proposes N tokens a row, the verifier reads them after the last token that it has
not read yet, and the row takes the verifier's best tokens up to and including the first that the
draft missed. In exact arithmetic that is the verifier's own greedy text, whatever the draft is.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tasks.eagle3.acceptance import DecodedPrompt, rounding_margin
from tasks.eagle3.draft_runner import DraftRunner
from tasks.eagle3.hidden_states import StateHooks
from tasks.eagle3.slot_cache import SlotCache, attend_to_slots, slot_mask, survivors

if TYPE_CHECKING:
    from tasks.eagle3.draft import Eagle3DraftModel

ROW_ATTENTION = {"full_attention", "sliding_attention"}
"""Layers that keep keys and values by place; a window must be longer than the text (`_check`)."""


def speculative_greedy(
    model: PreTrainedModel,
    draft: "Eagle3DraftModel",
    prompts: Sequence[Sequence[int]],
    *,
    layer_ids: Sequence[int],
    max_new_tokens: int,
    draft_tokens: int,
    eos_token_ids: Sequence[int],
    batch_size: int = 24,
    progress: Callable[[int], None] | None = None,
) -> list[DecodedPrompt]:
    """Decode prompts with verifier and draft; results are in the order of the prompts.

    Args:
        model: The verifier, a causal language model of transformers in eval mode.
        draft: speculators' EAGLE-3 model, trained on states of `layer_ids`.
        prompts: Token ids, the generation prompt of the chat template included.
        layer_ids: Layers whose inputs the draft reads, in its order.
        max_new_tokens: Tokens after which a row stops.
        draft_tokens: Tokens N the draft proposes in a round.
        eos_token_ids: Tokens that end a row; the end token is part of its text.
        batch_size: Rows decoded together; it does not change the result beyond rounding.
        progress: Called after each round with the number of tokens it brought.

    Raises:
        ValueError: nothing to decode, a length the verifier cannot hold, or a verifier whose layers
            keep no keys and values by place (recurrent or chunked attention, a short window).
    """
    _check(model, prompts, max_new_tokens=max_new_tokens, draft_tokens=draft_tokens)
    by_length = sorted(range(len(prompts)), key=lambda prompt: len(prompts[prompt]))
    decoded: dict[int, DecodedPrompt] = {}
    with torch.inference_mode(), StateHooks(model, layer_ids) as hooks:
        for start in range(0, len(by_length), batch_size):
            batch = by_length[start : start + batch_size]
            slots = max(len(prompts[prompt]) for prompt in batch) + max_new_tokens + draft_tokens
            decoding = _Decoding(
                verifier=_VerifierRunner(model, hooks, rows=len(batch), slots=slots),
                draft=DraftRunner(draft, rows=len(batch), slots=slots),
                rows=[_Row(max_new_tokens, frozenset(eos_token_ids)) for _ in batch],
                progress=progress or (lambda _: None),
            )
            results = decoding.run([prompts[prompt] for prompt in batch], draft_tokens=draft_tokens)
            decoded.update(zip(batch, results, strict=True))
    return [decoded[prompt] for prompt in range(len(prompts))]


@dataclass(slots=True)
class _Row:
    """New tokens of one prompt while it is being decoded."""

    max_new_tokens: int
    eos_token_ids: frozenset[int]
    token_ids: list[int] = field(default_factory=list)
    accepted_per_round: list[int] = field(default_factory=list)
    ties: int = 0
    done: bool = False

    def append(self, token_ids: Sequence[int], is_tie: Sequence[bool]) -> int:
        """Take tokens up to the end token or the limit; return how many were taken."""
        taken = 0
        for token_id, tie in zip(token_ids, is_tie, strict=True):
            self.token_ids.append(token_id)
            self.ties += tie
            taken += 1
            full = len(self.token_ids) == self.max_new_tokens
            if token_id in self.eos_token_ids or full:
                self.done = True
                break
        return taken


@dataclass(slots=True)
class _Decoding:
    """One batch of prompts; finished rows leave it."""

    verifier: "_VerifierRunner"
    draft: DraftRunner
    rows: list[_Row]
    progress: Callable[[int], None]

    def run(self, prompts: Sequence[Sequence[int]], *, draft_tokens: int) -> list[DecodedPrompt]:
        """Decode the batch to its end."""
        all_rows = list(self.rows)
        shifted, choice, aux = self._read(prompts)
        counts = torch.tensor([len(prompt) for prompt in prompts], device=choice.ids.device)
        self._take(choice, torch.zeros_like(counts))
        last = choice.ids[:, 0]  # [B]
        while True:
            order = survivors([not row.done for row in self.rows])
            if len(order) < len(self.rows):
                self._keep(order)
                shifted, aux, counts, last = (t[order] for t in (shifted, aux, counts, last))
            if not order:
                break
            states = self.draft.extend(shifted, aux, counts=counts)  # [B, H]
            proposed = self.draft.propose(states, count=draft_tokens)  # [B, N]
            block = torch.cat([last[:, None], proposed], dim=1)  # [B, 1 + N]
            choice, aux = self.verifier.verify(block)
            agreed = choice.ids[:, :-1] == proposed
            accepted = agreed.long().cumprod(dim=1).sum(dim=1)  # [B]
            self.verifier.advance(accepted + 1)
            for row, count in zip(self.rows, accepted.tolist(), strict=True):
                row.accepted_per_round.append(count)
            self._take(choice, accepted)
            shifted, counts = choice.ids, accepted + 1
            last = choice.ids.gather(1, accepted[:, None])[:, 0]
        return [DecodedPrompt(row.token_ids, row.accepted_per_round, row.ties) for row in all_rows]

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, "_Choice", Tensor]:
        """Read the prompts: the draft's first tokens [B, S], the first choice [B, 1], states."""
        choice, aux = self.verifier.prefill(prompts)
        shifted = torch.zeros(aux.shape[:2], dtype=torch.long, device=aux.device)
        for row, prompt in enumerate(prompts):
            shifted[row, : len(prompt) - 1] = torch.tensor(prompt[1:], dtype=torch.long)
            shifted[row, len(prompt) - 1] = choice.ids[row, 0]
        return shifted, choice, aux

    def _take(self, choice: "_Choice", accepted: Tensor) -> None:
        """Give each row its accepted tokens and the verifier's own one after them."""
        taken = 0
        columns = (choice.ids.tolist(), choice.is_tie.tolist(), accepted.tolist())
        for row, ids, ties, count in zip(self.rows, *columns, strict=True):
            taken += row.append(ids[: count + 1], ties[: count + 1])
        self.progress(taken)

    def _keep(self, order: list[int]) -> None:
        self.rows = [self.rows[row] for row in order]
        self.draft.keep(order)
        self.verifier.keep(order)


@dataclass(frozen=True, slots=True)
class _Choice:
    """The verifier's best token after each of Q tokens, and whether rounding decided it; [B, Q]."""

    ids: Tensor
    is_tie: Tensor


class _VerifierRunner:
    """The verifier with a slot cache of B rows; rejected tokens are written over."""

    def __init__(self, model: PreTrainedModel, hooks: StateHooks, *, rows: int, slots: int) -> None:
        parts: Any = model  # transformers gives these two methods no types
        self._decoder: nn.Module = parts.get_decoder()
        self._head: nn.Linear = parts.get_output_embeddings()
        config = model.config.get_text_config()
        # Attention sinks and soft-capped scores exist in transformers' "eager" alone: it stays.
        self._attention = nullcontext if config._attn_implementation == "eager" else attend_to_slots
        self._config = config
        self._hooks = hooks
        self._cache = SlotCache(rows, slots)
        self._read = torch.zeros(rows, dtype=torch.long, device=model.device)

    def prefill(self, prompts: Sequence[Sequence[int]]) -> tuple[_Choice, Tensor]:
        """Read the prompts; return the first choice [B, 1] and the states [B, S, A * H]."""
        lengths = torch.tensor([len(prompt) for prompt in prompts], device=self._read.device)
        longest = int(lengths.max())
        padded = torch.tensor([[*p, *[0] * (longest - len(p))] for p in prompts])
        places = torch.arange(longest, device=lengths.device)[None]  # [1, S]: causal is enough
        hidden, aux = self._forward(padded.to(lengths.device), places)
        self._read = lengths
        ends = hidden[torch.arange(len(prompts), device=lengths.device), lengths - 1]  # [B, H]
        return self._choose(ends[:, None]), aux

    def verify(self, block: Tensor) -> tuple[_Choice, Tensor]:
        """Read a block [B, 1 + N] after what is read; return its choices and states."""
        places = self._read[:, None] + torch.arange(block.shape[1], device=block.device)
        hidden, aux = self._forward(block, places)
        return self._choose(hidden), aux

    def advance(self, counts: Tensor) -> None:
        """Count the first `counts` [B] tokens of the last block as read."""
        self._read = self._read + counts

    def keep(self, order: list[int]) -> None:
        self._cache.keep(order)
        self._read = self._read[order]

    def _forward(self, token_ids: Tensor, places: Tensor) -> tuple[Tensor, Tensor]:
        """[B, Q] tokens -> normed last states [B, Q, H] and captured states [B, Q, A * H]."""
        used = self._cache.write_at(places.expand(token_ids.shape))
        with self._attention(self._config):
            hidden: Tensor = self._decoder(
                input_ids=token_ids,
                position_ids=places,
                attention_mask=slot_mask(places, used=used, dtype=self._head.weight.dtype),
                past_key_values=self._cache,
                use_cache=True,
            ).last_hidden_state
        layers, _last = self._hooks.take()
        device = self._read.device  # layers may lie on several devices
        return hidden, torch.cat([layer.to(device) for layer in layers], dim=-1)

    def _choose(self, hidden: Tensor) -> _Choice:
        """[B, Q, H] -> best tokens [B, Q]; a second maximum shows ties, cheaper than topk."""
        logits = self._head(hidden)  # [B, Q, V]
        best, ids = logits.max(dim=-1)
        second = logits.scatter_(2, ids[..., None], float("-inf")).amax(dim=-1)
        is_tie = best - second <= rounding_margin(logits.dtype) * best.abs()
        return _Choice(ids.to(self._read.device), is_tie)


def _check(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    draft_tokens: int,
) -> None:
    """Refuse what could not be decoded exactly."""
    if not prompts or min(len(prompt) for prompt in prompts) == 0:
        raise ValueError("every prompt needs at least one token, and there must be a prompt")
    if max_new_tokens < 1 or draft_tokens < 1:
        raise ValueError(
            f"max_new_tokens {max_new_tokens} and draft_tokens {draft_tokens} must be at least 1"
        )
    config = model.config.get_text_config()
    other = set(getattr(config, "layer_types", None) or []) - ROW_ATTENTION
    if other:
        raise ValueError(
            f"layers of kind {', '.join(sorted(other))} keep no keys and values by place; "
            "measure the acceptance of this verifier on a server"
        )
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    _check_length(longest, config.max_position_embeddings, what="position limit")
    if getattr(config, "use_sliding_window", True) and getattr(config, "sliding_window", None):
        _check_length(longest + draft_tokens, config.sliding_window, what="attention window")


def _check_length(tokens: int, limit: int, *, what: str) -> None:
    if tokens > limit:
        raise ValueError(
            f"{tokens} tokens of the longest prompt and its answer exceed the verifier's {what} "
            f"of {limit}; evaluate shorter prompts or lower max_new_tokens"
        )
