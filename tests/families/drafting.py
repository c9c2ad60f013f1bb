"""A draft around a tiny verifier, the verifier's states of some texts, and the training of the one on the other."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

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
from tasks.eagle3.hidden_states import StateHooks
from tasks.eagle3.training_step import training_forward
from tasks.eagle3.verifier_config import find_text_config
from tests.tiny_models import VOCAB_SIZE

LAYER_IDS = (1, 3, 4)
TTT_STEPS = 3


def make_draft(directory: Path, *, embed: Any, norm: Any, head: Any) -> Eagle3DraftModel:
    """An untrained draft with the whole vocabulary, from the checkpoint's own config as it is written."""
    config = json.loads((directory / "config.json").read_text())
    _, text_config = find_text_config(config, directory)
    return build_draft(
        draft_config(
            text_config,
            draft_vocab_size=VOCAB_SIZE,
            layer_ids=LAYER_IDS,
            settings=DraftSettings(norm_before_fc=True),
            verifier_name_or_path=str(directory),
            verifier_architectures=config["architectures"],
            draft_tokens=TTT_STEPS,
        ),
        embed=embed,
        norm=norm,
        head=head,
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


def train(draft: Eagle3DraftModel, batch: PackedBatch, *, steps: int) -> list[float]:
    """Train by the product's own step; return the losses."""
    optimizer = torch.optim.Adam(trainable_parameters(draft).values(), lr=5e-3)
    losses = []
    for _ in range(steps):
        loss = training_forward(draft, batch, ttt_steps=TTT_STEPS).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    return losses
