"""Settings of the training. Importable without torch: the flow's process reads only this."""

import sys
from importlib.util import find_spec
from typing import ClassVar, Literal

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    field_validator,
)

from tasks.stage_settings import StageSettings


class TrainSettings(StageSettings):
    """How the draft is trained."""

    resources: ClassVar[frozenset[str]] = frozenset(
        {"device", "checkpoint_seconds", "epoch_checkpoints", "keep_checkpoints", "tracker"}
    )

    epochs: PositiveInt = Field(default=3, le=10_000)
    """Passes over the train side."""
    lr: PositiveFloat = Field(default=3.0e-5, le=1)
    """Peak learning rate."""
    schedule: Literal["cosine", "linear", "constant"] = "cosine"
    """How the learning rate falls after the warm-up, to zero at the last step."""
    warmup_ratio: float = Field(default=0.05, ge=0, lt=1)
    """Share of the steps over which the learning rate rises."""
    weight_decay: NonNegativeFloat = 0.0
    """AdamW's weight decay."""
    beta2: float = Field(default=0.95, gt=0, lt=1)
    """AdamW's second decay rate."""
    max_grad_norm: PositiveFloat = 1.0
    """Gradients are clipped to this norm."""
    ttt_steps: PositiveInt = Field(default=3, le=16)
    """Training-time test: how many tokens ahead the draft runs on its own states."""
    ttt_step_decay: float = Field(default=1.0, gt=0, le=1)
    """Weight of each further TTT step's loss, relative to the one before."""
    loss: Literal["kl_div", "ce", "rkl", "jsd", "tv", "nla", "lk_hybrid"] = "kl_div"
    """Loss between the draft's and the verifier's distributions, by speculators' names."""
    max_tokens: PositiveInt = 2048
    """Tokens of a sample that are trained on; at most what was captured."""
    tokens_per_batch: PositiveInt = 4096
    """Tokens of an optimizer step: whole samples are packed up to it."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Matrix products in fp32 or bf16 (weights and losses stay fp32); auto: bf16 where the hardware has it."""
    seed: int = 0
    """Seed of the initial weights and of the order of the samples."""
    max_nonfinite_steps: NonNegativeInt = 3
    """Steps with a non-finite loss or gradient that may be skipped before training stops."""
    early_stop_epochs: NonNegativeInt = 0
    """Stop after this many epochs without a better validation; 0 never stops early."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu or cuda."""
    checkpoint_seconds: PositiveFloat = 60.0
    """Time between checkpoints."""
    epoch_checkpoints: bool = True
    """Whether the end of every epoch is a checkpoint besides; turn off for epochs of seconds."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that are kept while training."""
    tracker: Literal["tensorboard", "wandb", "mlflow", "trackio", "none"] = "tensorboard"
    """Where every step is shown while it trains. wandb, mlflow and trackio have to be installed; logins and servers
    come from their own environment variables."""

    @field_validator("tracker")
    @classmethod
    def _is_installed(cls, name: str) -> str:
        found = None if name == "none" else find_spec(name)
        # a directory of that name, as wandb leaves one behind, is found too, but has no origin
        if name != "none" and (found is None or found.origin is None):
            raise ValueError(
                f"the package {name} is not installed; install it by {sys.executable} -m pip install {name}, "
                "or choose tensorboard or none"
            )
        return name
