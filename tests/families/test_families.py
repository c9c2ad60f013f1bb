"""Every family goes the whole way: facts, states, a training step, the speculator, and its own greedy text."""

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import pytest
import torch
from transformers import PreTrainedModel

from tasks.eagle3.canary import check_states, run_verifier
from tasks.eagle3.draft import (
    Eagle3DraftModel,
    load_speculator,
    save_speculator,
    trainable_parameters,
)
from tasks.eagle3.head import VerifierHead, read_head
from tasks.eagle3.speculative import speculative_greedy
from tasks.eagle3.training_step import training_forward
from tasks.eagle3.verifier import VerifierError, VerifierFacts, read_facts
from tasks.eagle3.verifier_runner import keeps_places
from tasks.engines.loading import load_verifier_model
from tasks.engines.transformers import CaptureEngine
from tasks.jobs.export import FROM_VERIFIER, compare
from tests.families.checkpoints import HIDDEN, LAYERS, SIZES
from tests.families.drafting import LAYER_IDS, TTT_STEPS, make_draft, states_of, train
from tests.families.nested import build_llama4
from tests.families.readme import README, with_table
from tests.families.table import FAMILIES, REFUSED, Family, RefusedFamily
from tests.tiny_models import EOS_ID, VOCAB_SIZE

NEW_TOKENS = 20
PROMPTS = [[5, 6, 7], [11], [90, 3, 14, 215, 92, 65, 35, 8, 41, 120], [8, 9, 7, 9], [300, 17]]


@dataclass
class Checkpoint:
    """A family's tiny checkpoint, the model it was written from, and what the product makes of it."""

    family: Family
    directory: Path
    original: PreTrainedModel

    @cached_property
    def model(self) -> PreTrainedModel:
        return load_verifier_model(self.directory, trust_remote_code=self.family.trust_remote_code)

    @cached_property
    def facts(self) -> VerifierFacts:
        return read_facts(self.directory)

    @cached_property
    def head(self) -> VerifierHead:
        return read_head(self.directory, self.facts)

    @cached_property
    def texts(self) -> list[list[int]]:
        """What transformers' own generate writes after each prompt, by the original model."""
        return [greedy_alone(self.original, prompt) for prompt in PROMPTS]

    def draft(self) -> Eagle3DraftModel:
        return make_draft(self.directory, self.facts, self.head)


@pytest.fixture(scope="module", params=FAMILIES, ids=lambda family: family.name)
def checkpoint(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Checkpoint:
    family: Family = request.param
    if family.package:
        pytest.importorskip(family.package)
    directory = tmp_path_factory.mktemp("family")
    return Checkpoint(family, directory, family.build(directory))


def greedy_alone(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    ids = model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.long),
        do_sample=False,
        max_new_tokens=NEW_TOKENS,
        eos_token_id=None,
        pad_token_id=0,
    )
    return ids[0, len(prompt) :].tolist()


def test_the_facts_are_those_of_the_language_model(checkpoint: Checkpoint) -> None:
    facts = checkpoint.facts

    assert (facts.hidden_size, facts.num_hidden_layers) == (HIDDEN, LAYERS)
    assert (facts.vocab_size, facts.max_position_embeddings) == (VOCAB_SIZE, 512)
    assert facts.eos_token_ids == (EOS_ID,)
    assert facts.tied == checkpoint.family.tied
    embedding = checkpoint.original.get_input_embeddings().weight
    assert torch.equal(checkpoint.head.embed, embedding)


def test_the_loaded_model_is_the_one_that_was_saved(checkpoint: Checkpoint) -> None:
    ids = torch.tensor([PROMPTS[2] + checkpoint.texts[2]])
    with torch.inference_mode():
        expected = checkpoint.original(ids).logits
        torch.testing.assert_close(checkpoint.model(ids).logits, expected, rtol=0, atol=1e-5)


