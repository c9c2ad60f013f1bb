"""What speculative decoding did: acceptance length, looping, and differences from plain decoding.

Acceptance is counted as vLLM counts it (its `spec_decode_*` metrics), so that the two can be
compared: a round is one verification, a round's accepted tokens are counted before the text is cut
at its end or at its limit, and the acceptance length is 1 + accepted / rounds. The 1 is the
verifier's own token, which each round yields whatever the draft proposed: a draft that is never
right has an acceptance length of 1.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import nn

# Measured on SmolLM2-135M, rows in a batch against each row alone: up to 22 in fp32, 3 in bf16.
ROUNDING_STEPS = {torch.float32: 64.0, torch.float16: 4.0, torch.bfloat16: 4.0}
"""Two logits closer than this many eps * |best logit| are told apart by rounding alone."""


@dataclass(frozen=True, slots=True)
class DecodedPrompt:
    """The new tokens of one prompt and how they came about.

    Attributes:
        token_ids: New tokens, the end token included where one was met.
        accepted_per_round: Draft tokens accepted in each verification.
        ties: New tokens for which the verifier's two best logits tied within rounding.
    """

    token_ids: list[int]
    accepted_per_round: list[int]
    ties: int

    @property
    def rounds(self) -> int:
        """Verifications; the first token comes from reading the prompt and needs none."""
        return len(self.accepted_per_round)

    @property
    def acceptance_length(self) -> float | None:
        """Tokens a verification yields; None when the first token was the only one."""
        return 1 + sum(self.accepted_per_round) / self.rounds if self.rounds else None


@dataclass(frozen=True, slots=True)
class AcceptanceSummary:
    """Acceptance over all prompts.

    Attributes:
        acceptance_length: 1 + accepted / rounds, over all rounds of all prompts.
        per_position: Share of rounds in which the draft's token j (and all before it) was accepted.
        per_prompt: Acceptance length of each prompt; None where it had no round.
        rounds: Verifications of all prompts.
        tokens: New tokens of all prompts.
        ties: New tokens that rounding decided.
        distinct_bigrams: Different pairs of neighbouring tokens by all pairs, within each prompt.
            Looping text is easy to draft: a high acceptance length at a low share says little.
    """

    acceptance_length: float
    per_position: tuple[float, ...]
    per_prompt: tuple[float | None, ...]
    rounds: int
    tokens: int
    ties: int
    distinct_bigrams: float


def summarize(decoded: Sequence[DecodedPrompt], *, draft_tokens: int) -> AcceptanceSummary:
    """Summarize decoded prompts; `draft_tokens` is what the draft proposed in each round.

    Raises:
        ValueError: no prompt had a round, or a round accepted more than was proposed.
    """
    accepted = [count for prompt in decoded for count in prompt.accepted_per_round]
    if not accepted:
        raise ValueError(
            f"no verification in {len(decoded)} prompts, so acceptance cannot be measured; "
            "evaluate more prompts or raise max_new_tokens above 1"
        )
    if max(accepted) > draft_tokens:
        raise ValueError(f"a round accepted {max(accepted)} tokens of {draft_tokens} proposed")
    rounds = len(accepted)
    return AcceptanceSummary(
        acceptance_length=1 + sum(accepted) / rounds,
        per_position=tuple(
            sum(count > place for count in accepted) / rounds for place in range(draft_tokens)
        ),
        per_prompt=tuple(prompt.acceptance_length for prompt in decoded),
        rounds=rounds,
        tokens=sum(len(prompt.token_ids) for prompt in decoded),
        ties=sum(prompt.ties for prompt in decoded),
        distinct_bigrams=_distinct_bigrams(decoded),
    )


def _distinct_bigrams(decoded: Sequence[DecodedPrompt]) -> float:
    pairs = [list(zip(p.token_ids, p.token_ids[1:], strict=False)) for p in decoded]
    total = sum(len(row) for row in pairs)
    return sum(len(set(row)) for row in pairs) / total if total else 1.0


@dataclass(frozen=True, slots=True)
class TextDifference:
    """The first new token in which two decodings of one prompt differ; None where a text ended."""

    prompt: int
    position: int
    reference_id: int | None
    decoded_id: int | None


def compare_texts(
    reference: Sequence[Sequence[int]], decoded: Sequence[Sequence[int]]
) -> list[TextDifference]:
    """First difference of each prompt that has one; after it the two texts differ by right.

    Args:
        reference: New tokens of each prompt, decoded without a draft.
        decoded: New tokens of each prompt, decoded with one.

    Raises:
        ValueError: the two do not have the same number of prompts.
    """
    if len(reference) != len(decoded):
        raise ValueError(
            f"{len(reference)} reference texts against {len(decoded)} decoded ones; "
            "decode the same prompts both ways"
        )
    differences = []
    for prompt, (plain, drafted) in enumerate(zip(reference, decoded, strict=True)):
        for position in range(max(len(plain), len(drafted))):
            plain_id = plain[position] if position < len(plain) else None
            drafted_id = drafted[position] if position < len(drafted) else None
            if plain_id != drafted_id:
                differences.append(TextDifference(prompt, position, plain_id, drafted_id))
                break
    return differences


@dataclass(frozen=True, slots=True)
class Margin:
    """The verifier's two best tokens after some text, and the distance of their logits."""

    best_id: int
    second_id: int
    best_logit: float
    margin: float
    is_tie: bool


def margin_at(model: nn.Module, token_ids: Sequence[int], *, position: int) -> Margin:
    """How clearly the verifier chose the token at `position`, from the tokens before it alone.

    Args:
        model: A causal language model of transformers.
        token_ids: Prompt and new tokens.
        position: Index into `token_ids` of the token in question, 1 to len(token_ids).

    Raises:
        ValueError: `position` has no token before it or lies beyond the end.
    """
    if not 1 <= position <= len(token_ids):
        raise ValueError(
            f"position {position} is outside 1 to {len(token_ids)}: a token is chosen "
            "after at least one other"
        )
    device = next(model.parameters()).device
    before = torch.tensor([list(token_ids[:position])], device=device)
    with torch.inference_mode():
        logits = model(before, logits_to_keep=1).logits[0, -1]
    (best, second), (best_id, second_id) = (pair.tolist() for pair in logits.topk(2))
    return Margin(
        best_id=best_id,
        second_id=second_id,
        best_logit=best,
        margin=best - second,
        is_tie=best - second <= rounding_margin(logits.dtype) * abs(best),
    )


def is_rounding(difference: TextDifference, margin: Margin) -> bool:
    """Whether a difference is two equally good tokens and not a fault of the decoding."""
    chosen = {difference.reference_id, difference.decoded_id}
    return margin.is_tie and chosen == {margin.best_id, margin.second_id}


def rounding_margin(dtype: torch.dtype) -> float:
    """Distance of two logits, by the size of the larger, that rounding in `dtype` can turn over."""
    return ROUNDING_STEPS.get(dtype, 4.0) * torch.finfo(dtype).eps
