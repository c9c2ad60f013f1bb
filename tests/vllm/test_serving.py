"""vLLM serves what Outrider exports: same texts, and the draft accepted as often as we count it.

`make test-vllm`, or `sh tests/vllm/install.sh` and `pytest -m vllm`. A server takes a minute to
start on 2 cores. OUTRIDER_VLLM_PYTHON names the Python of another environment.
"""

import json
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedModel

from tasks.eagle3.acceptance import compare_texts
from tasks.eagle3.draft import load_speculator, save_speculator
from tasks.eagle3.speculative import speculative_greedy
from tasks.engines.generation import greedy_generate
from tests.tiny_drafts import make_draft, train, training_batch
from tests.tiny_models import EOS_ID, VOCAB_SIZE, load_model, make_llama
from tests.vllm.server import REPOSITORY, Served, serve, vllm_python

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slow,
    pytest.mark.skipif(
        not vllm_python().exists(),
        reason=f"no vLLM at {vllm_python()}; install it: sh tests/vllm/install.sh",
    ),
]

PROMPTS = [[5, 6, 7], [11, 4], [90, 3, 14, 215, 92, 65, 35], [8, 9, 7, 9], [3, 300, 60, 61, 62]]
NEW_TOKENS = 48
DRAFT_TOKENS = 3
TRAINING_STEPS = 30  # right sometimes: a draft that always or never is hides differences

TINY_TOLERANCE = 0.02
"""Of the acceptance length, same file on both sides, fp32 arithmetic on both: only a draft token whose two best
logits tie within rounding may differ. 3 tokens in some 160 rounds."""

DEMO_TOLERANCE = 0.03
"""The demo counts with the trained fp32 weights, vLLM with the file's bf16: about 1 token in 30 rounds."""


@dataclass(frozen=True, slots=True)
class Verifier:
    """A tiny verifier and its own greedy texts."""

    directory: Path
    model: PreTrainedModel
    texts: list[list[int]]


@pytest.fixture(scope="module")
def verifier(tmp_path_factory: pytest.TempPathFactory) -> Verifier:
    # 32 is the least head size that vLLM's attention has on CPUs
    directory = make_llama(tmp_path_factory.mktemp("verifier"), head_dim=32)
    model = load_model(directory)
    texts = greedy_generate(
        model, PROMPTS, max_new_tokens=NEW_TOKENS, eos_token_ids=[EOS_ID], pad_token_id=EOS_ID
    )
    return Verifier(directory, model, texts)


def export_trained(
    verifier: Verifier,
    directory: Path,
    *,
    layer_ids: Sequence[int],
    draft_vocab_size: int,
    settings: dict[str, Any],
) -> None:
    """Write the speculator of a draft that was trained a little on the verifier's own texts."""
    draft = make_draft(
        verifier.model, draft_vocab_size=draft_vocab_size, layer_ids=layer_ids, **settings
    )
    whole = [[*prompt, *text] for prompt, text in zip(PROMPTS, verifier.texts, strict=True)]
    batch = training_batch(verifier.model, whole, layer_ids=layer_ids)
    list(islice(train(draft, batch, ttt_steps=DRAFT_TOKENS), TRAINING_STEPS))
    save_speculator(draft, directory)


def decode_here(verifier: Verifier, speculator: Path, layer_ids: Sequence[int]) -> Served:
    """Decode by our own decoder from the exported file, in fp32 as the server does."""
    decoded = speculative_greedy(
        verifier.model,
        load_speculator(speculator).float(),
        PROMPTS,
        layer_ids=layer_ids,
        max_new_tokens=NEW_TOKENS,
        draft_tokens=DRAFT_TOKENS,
        eos_token_ids=[EOS_ID],
    )
    rounds = [count for prompt in decoded for count in prompt.accepted_per_round]
    accepted = [sum(count > place for count in rounds) for place in range(DRAFT_TOKENS)]
    return Served([prompt.token_ids for prompt in decoded], len(rounds), accepted)


@pytest.mark.parametrize(
    ("layer_ids", "draft_vocab_size", "settings"),
    [
        ([1, 4, 6], 200, {"norm_before_fc": True, "norm_before_residual": True}),
        ([2, 5, 7], VOCAB_SIZE, {"fc_norm": True, "norm_output": True, "num_layers": 2}),
        ([1, 3, 5, 6], 200, {}),
        ([1, 3, 5, 6], 200, {"arch": "qwen3"}),
    ],
    ids=["norms-before", "other-norms-two-layers-whole-vocabulary", "four-captured", "qwen3"],
)
def test_vllm_accepts_the_draft_as_often_as_our_own_decoder(
    verifier: Verifier,
    tmp_path: Path,
    layer_ids: list[int],
    draft_vocab_size: int,
    settings: dict[str, Any],
) -> None:
    speculator = tmp_path / "speculator"
    export_trained(
        verifier,
        speculator,
        layer_ids=layer_ids,
        draft_vocab_size=draft_vocab_size,
        settings=settings,
    )
    ours = decode_here(verifier, speculator, layer_ids)
    assert 1.1 < ours.acceptance_length < 3.5

    with serve(
        verifier.directory,
        speculator,
        draft_tokens=DRAFT_TOKENS,
        max_model_len=128,
        log=tmp_path / "vllm.log",
    ) as server:
        theirs = server.decode(PROMPTS, max_new_tokens=NEW_TOKENS)

    print(f"ours {ours.rounds} {ours.accepted}, vLLM {theirs.rounds} {theirs.accepted}")
    assert theirs.texts == verifier.texts
    assert theirs.acceptance_length == pytest.approx(ours.acceptance_length, abs=TINY_TOLERANCE)


STORE = Path(os.environ.get("OUTRIDER_STORE", REPOSITORY / "runs"))


def latest_demo() -> dict[str, Any] | None:
    """The last finished run of the demo in STORE."""
    for path in sorted((STORE / "run_records").glob("*.json"), reverse=True):
        record: dict[str, Any] = json.loads(path.read_text())
        if record["name"] == "smollm2-demo" and record.get("speculator"):
            return record
    return None


def test_vllm_accepts_the_demos_draft_as_often_as_the_demo_says(tmp_path: Path) -> None:
    from storage import artifacts
    from storage.layout import EVALUATION_TABLE
    from storage.store import Store
    from storage.tables import read_table

    record = latest_demo()
    if record is None:
        pytest.skip(f"no finished run of the demo in {STORE}; make it: make demo")
    store = Store(str(STORE))
    with artifacts.open_file(
        store, artifacts.require(store, record["stages"]["evaluate"]["parts"][0]), EVALUATION_TABLE
    ) as path:
        reference = read_table(path).to_pylist()
    settings, ours = record["settings"]["evaluate"], record["acceptance"]["after"]
    speculator = Path(record["speculator"])
    config = json.loads((speculator / "config.json").read_text())

    with serve(
        Path(config["speculators_config"]["verifier"]["name_or_path"]),
        speculator,
        draft_tokens=settings["draft_tokens"],
        max_model_len=512,
        log=tmp_path / "vllm.log",
    ) as server:
        theirs = server.decode(
            [row["prompt_ids"] for row in reference], max_new_tokens=settings["max_new_tokens"]
        )

    print(
        f"ours {ours['acceptance_length']} in {ours['rounds']} rounds, "
        f"vLLM {theirs.acceptance_length:.4f} in {theirs.rounds}"
    )
    assert not compare_texts([row["token_ids"] for row in reference], theirs.texts)
    assert theirs.acceptance_length == pytest.approx(ours["acceptance_length"], abs=DEMO_TOLERANCE)
