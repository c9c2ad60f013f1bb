"""Greedy speculative decoding in this process: the draft's acceptance without a server.

B = rows, S = prompt tokens, N = draft tokens a round, A = captured layers, H = hidden size,
V = verifier vocabulary

A round: the draft proposes N tokens a row, the verifier reads them after the last token that it has
not read yet, and the row takes the verifier's best tokens up to and including the first that the
draft missed. In exact arithmetic that is the verifier's own greedy text, whatever the draft is.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from transformers import PreTrainedModel

from tasks.eagle3.acceptance import DecodedPrompt
from tasks.eagle3.draft_runner import DraftRunner
from tasks.eagle3.hidden_states import StateHooks, rope_switch
from tasks.eagle3.slot_cache import survivors
from tasks.eagle3.verifier_runner import Choice, VerifierRunner, make_runner

if TYPE_CHECKING:
    from tasks.eagle3.draft import Eagle3DraftModel


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
        ValueError: nothing to decode, a length the verifier cannot hold, or one at which its rope changes.
    """
    _check(model, prompts, max_new_tokens=max_new_tokens, draft_tokens=draft_tokens)
    by_length = sorted(range(len(prompts)), key=lambda prompt: len(prompts[prompt]))
    decoded: dict[int, DecodedPrompt] = {}
    with torch.inference_mode(), StateHooks(model, layer_ids) as hooks:
        for start in range(0, len(by_length), batch_size):
            batch = by_length[start : start + batch_size]
            slots = max(len(prompts[prompt]) for prompt in batch) + max_new_tokens + draft_tokens
            decoding = _Decoding(
                verifier=make_runner(model, hooks, rows=len(batch), slots=slots),
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

    verifier: VerifierRunner
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

    def _read(self, prompts: Sequence[Sequence[int]]) -> tuple[Tensor, Choice, Tensor]:
        """Read the prompts: the draft's first tokens [B, S], the first choice [B, 1], states."""
        choice, aux = self.verifier.prefill(prompts)
        shifted = torch.zeros(aux.shape[:2], dtype=torch.long, device=aux.device)
        for row, prompt in enumerate(prompts):
            shifted[row, : len(prompt) - 1] = torch.tensor(prompt[1:], dtype=torch.long)
            shifted[row, len(prompt) - 1] = choice.ids[row, 0]
        return shifted, choice, aux

    def _take(self, choice: Choice, accepted: Tensor) -> None:
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
    longest = max(len(prompt) for prompt in prompts) + max_new_tokens
    limit = config.max_position_embeddings
    if longest > limit:
        raise ValueError(
            f"{longest} tokens of the longest prompt and its answer exceed the verifier's position limit "
            f"of {limit}; evaluate shorter prompts or lower max_new_tokens"
        )
    switch = rope_switch(config)
    if switch is not None and longest + draft_tokens > switch:
        raise ValueError(
            f"{longest} tokens of the longest prompt and its answer and {draft_tokens} draft tokens exceed {switch}, "
            "where this verifier's long rope changes for all rows at once, so that its text would depend on the rows "
            "beside it; evaluate shorter prompts or lower max_new_tokens"
        )
