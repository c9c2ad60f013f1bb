"""A draft around a tiny verifier, the verifier's states of some texts, and the training of the one on the other."""

from collections.abc import Sequence
from pathlib import Path

import torch
from transformers import PreTrainedModel

from tasks.eagle3.batches import PackedBatch, TrainingSample, pack
from tasks.eagle3.draft import (
    DraftSettings,
    Eagle3DraftModel,
    build_draft,
    draft_config,
    trainable_parameters,
)
from tasks.eagle3.head import VerifierHead
from tasks.eagle3.head_transform import HeadTransform
from tasks.eagle3.hidden_states import StateHooks
from tasks.eagle3.training_step import training_forward
from tasks.eagle3.verifier import VerifierFacts
from tests.tiny_models import VOCAB_SIZE

LAYER_IDS = (1, 3, 4)
TTT_STEPS = 3


def make_draft(directory: Path, facts: VerifierFacts, head: VerifierHead) -> Eagle3DraftModel:
    """An untrained draft with the verifier's whole vocabulary."""
    return build_draft(
        draft_config(
            facts.text_config,
            draft_vocab_size=VOCAB_SIZE,
            layer_ids=LAYER_IDS,
            settings=DraftSettings(norm_before_fc=True),
            verifier_name_or_path=str(directory),
            verifier_architectures=facts.architectures,
            draft_tokens=TTT_STEPS,
        ),
        embed=head.embed,
        norm=head.gain,
        head=head.head,
        logit_scale=head.transform.logit_scale,
        t2d=torch.ones(VOCAB_SIZE, dtype=torch.bool),
        d2t=torch.zeros(VOCAB_SIZE, dtype=torch.long),
        seed=6,
    )


def states_of(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> PackedBatch:
    """The verifier's states of some texts, packed as a training batch; every token is supervised."""
    samples = []
    for text in texts:
        ids = torch.tensor(text)
        with torch.inference_mode(), StateHooks(model, LAYER_IDS) as hooks:
            model(input_ids=ids[None], use_cache=False)
            aux, last = hooks.take()
        samples.append(
            TrainingSample(
                input_ids=ids,
                aux=torch.cat(aux, dim=-1)[0].clone(),
                last=last[0].clone(),
                loss_mask=torch.ones(len(text), dtype=torch.bool),
            )
        )
    return pack(samples)


def train(
    draft: Eagle3DraftModel, batch: PackedBatch, transform: HeadTransform, *, steps: int
) -> None:
    """Train by the product's own step."""
    optimizer = torch.optim.Adam(trainable_parameters(draft).values(), lr=5e-3)
    for _ in range(steps):
        loss = training_forward(draft, batch, ttt_steps=TTT_STEPS, transform=transform).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
