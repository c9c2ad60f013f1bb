"""A verifier's embedding, final norm and head, and its logits from them: what a draft is trained with.

N = positions, V = verifier vocabulary, H = verifier hidden size.
"""

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from tasks.eagle3.head_transform import PLAIN, HeadTransform
from tasks.eagle3.verifier import VerifierFacts

METADATA_KEY = "verifier_head"

ROWS_PER_CHUNK = 16_384
"""Head rows taken to fp32 at once: 0.5 GB of Kimi-K2.5's head (H = 7,168) instead of 4.7 GB."""


@dataclass(frozen=True)
class VerifierHead:
    """Embedding [V, H], final norm [H] and head [V, H] as stored; `head` is `embed` when tied."""

    embed: Tensor
    norm: Tensor
    head: Tensor
    eps: float
    transform: HeadTransform = PLAIN

    @property
    def tied(self) -> bool:
        """Whether the head is the embedding."""
        return self.head is self.embed

    @property
    def gain(self) -> Tensor:
        """What the final norm multiplies by: [H], fp32."""
        return self.norm.float() + (1.0 if self.transform.norm == "rms_plus_one" else 0.0)

    def normed(self, last: Tensor) -> Tensor:
        """Apply the final norm in fp32: last [N, H], pre-norm -> [N, H] fp32."""
        states = centered(last.float(), self.transform)
        scale = torch.rsqrt(states.square().mean(dim=-1, keepdim=True) + self.eps)  # [N, 1]
        return states * scale * self.gain.to(states.device)

    def logits(self, last: Tensor) -> Tensor:
        """Return the verifier's logits of pre-norm last states, in fp32: [N, H] -> [N, V]."""
        if last.dim() != 2 or last.shape[1] != self.head.shape[1]:
            raise ValueError(
                f"last states must have shape [N, {self.head.shape[1]}], got {list(last.shape)}; "
                "flatten batch and sequence first"
            )
        normed = self.normed(last)
        logits = torch.empty(len(last), len(self.head), device=last.device)  # [N, V]
        for start in range(0, len(self.head), ROWS_PER_CHUNK):
            rows = self.head[start : start + ROWS_PER_CHUNK].to(last.device).float()
            torch.matmul(normed, rows.T, out=logits[:, start : start + len(rows)])
        return softcapped_(logits.mul_(self.transform.logit_scale), self.transform)


def centered(last: Tensor, transform: HeadTransform) -> Tensor:
    """Take the mean off each state [.., H] where the final norm is a LayerNorm; what is left of it is an RMS norm."""
    if transform.norm != "layer":
        return last
    return last - last.mean(dim=-1, keepdim=True)


def softcapped_(logits: Tensor, transform: HeadTransform) -> Tensor:
    """Cap logits in place: cap * tanh(logits / cap)."""
    cap = transform.logit_softcap
    return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)


def read_head(directory: Path, facts: VerifierFacts) -> VerifierHead:
    """Read the three tensors of a checkpoint, and nothing else of it, in their stored dtype."""

    def read(key: str) -> Tensor:
        with safe_open(directory / facts.files[key], framework="pt") as file:
            tensor: Tensor = file.get_tensor(key)
            return tensor

    embed = read(facts.embed_key)
    head = embed if facts.tied else read(facts.head_key)
    return VerifierHead(embed, read(facts.norm_key), head, facts.norm_eps, facts.transform)


def save_head(head: VerifierHead, path: Path) -> None:
    """Write the tensors as one safetensors file; a tied head is not written twice."""
    tensors = {"embed": head.embed, "norm": head.norm}
    if not head.tied:
        tensors["head"] = head.head
    contiguous = {name: tensor.contiguous() for name, tensor in tensors.items()}
    values = {"eps": head.eps, "transform": head.transform.model_dump(mode="json")}
    # One entry: safetensors writes several in random order, and an artifact counts by its bytes.
    save_file(contiguous, path, metadata={METADATA_KEY: json.dumps(values, sort_keys=True)})


def load_head(path: Path) -> VerifierHead:
    """Read what save_head wrote; ValueError when the file is something else."""
    with safe_open(path, framework="pt") as file:
        keys, metadata = set(file.keys()), file.metadata() or {}
        if not {"embed", "norm"} <= keys or METADATA_KEY not in metadata:
            raise ValueError(
                f"{path} holds {sorted(keys)}, not a verifier's embed, norm, eps and transform; "
                "make the verifier artifact again"
            )
        embed: Tensor = file.get_tensor("embed")
        head: Tensor = file.get_tensor("head") if "head" in keys else embed
        values = json.loads(metadata[METADATA_KEY])
        transform = HeadTransform.model_validate(values["transform"])
        return VerifierHead(embed, file.get_tensor("norm"), head, float(values["eps"]), transform)
