"""The two sides of the GPU benchmarks of training: this project's draft and step, and speculators', on random data."""

import functools
from collections.abc import Callable
from typing import Any

import torch

from tasks.eagle3.batches import PackedBatch, TrainingSample
from tasks.eagle3.draft import (
    DraftSettings,
    Eagle3DraftModel,
    build_draft,
    draft_config,
    eager_loss,
)
from tasks.eagle3.step_plan import StepPlan
from tasks.eagle3.training_step import frozen_heads, plan_batch, training_forward

TTT_STEPS = 3
DRAFT_VOCAB = 32_000
DOCUMENT = 1024

QWEN3_8B = {
    "hidden_size": 4096, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    "head_dim": 128, "vocab_size": 151_936, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 1e6,
    "max_position_embeddings": 40_960,
}  # fmt: skip
KIMI_K25 = {
    "hidden_size": 7168, "intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 64,
    "head_dim": 112, "vocab_size": 163_840, "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 5e4,
    "max_position_embeddings": 262_144,
}  # fmt: skip
SHAPES = {"qwen3-8b": (QWEN3_8B, 8192), "kimi-k2.5": (KIMI_K25, 4096)}
"""Verifier's sizes and packed tokens of a step."""


def make_draft(sizes: dict[str, Any], tables: str = "cpu", seed: int = 0) -> Eagle3DraftModel:
    """This project's draft on the GPU, around random tensors in bf16, the same ones at every call."""
    config = draft_config(
        sizes,
        draft_vocab_size=DRAFT_VOCAB,
        layer_ids=[2, 18, 33],
        settings=DraftSettings(),
        verifier_name_or_path="none",
        verifier_architectures=["none"],
        draft_tokens=TTT_STEPS,
    )
    generator = torch.Generator("cuda").manual_seed(0)
    vocabulary, hidden = sizes["vocab_size"], sizes["hidden_size"]
    embed, head = (
        torch.empty(vocabulary, hidden, device="cuda", dtype=torch.bfloat16).normal_(
            0, std, generator=generator
        )
        for std in (1.0, 0.02)
    )
    return build_draft(
        config,
        embed=embed,
        norm=torch.ones(hidden, device="cuda"),
        head=head,
        t2d=torch.arange(vocabulary) < DRAFT_VOCAB,
        d2t=torch.zeros(DRAFT_VOCAB, dtype=torch.long),
        seed=seed,
        device=torch.device("cuda"),
        tables=torch.device(tables),
    )


def make_peer_draft(sizes: dict[str, Any]) -> Eagle3DraftModel:
    """speculators' own model of the same values, in fp32 as its Trainer holds it."""
    source = make_draft(sizes, tables="cuda")
    source.config.transformer_layer_config._attn_implementation = "simple_flex_attention"
    with torch.device("cuda"):
        peer: Eagle3DraftModel = Eagle3DraftModel(source.config).float()
    peer.load_state_dict(source.state_dict())
    return peer


def make_samples(sizes: dict[str, Any], count: int) -> list[TrainingSample]:
    """Documents of DOCUMENT rows, the last 70 % of each supervised, as in chats."""
    generator = torch.Generator().manual_seed(0)
    hidden, length = int(sizes["hidden_size"]), DOCUMENT + 1
    return [
        TrainingSample(
            input_ids=torch.randint(DRAFT_VOCAB, (length,), generator=generator),
            aux=torch.randn(length, 3 * hidden, generator=generator).bfloat16(),
            last=torch.randn(length, hidden, generator=generator).bfloat16(),
            loss_mask=torch.arange(length) > length * 0.3,
        )
        for _ in range(count)
    ]


Forward = Callable[[PackedBatch, StepPlan | None], torch.Tensor]


def planner(draft: Eagle3DraftModel) -> Callable[[PackedBatch], StepPlan]:
    """What makes the plan of a batch."""
    return functools.partial(plan_batch, draft, ttt_steps=TTT_STEPS, precision="bf16")


def our_forward(draft: Eagle3DraftModel) -> Forward:
    """This project's step."""
    heads, plan_of = frozen_heads(draft, "bf16"), planner(draft)

    def forward(batch: PackedBatch, plan: StepPlan | None) -> torch.Tensor:
        plan = plan or plan_of(batch)
        return training_forward(
            draft, batch.to("cuda"), ttt_steps=TTT_STEPS, precision="bf16", plan=plan, heads=heads
        ).loss

    return forward


def peer_forward(draft: Any) -> Forward:
    """speculators' forward."""
    loss_config = {"kl_div": (eager_loss("kl_div"), 1.0)}

    def forward(batch: PackedBatch, _: StepPlan | None) -> torch.Tensor:
        moved = batch.to("cuda")
        with torch.autocast("cuda", dtype=torch.bfloat16):
            _, loss, _ = draft(
                moved.aux[None],
                moved.input_ids[None],
                moved.document_ids[None],
                loss_mask=moved.loss_mask[None],
                position_ids=moved.position_ids[None],
                verifier_last_hidden_states=moved.last[None],
                ttt_steps=TTT_STEPS,
                loss_config=loss_config,
            )
        return loss

    return forward
