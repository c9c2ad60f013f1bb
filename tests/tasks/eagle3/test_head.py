import math

import pytest
import torch
from safetensors.torch import load_file, save_file

from tasks.eagle3.head import ROWS_PER_CHUNK, VerifierHead, load_head, read_head, save_head
from tasks.eagle3.verifier import read_facts
from tests.tiny_models import load_model, make_llama, make_qwen3


def test_logits_are_the_rms_norm_then_the_head_by_hand():
    head = VerifierHead(
        embed=torch.zeros(3, 2),
        norm=torch.tensor([0.5, 2.0]),
        head=torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, 1.0]]),
        eps=0.5,
    )
    # mean of squares (9 + 16) / 2 = 12.5, plus eps 13
    a, b = 3 / math.sqrt(13) * 0.5, 4 / math.sqrt(13) * 2.0

    logits = head.logits(torch.tensor([[3.0, 4.0]]))

    torch.testing.assert_close(logits, torch.tensor([[a, b, a + b]]))


@pytest.mark.parametrize("make", [make_llama, make_qwen3])
@pytest.mark.parametrize("tied", [False, True])
def test_the_rebuilt_head_gives_the_models_own_logits(tmp_path, make, tied):
    directory = make(tmp_path / "m", tied=tied)
    facts = read_facts(directory)
    head = read_head(directory, facts)
    model = load_model(directory)
    last = []
    model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))

    with torch.inference_mode():
        logits = model(torch.arange(3, 40)[None]).logits[0]

    assert head.tied == facts.tied == tied
    torch.testing.assert_close(head.logits(last[0][0]), logits, atol=2e-5, rtol=1e-5)


def test_a_vocabulary_larger_than_one_chunk_gives_every_logit():
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2 * ROWS_PER_CHUNK + 5, 4, generator=generator)
    head = VerifierHead(rows, torch.ones(4), rows, 1e-6)
    last = torch.randn(3, 4, generator=generator)

    torch.testing.assert_close(head.logits(last), head.normed(last) @ rows.T)


@pytest.mark.parametrize("tied", [False, True])
def test_a_saved_head_comes_back_equal_and_a_tied_one_is_stored_once(tmp_path, tied):
    embed = torch.randn(5, 4).bfloat16()
    other = embed if tied else torch.randn(5, 4).bfloat16()
    save_head(VerifierHead(embed, torch.rand(4), other, 1e-5), tmp_path / "head.safetensors")

    back = load_head(tmp_path / "head.safetensors")

    assert back.tied == tied
    assert back.eps == 1e-5
    assert torch.equal(back.embed, embed)
    assert torch.equal(back.head, other)
    assert back.embed.dtype == torch.bfloat16
    assert len(load_file(tmp_path / "head.safetensors")) == (2 if tied else 3)


def test_the_same_head_is_written_as_the_same_bytes(tmp_path):
    head = VerifierHead(torch.ones(4, 2), torch.ones(2), torch.zeros(4, 2), 1e-6)
    written = set()
    for _ in range(16):  # safetensors writes two metadata entries in either order
        save_head(head, tmp_path / "head.safetensors")
        written.add((tmp_path / "head.safetensors").read_bytes())
    assert len(written) == 1


def test_another_file_is_not_taken_for_a_head(tmp_path):
    save_file({"weight": torch.ones(2)}, tmp_path / "x.safetensors")

    with pytest.raises(ValueError, match=r"\['weight'\], not a verifier's embed"):
        load_head(tmp_path / "x.safetensors")


def test_states_of_another_width_are_refused():
    head = VerifierHead(torch.zeros(3, 2), torch.ones(2), torch.zeros(3, 2), 1e-6)

    with pytest.raises(ValueError, match=r"shape \[N, 2\], got \[1, 4, 2\]"):
        head.logits(torch.zeros(1, 4, 2))
