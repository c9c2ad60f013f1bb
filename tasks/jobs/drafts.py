"""Build the draft of a run in a child process, from what the stages before have published."""

from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor

from storage import artifacts
from storage.arrays import read_arrays
from storage.layout import DRAFT_FILE, VOCAB_FILE
from storage.store import Store
from tasks.eagle3.draft import (
    Eagle3DraftModel,
    Eagle3SpeculatorConfig,
    build_draft,
    draft_config,
)
from tasks.eagle3.draft_plan import DraftPlan
from tasks.jobs.verifiers import open_facts, open_head

CPU = torch.device("cpu")


def make_draft(
    store: Store,
    parts: dict[str, Any],
    *,
    seed: int,
    device: torch.device = CPU,
    tables: torch.device | None = None,
    draft_tokens: int = 3,
    verifier_path: str | None = None,
    weights: dict[str, Tensor] | None = None,
) -> Eagle3DraftModel:
    """Build the draft of `tasks.train.draft_parts`, its trainable part from `weights` or else drawn from `seed`.

    It lies on `device`, its embedding and heads on `tables`, by default there too.
    """
    head = open_head(store, artifacts.require(store, parts["verifier"]))
    vocab = _open_vocab_map(store, parts)
    config = make_config(store, parts, draft_tokens=draft_tokens, verifier_path=verifier_path)
    return build_draft(
        config,
        embed=head.embed,
        norm=head.gain,
        head=head.head,
        logit_scale=head.transform.logit_scale,
        t2d=torch.from_numpy(vocab["t2d"].astype(np.bool_)),
        d2t=torch.from_numpy(vocab["d2t"]),
        seed=seed,
        device=device,
        tables=tables,
        weights=weights,
    )


def make_config(
    store: Store,
    parts: dict[str, Any],
    *,
    draft_tokens: int = 3,
    verifier_path: str | None = None,
) -> Eagle3SpeculatorConfig:
    """Return the config of `make_draft`'s draft."""
    facts = open_facts(store, artifacts.require(store, parts["verifier"]))
    plan = DraftPlan.model_validate(parts["draft"])
    return draft_config(
        facts.text_config,
        draft_vocab_size=len(_open_vocab_map(store, parts)["d2t"]),
        layer_ids=parts["layer_ids"],
        settings=plan.settings,
        layer=plan.layer,
        verifier_name_or_path=verifier_path or parts["directory"],
        verifier_architectures=facts.architectures,
        draft_tokens=draft_tokens,
    )


def _open_vocab_map(store: Store, parts: dict[str, Any]) -> dict[str, np.ndarray]:
    manifest = artifacts.require(store, parts["vocab_map"])
    with artifacts.open_file(store, manifest, VOCAB_FILE) as path:
        return read_arrays(path)


def trained_weights(store: Store, path: str) -> dict[str, Tensor]:
    """Return the trained tensors (fp32, by name) of a published training."""
    with artifacts.open_file(store, artifacts.require(store, path), DRAFT_FILE) as local:
        return load_file(local)
