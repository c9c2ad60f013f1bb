"""Speculative decoding gives the verifier's own greedy text, whatever the draft proposes."""

import copy
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import PreTrainedModel

from tasks.eagle3.acceptance import DecodedPrompt
from tasks.eagle3.draft import Eagle3DraftModel
from tasks.eagle3.speculative import speculative_greedy
from tasks.eagle3.verifier_runner import keeps_places
from tests.tiny_drafts import LAYER_IDS, make_draft, train, training_batch
from tests.tiny_models import VOCAB_SIZE, load_model, make_llama, make_qwen3

NEW_TOKENS = 16
PROMPTS = [[5, 6, 7], [11], [90, 3, 14, 215, 92, 65, 35], [8, 9, 7, 9], [3, 300]]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> PreTrainedModel:
    return load_model(make_llama(tmp_path_factory.mktemp("llama")))


@pytest.fixture(scope="module")
def texts(verifier: PreTrainedModel) -> list[list[int]]:
    """The verifier's own new tokens, longer than the tests decode."""
    return [greedy_alone(verifier, prompt, tokens=NEW_TOKENS + 6) for prompt in PROMPTS]


@pytest.fixture(scope="module")
def drafts(verifier: PreTrainedModel, texts: list[list[int]]) -> dict[str, Eagle3DraftModel]:
    """Drafts that are right never, sometimes, and (the texts learnt by heart) always."""
    whole = [[*prompt, *text] for prompt, text in zip(PROMPTS, texts, strict=True)]
    draft = make_draft(verifier, draft_vocab_size=VOCAB_SIZE)
    steps = train(draft, training_batch(verifier, whole), ttt_steps=5)
    never = copy.deepcopy(draft)
    list(islice(steps, 30))
    sometimes = copy.deepcopy(draft)
    list(islice(steps, 60))
    return {"never": never, "sometimes": sometimes, "always": draft}


def decode(
    model: PreTrainedModel, draft: Eagle3DraftModel, prompts: list[list[int]], **changes: Any
) -> list[DecodedPrompt]:
    settings: dict[str, Any] = {
        "layer_ids": LAYER_IDS,
        "max_new_tokens": NEW_TOKENS,
        "draft_tokens": 3,
        "eos_token_ids": [],
    }
    return speculative_greedy(model, draft, prompts, **(settings | changes))


def greedy_alone(
    model: PreTrainedModel, prompt: list[int], *, tokens: int, eos: list[int] | None = None
) -> list[int]:
    """New tokens of one prompt by transformers' own generate."""
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=tokens,
        eos_token_id=eos or None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


@pytest.mark.parametrize("draft_tokens", [1, 2, 3, 4])
@pytest.mark.parametrize("name", ["never", "sometimes", "always"])
def test_the_text_is_the_verifiers_own_whatever_the_draft(
    verifier: PreTrainedModel,
    drafts: dict[str, Eagle3DraftModel],
    texts: list[list[int]],
    name: str,
    draft_tokens: int,
) -> None:
    decoded = decode(verifier, drafts[name], PROMPTS, draft_tokens=draft_tokens)
    assert [prompt.token_ids for prompt in decoded] == [text[:NEW_TOKENS] for text in texts]


def test_a_draft_that_knows_the_text_is_accepted_in_full(
    verifier: PreTrainedModel, drafts: dict[str, Eagle3DraftModel]
) -> None:
    decoded = decode(verifier, drafts["always"], PROMPTS, draft_tokens=4)
    # 16 tokens: one from the prompt, then 3 rounds of 4 accepted ones and the verifier's own
    assert [prompt.accepted_per_round for prompt in decoded] == [[4, 4, 4]] * len(PROMPTS)


def test_a_draft_that_is_sometimes_right_leaves_rows_of_different_length(
    verifier: PreTrainedModel, drafts: dict[str, Eagle3DraftModel]
) -> None:
    decoded = decode(verifier, drafts["sometimes"], PROMPTS, draft_tokens=4)
    counts = [count for prompt in decoded for count in prompt.accepted_per_round]
    assert 0 in counts
    assert max(counts) > 1
    assert len({prompt.rounds for prompt in decoded}) > 1


def test_a_draft_with_a_vocabulary_of_its_own_proposes_target_ids(
    verifier: PreTrainedModel, texts: list[list[int]]
) -> None:
    draft = make_draft(verifier, draft_vocab_size=40)
    decoded = decode(verifier, draft, PROMPTS)
    assert [prompt.token_ids for prompt in decoded] == [text[:NEW_TOKENS] for text in texts]


def test_an_end_token_inside_an_accepted_block_ends_the_text(
    verifier: PreTrainedModel, drafts: dict[str, Eagle3DraftModel], texts: list[list[int]]
) -> None:
    end = texts[0][7]  # third token of the second accepted block of 5
    alone = greedy_alone(verifier, PROMPTS[0], tokens=NEW_TOKENS, eos=[end])
    decoded = decode(
        verifier, drafts["always"], PROMPTS[:1], draft_tokens=4, eos_token_ids=[end, 319]
    )
    assert decoded[0].token_ids == alone
    assert decoded[0].token_ids[-1] == end
    assert len(alone) == 1 + texts[0].index(end)
    # counted as a server counts: before the text is cut
    assert decoded[0].accepted_per_round == [4] * decoded[0].rounds


