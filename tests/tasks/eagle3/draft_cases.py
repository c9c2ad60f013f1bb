"""A small draft and packed documents for the tests of the training core."""

from typing import Any

import torch

from tasks.eagle3.batches import PackedBatch, TrainingSample, pack
from tasks.eagle3.draft import (
    DraftSettings,
    Eagle3DraftModel,
    build_draft,
    draft_config,
    trainable_parameters,
)

HIDDEN, VOCAB, DRAFT_VOCAB = 64, 300, 128

TEXT_CONFIG: dict[str, Any] = {
    "hidden_size": HIDDEN,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 12,
    "vocab_size": VOCAB,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "max_position_embeddings": 512,
}


def verifier_tensors(draft_vocab: int = DRAFT_VOCAB) -> dict[str, torch.Tensor]:
    """Random embedding, norm, head and a vocabulary map; norm weights far from one."""
    generator = torch.Generator().manual_seed(3)
    t2d = torch.zeros(VOCAB, dtype=torch.bool)
    t2d[torch.randperm(VOCAB, generator=generator)[:draft_vocab]] = True
    return {
        "embed": torch.randn(VOCAB, HIDDEN, generator=generator),
        "norm": torch.rand(HIDDEN, generator=generator) * 1.5 + 0.5,
        "head": torch.randn(VOCAB, HIDDEN, generator=generator) / 4,
        "t2d": t2d,
        "d2t": t2d.nonzero()[:, 0] - torch.arange(draft_vocab),
    }


def make_draft(
    *,
    layer_ids: tuple[int, ...] = (2, 6, 9),
    draft_vocab: int = DRAFT_VOCAB,
    verifier: str = "none",
    text_config: dict[str, Any] | None = None,
    **options: Any,
) -> Eagle3DraftModel:
    """A draft whose every trainable tensor is random, norms from U(0.5, 2)."""
    config = draft_config(
        text_config or TEXT_CONFIG,
        draft_vocab_size=draft_vocab,
        layer_ids=layer_ids,
        settings=DraftSettings(**options),
        verifier_name_or_path=verifier,
        verifier_architectures=["LlamaForCausalLM"],
        draft_tokens=3,
    )
    draft = build_draft(config, **verifier_tensors(draft_vocab), seed=1)
    generator = torch.Generator().manual_seed(4)
    with torch.no_grad():
        for weight in trainable_parameters(draft).values():
            drawn = torch.rand(weight.shape, generator=generator)
            weight.copy_(drawn * 1.5 + 0.5 if weight.dim() == 1 else (drawn - 0.5) / 4)
    return draft


def make_batch(*, layers: int = 3, lengths: tuple[int, ...] = (9, 2, 17, 3, 30)) -> PackedBatch:
    """Documents with scattered supervision, also right at their borders."""
    generator = torch.Generator().manual_seed(5)
    return pack(
        [
            TrainingSample(
                input_ids=torch.randint(VOCAB, (length,), generator=generator),
                aux=torch.randn(length, layers * HIDDEN, generator=generator) * 3,
                last=torch.randn(length, HIDDEN, generator=generator),
                loss_mask=torch.rand(length, generator=generator) < 0.6,
            )
            for length in lengths
        ]
    )