def test_captured_states_pass_the_canary_of_the_saved_model(checkpoint: Checkpoint) -> None:
    samples = [[*p, *t] for p, t in zip(PROMPTS, checkpoint.texts, strict=True)]
    engine = CaptureEngine(checkpoint.model, LAYER_IDS, store_dtype=torch.float32)

    captured = engine.capture(samples, tokens_per_batch=64)

    for sample, states in zip(samples, captured.split(list(map(len, samples))), strict=True):
        (own,) = run_verifier(checkpoint.original, [sample])
        score = check_states(own, checkpoint.head, states.aux, states.last, LAYER_IDS)
        assert score.argmax_agreement == 1.0
        assert max(score.aux_error) < 1e-4


def test_a_training_step_reaches_every_trainable_tensor(checkpoint: Checkpoint) -> None:
    draft = checkpoint.draft()
    batch = states_of(checkpoint.model, [PROMPTS[2] + checkpoint.texts[2]])

    transform = checkpoint.head.transform
    loss = training_forward(draft, batch, ttt_steps=TTT_STEPS, transform=transform).loss
    loss.backward()

    assert torch.isfinite(loss)
    for name, weight in trainable_parameters(draft).items():
        assert weight.grad is not None, name
        assert torch.isfinite(weight.grad).all(), name
        assert weight.grad.abs().max() > 0, name


def test_the_speculator_comes_back_from_its_file_as_it_was(
    checkpoint: Checkpoint, tmp_path: Path
) -> None:
    draft = checkpoint.draft()
    save_speculator(draft, tmp_path, dtype=torch.float32)

    loaded = load_speculator(tmp_path)

    plain = checkpoint.head.transform.plain
    compared = compare(draft, loaded, dtype=torch.float32, plain_head=plain)
    assert compared == len(draft.state_dict()) - (0 if plain else len(FROM_VERIFIER))


def test_speculative_decoding_writes_the_verifiers_own_text(checkpoint: Checkpoint) -> None:
    check_own_text(checkpoint)


def test_llama_4_writes_its_own_text_where_queries_scale_by_position(tmp_path: Path) -> None:
    family = next(family for family in FAMILIES if family.name == "Llama 4")
    checkpoint = Checkpoint(family, tmp_path, build_llama4(tmp_path, floor_scale=8))
    assert not keeps_places(checkpoint.model, slots=NEW_TOKENS)
    check_own_text(checkpoint)


def check_own_text(checkpoint: Checkpoint) -> None:
    draft = checkpoint.draft()
    whole = [[*p, *t] for p, t in zip(PROMPTS, checkpoint.texts, strict=True)]
    train(draft, states_of(checkpoint.model, whole), checkpoint.head.transform, steps=40)

    decoded = speculative_greedy(
        checkpoint.model,
        draft.eval(),
        PROMPTS,
        layer_ids=LAYER_IDS,
        max_new_tokens=NEW_TOKENS,
        draft_tokens=3,
        eos_token_ids=[],
    )

    assert [row.token_ids for row in decoded] == checkpoint.texts
    # The draft was right here and wrong there, so rows went apart and rejected tokens were taken back.
    accepted = {count for row in decoded for count in row.accepted_per_round}
    assert 0 in accepted
    assert len(accepted) > 1
    assert len({token for text in checkpoint.texts for token in text}) > 12


@pytest.mark.parametrize("family", REFUSED, ids=lambda family: family.name)
def test_a_family_without_a_known_head_is_refused_by_its_config_alone(
    family: RefusedFamily, tmp_path: Path
) -> None:
    sizes = SIZES | {"rms_norm_eps": 1e-6}
    inner = {"text_config": sizes | family.config.get("text_config", {})}
    nested = "text_config" in family.config
    config = family.config | inner if nested else sizes | family.config
    (tmp_path / "config.json").write_text(json.dumps(config))

    with pytest.raises(VerifierError, match=family.error):
        read_facts(tmp_path)


def test_the_readme_has_the_table_of_families() -> None:
    text = README.read_text()
    assert text == with_table(text), "run make docs"
