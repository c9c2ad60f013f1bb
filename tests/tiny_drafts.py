"""Tiny EAGLE-3 drafts around the tiny verifiers, as they are built and as they train."""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from speculators.losses import resolve_loss_config
from torch import Tensor
from transformers import PreTrainedModel

from tasks.eagle3.draft import Eagle3DraftModel, build_draft, draft_config, trainable_parameters
from tasks.eagle3.draft_settings import DraftSettings
from tasks.eagle3.hidden_states import StateHooks

LAYER_IDS = [1, 4, 6]


def make_draft(
    model: PreTrainedModel,
    *,
    draft_vocab_size: int,
    layer_ids: Sequence[int] = LAYER_IDS,
    **settings: Any,
) -> Eagle3DraftModel:
    """An untrained draft whose norm weights come from U(0.5, 2) and whose tokens lie scattered."""
    config = draft_config(
        model.config.to_dict(),
        draft_vocab_size=draft_vocab_size,
        layer_ids=layer_ids,
        settings=DraftSettings(**settings),
        verifier_name_or_path=model.name_or_path,
        verifier_architectures=["LlamaForCausalLM"],
        draft_tokens=3,
    )
    config.transformer_layer_config._attn_implementation = "eager"
    generator = torch.Generator().manual_seed(5)
    vocab_size = model.config.vocab_size
    chosen = torch.randperm(vocab_size, generator=generator)[:draft_vocab_size].sort().values
    draft = build_draft(
        config,
        embed=model.get_input_embeddings().weight.detach(),
        norm=model.model.norm.weight.detach(),
        head=model.get_output_embeddings().weight.detach(),
        t2d=torch.zeros(vocab_size, dtype=torch.bool).index_fill_(0, chosen, True),
        d2t=chosen - torch.arange(draft_vocab_size),
        seed=6,
    )
    with torch.no_grad():
        for name, weight in trainable_parameters(draft).items():
            if "norm" in name:
                weight.uniform_(0.5, 2.0, generator=generator)
            else:
                weight.normal_(0, 2 * weight.shape[-1] ** -0.5, generator=generator)
    return draft.eval()


def training_batch(
    model: PreTrainedModel, texts: Sequence[Sequence[int]], *, layer_ids: Sequence[int] = LAYER_IDS
) -> dict[str, Tensor]:
    """The verifier's states of some texts, packed and aligned as the draft's forward wants them."""
    parts: dict[str, list[Tensor]] = {}
    for document, text in enumerate(texts):
        ids = torch.tensor([text])
        with torch.no_grad(), StateHooks(model, layer_ids) as hooks:
            model(ids)
            aux, last = hooks.take()
        count = len(text) - 1
        sample = {
            "input_ids": ids[:, 1:],
            "hidden_states": torch.cat(aux, dim=-1)[:, :-1],
            "verifier_last_hidden_states": last[:, 1:],
            "document_ids": torch.full((1, count), document),
            "position_ids": torch.arange(1, count + 1)[None],
            "loss_mask": torch.ones(1, count, dtype=torch.bool),
        }
        for name, tensor in sample.items():
            parts.setdefault(name, []).append(tensor)
    return {name: torch.cat(tensors, dim=1) for name, tensors in parts.items()}


def train(draft: Eagle3DraftModel, batch: dict[str, Tensor], *, ttt_steps: int) -> Iterator[float]:
    """Train on one batch by the draft's own forward; yields the loss of each step, without end."""
    optimizer = torch.optim.Adam(trainable_parameters(draft).values(), lr=5e-3)
    loss_config = resolve_loss_config("ce", "eager")
    while True:
        _, loss, _ = draft(**batch, ttt_steps=ttt_steps, loss_config=loss_config)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        yield float(loss.detach())
