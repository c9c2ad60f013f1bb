"""The draft, run incrementally, computes what it computed in training."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tasks.eagle3.draft import Eagle3DraftModel
from tasks.eagle3.draft_runner import DraftRunner
from tests.tiny_drafts import LAYER_IDS, make_draft, training_batch
from tests.tiny_models import load_model, make_llama

STEPS = 4
TEXT = [17, 250, 3, 99, 99, 41, 310, 8, 123, 64]
VARIANTS: list[dict[str, Any]] = [
    {},
    {"arch": "qwen3"},
    {"norm_before_fc": True},
    {"fc_norm": True},
    {"norm_output": True, "norm_before_residual": True},
    {"num_layers": 2},
    {"layer_ids": [2, 5]},
]


def training_logits(draft: Eagle3DraftModel, batch: dict[str, Tensor]) -> Tensor:
    """Logits [STEPS, T, D] of the model's own forward: step k at i is k tokens ahead of entry i."""
    seen: list[Tensor] = []
    hook = draft.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0]))
    with torch.no_grad():
        draft(
            hidden_states=batch["hidden_states"],
            input_ids=batch["input_ids"],
            document_ids=batch["document_ids"],
            position_ids=batch["position_ids"],
            ttt_steps=STEPS,
        )
    hook.remove()
    return torch.stack(seen)


@pytest.mark.parametrize("variant", VARIANTS, ids=str)
@torch.no_grad()
def test_logits_equal_those_of_the_training_forward(
    tmp_path: Path, variant: dict[str, Any]
) -> None:
    model = load_model(make_llama(tmp_path))
    layer_ids = variant.get("layer_ids", LAYER_IDS)
    draft = make_draft(model, draft_vocab_size=48, **variant)
    batch = training_batch(model, [TEXT], layer_ids=layer_ids)
    expected = training_logits(draft, batch)
    # Row r has read entries 0 to r; then it is fed the true tokens in place of its own guesses.
    tokens = batch["input_ids"][0]  # [T]
    count = len(tokens)
    runner = DraftRunner(draft, rows=count, slots=count + STEPS)
    lengths = torch.arange(1, count + 1)
    states = runner.extend(
        tokens.expand(count, -1), batch["hidden_states"].expand(count, -1, -1), counts=lengths
    )
    for step in range(STEPS):
        known = range(count - step)  # rows whose true token is part of the text
        torch.testing.assert_close(
            runner.logits(states)[: len(known)], expected[step, : len(known)], rtol=1e-4, atol=1e-4
        )
        fed = torch.cat([tokens[step + 1 :], tokens.new_zeros(step + 1)])[:count]
        states = runner.guess(fed, states, ahead=step)


@torch.no_grad()
def test_guessed_entries_leave_no_trace_once_the_real_ones_are_read(tmp_path: Path) -> None:
    model = load_model(make_llama(tmp_path))
    draft = make_draft(model, draft_vocab_size=48)
    batch = training_batch(model, [TEXT])
    tokens, aux = batch["input_ids"], batch["hidden_states"]
    at_once = DraftRunner(draft, rows=1, slots=20)
    expected = at_once.extend(tokens, aux, counts=torch.tensor([9]))
    piecemeal = DraftRunner(draft, rows=1, slots=20)
    states = piecemeal.extend(tokens[:, :4], aux[:, :4], counts=torch.tensor([3]))  # 1 is padding
    piecemeal.propose(states, count=4)
    piecemeal.extend(tokens[:, 3:5], aux[:, 3:5], counts=torch.tensor([2]))
    states = piecemeal.extend(tokens[:, 5:], aux[:, 5:], counts=torch.tensor([4]))
    # read in one pass or in pieces, sums round in another order
    torch.testing.assert_close(states, expected, rtol=1e-4, atol=1e-4)


@torch.no_grad()
def test_proposals_follow_the_drafts_own_tokens_and_states(tmp_path: Path) -> None:
    model = load_model(make_llama(tmp_path))
    draft = make_draft(model, draft_vocab_size=48)
    assert draft.d2t is not None
    batch = training_batch(model, [TEXT])
    counts = torch.tensor([9])
    runner = DraftRunner(draft, rows=1, slots=20)
    states = runner.extend(batch["input_ids"], batch["hidden_states"], counts=counts)
    proposed = runner.propose(states, count=3)[0].tolist()
    chain = []
    for ahead in range(3):
        draft_id = int(runner.logits(states).argmax())
        chain.append(draft_id + int(draft.d2t[draft_id]))
        states = runner.guess(torch.tensor([chain[-1]]), states, ahead=ahead)
    assert proposed == chain
    assert draft.t2d is not None
    assert draft.t2d[proposed].all()


def test_a_window_shorter_than_the_text_is_refused(tmp_path: Path) -> None:
    draft = make_draft(load_model(make_llama(tmp_path)), draft_vocab_size=48)
    draft.uses_sliding_window_attn, draft.sliding_window = True, 16
    with pytest.raises(ValueError, match="20 slots exceed the draft's attention window of 16"):
        DraftRunner(draft, rows=1, slots=20)
