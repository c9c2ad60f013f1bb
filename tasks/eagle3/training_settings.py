"""Settings of the training. Importable without torch: the flow's process reads only this."""

import sys
from importlib.util import find_spec
from typing import Any, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    field_validator,
    model_validator,
)

from tasks.stage_settings import StageSettings


class TrainSettings(StageSettings):
    """How the draft is trained."""

    resources: ClassVar[frozenset[str]] = frozenset(
        # of `init` the content counts, an input of the training, not where it lies
        {
            "init",
            "device",
            "checkpoint_seconds",
            "epoch_checkpoints",
            "keep_checkpoints",
            "on_bad_checkpoint",
            "tracker",
        }
    )

    init: str | None = None
    """A speculators checkpoint to start from, instead of random weights: its directory or that directory's URL
    (s3://, gs://, az://, hf://organization/name). Layers, norms and widths must be this run's; its draft vocabulary
    may be another."""
    epochs: PositiveInt = Field(default=3, le=10_000)
    """Passes over the train side."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """AdamW for everything, or Muon for the matrices and AdamW for the norms."""
    lr: PositiveFloat = Field(default=3.0e-5, le=1)
    """Peak learning rate."""
    muon_lr: PositiveFloat | None = Field(default=None, le=1)
    """Peak learning rate of what Muon trains, which follows the same schedule; empty = `lr`, which fits: its updates
    are scaled to the size of AdamW's."""
    muon_weight_decay: NonNegativeFloat = 0.1
    """Muon's weight decay."""
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
    noise: NonNegativeFloat = 0.0
    """Uniform noise within plus and minus this on the captured states of the train side; 0 is none."""
    max_tokens: PositiveInt = 2048
    """Tokens of a sample that are trained on; at most what was captured."""
    tokens_per_batch: PositiveInt | Literal["auto"] = 4096
    """Tokens of an optimizer step: whole samples are packed up to it. auto: what the GPU's memory holds (65,536 at
    most), found by trying once and then remembered in the store; 4096 on a CPU."""
    gpus: PositiveInt = 1
    """GPUs of this machine that train together, each on a batch of its own: a step is over gpus x tokens_per_batch
    tokens. On a machine without a GPU, the number of CPU processes."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Matrix products in fp32 or bf16 (weights and losses stay fp32); auto: bf16 where the hardware has it."""
    seed: int = 0
    """Seed of the initial weights and of the order of the samples."""
    max_nonfinite_steps: NonNegativeInt = 3
    """Steps with a non-finite loss or gradient that may be skipped before training stops."""
    early_stop_epochs: NonNegativeInt = 0
    """Stop after this many epochs without a better validation; 0 never stops early."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto (a GPU where there is one), cpu, cuda, or one of several GPUs, such as cuda:1."""
    checkpoint_seconds: PositiveFloat = 60.0
    """Time between checkpoints; more where writing one takes longer, for only one is written at a time."""
    epoch_checkpoints: bool = True
    """Whether the end of every epoch is a checkpoint besides; turn off for epochs of seconds."""
    keep_checkpoints: PositiveInt = 2
    """Newest checkpoints that are kept while training, and the best weights besides."""
    on_bad_checkpoint: Literal["stop", "older"] = "stop"
    """When the newest checkpoint cannot be read (cut off, a flipped bit): stop, or go on from an older one."""
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

    @model_validator(mode="after")
    def _free_to_choose(self) -> Self:
        if self.gpus > 1 and ":" in self.device:
            raise ValueError(
                f"train.device {self.device} is one GPU, train.gpus asks for {self.gpus}; "
                "write device: cuda, or choose the GPUs by CUDA_VISIBLE_DEVICES"
            )
        return self

    @field_validator("tokens_per_batch", mode="wrap")
    @classmethod
    def _one_reason(cls, value: Any, handler: ValidatorFunctionWrapHandler) -> Any:
        """A union says of each of its parts why it does not fit; one reason is enough."""
        try:
            return handler(value)
        except ValidationError as error:
            raise ValueError("write a whole number above 0, or auto") from error

    @property
    def peak_muon_lr(self) -> float:
        """Peak learning rate of what Muon trains."""
        return self.lr if self.muon_lr is None else self.muon_lr

    @property
    def batch_tokens(self) -> int:
        """tokens_per_batch as a number; ValueError while it is "auto"."""
        if self.tokens_per_batch == "auto":
            raise ValueError(
                "train.tokens_per_batch is auto: settle it for this machine before it is used"
            )
        return self.tokens_per_batch

    def identity(self) -> dict[str, Any]:
        """Return the settings that determine the result; of Muon and of more GPUs only where they are used."""
        found = super().identity()
        del found["muon_lr"], found["muon_weight_decay"]
        if self.gpus == 1:
            del found["gpus"]  # what one GPU trains is the same whether others could have helped
        if self.optimizer == "muon":
            found["muon"] = {"lr": self.peak_muon_lr, "weight_decay": self.muon_weight_decay}
        return found