def test_a_first_token_that_ends_the_text_needs_no_round(
    verifier: PreTrainedModel, drafts: dict[str, Eagle3DraftModel], texts: list[list[int]]
) -> None:
    decoded = decode(verifier, drafts["sometimes"], PROMPTS, eos_token_ids=[texts[1][0]])
    assert decoded[1] == DecodedPrompt([texts[1][0]], [], 0)
    assert decoded[2].rounds > 0


def test_the_number_of_rows_decoded_together_changes_nothing(
    verifier: PreTrainedModel, drafts: dict[str, Eagle3DraftModel]
) -> None:
    together = decode(verifier, drafts["sometimes"], PROMPTS)
    assert decode(verifier, drafts["sometimes"], PROMPTS, batch_size=1) == together
    assert decode(verifier, drafts["sometimes"], PROMPTS, batch_size=2) == together


def test_a_verifier_with_other_attention_and_norms_gives_its_own_text(tmp_path: Path) -> None:
    model = load_model(make_qwen3(tmp_path))
    draft = make_draft(model, draft_vocab_size=64, arch="qwen3")
    decoded = decode(model, draft, PROMPTS)
    alone = [greedy_alone(model, prompt, tokens=NEW_TOKENS) for prompt in PROMPTS]
    assert [prompt.token_ids for prompt in decoded] == alone


def test_the_verifier_is_left_as_it_was(
    verifier: PreTrainedModel, drafts: dict[str, Eagle3DraftModel]
) -> None:
    before = verifier.config._attn_implementation
    decode(verifier, drafts["never"], PROMPTS[:1], max_new_tokens=2)
    assert verifier.config._attn_implementation == before
    assert drafts["never"].config.transformer_layer_config._attn_implementation == "eager"
    hooks = [len(module._forward_pre_hooks) for module in verifier.modules()]
    assert sum(hooks) == 0


def test_progress_adds_up_to_the_tokens_of_all_texts(
    verifier: PreTrainedModel, drafts: dict[str, Eagle3DraftModel]
) -> None:
    seen: list[int] = []
    decode(verifier, drafts["sometimes"], PROMPTS, progress=seen.append, batch_size=2)
    assert sum(seen) == len(PROMPTS) * NEW_TOKENS


def test_ties_of_the_two_best_logits_are_counted(
    verifier: PreTrainedModel, drafts: dict[str, Eagle3DraftModel]
) -> None:
    twin = copy.deepcopy(verifier)
    head = twin.get_output_embeddings().weight.data
    head[200:300] = head[100:200]  # token i + 100 is as good as token i
    decoded = decode(twin, drafts["never"], PROMPTS)
    expected = [sum(100 <= i < 300 for i in prompt.token_ids) for prompt in decoded]
    assert [prompt.ties for prompt in decoded] == expected
    assert sum(expected) > 0


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"max_new_tokens": 600}, "position limit of 512; evaluate shorter prompts"),
        ({"max_new_tokens": 0}, "max_new_tokens 0 and draft_tokens 3 must be at least 1"),
        ({"prompts": [[1], []]}, "every prompt needs at least one token"),
        ({"prompts": []}, "there must be a prompt"),
    ],
)
def test_what_cannot_be_decoded_is_refused(
    verifier: PreTrainedModel,
    drafts: dict[str, Eagle3DraftModel],
    changes: dict[str, Any],
    message: str,
) -> None:
    prompts = changes.pop("prompts", PROMPTS)
    with pytest.raises(ValueError, match=message):
        decode(verifier, drafts["never"], prompts, **changes)


def test_a_text_at_which_the_long_rope_changes_is_refused(
    verifier: PreTrainedModel,
    drafts: dict[str, Eagle3DraftModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    longest = max(map(len, PROMPTS)) + NEW_TOKENS + 3
    rope = {"rope_type": "longrope", "original_max_position_embeddings": longest}
    monkeypatch.setattr(verifier.config, "rope_parameters", rope)
    decode(verifier, drafts["never"], PROMPTS)
    rope["original_max_position_embeddings"] -= 1
    with pytest.raises(ValueError, match=r"23 tokens .* and 3 draft tokens exceed 25"):
        decode(verifier, drafts["never"], PROMPTS)


def test_reading_each_row_from_its_start_gives_what_the_cache_gives(
    verifier: PreTrainedModel,
    drafts: dict[str, Eagle3DraftModel],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cached = decode(verifier, drafts["sometimes"], PROMPTS)
    monkeypatch.setattr(verifier, "_is_stateful", True, raising=False)
    assert not keeps_places(verifier, slots=40)
    assert decode(verifier, drafts["sometimes"], PROMPTS) == cached


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("layer_types", ["full_attention", "linear_attention"]),
        ("attn_temperature_tuning", True),  # Llama-4, from floor_scale tokens on
    ],
)
def test_a_model_that_remembers_more_than_keys_by_place_gets_no_cache(
    verifier: PreTrainedModel, monkeypatch: pytest.MonkeyPatch, name: str, value: Any
) -> None:
    assert keeps_places(verifier, slots=40)
    monkeypatch.setattr(verifier.config, "floor_scale", 40, raising=False)
    monkeypatch.setattr(verifier.config, name, value, raising=False)
    assert not keeps_places(verifier, slots=40)
