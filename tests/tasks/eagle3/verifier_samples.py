"""A verifier's own states of one text, as transformers gives them: what hooks and the canary are held against."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from tasks.eagle3.head import VerifierHead, read_head
from tasks.eagle3.verifier import read_facts
from tests.tiny_models import load_model, make_llama, make_qwen3

LAYERS = [2, 4, 5]
HIDDEN = 64


@dataclass
class VerifierSample:
    model: Any
    head: VerifierHead
    ids: Tensor
    states: list[Tensor]  # hidden_states[0 .. 8] of transformers, [N, H]
    last: Tensor

    def aux(self, layer_ids: list[int]) -> Tensor:
        return torch.cat([self.states[i] for i in layer_ids], dim=-1)


def make_sample(directory: Path, kind: str) -> VerifierSample:
    """Of a random verifier: "llama", "qwen3" or "tied"."""
    (make_qwen3 if kind == "qwen3" else make_llama)(directory, tied=kind == "tied")
    model = load_model(directory)
    ids = torch.randint(3, 300, (60,), generator=torch.Generator().manual_seed(3))
    last: list[Tensor] = []
    handle = model.model.norm.register_forward_pre_hook(lambda module, args: last.append(args[0]))
    with torch.inference_mode():
        states = model(ids[None], output_hidden_states=True).hidden_states
    handle.remove()
    head = read_head(directory, read_facts(directory))
    return VerifierSample(model, head, ids, [state[0] for state in states], last[0][0])
