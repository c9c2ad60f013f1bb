"""Settings of the stage capture."""

from typing import ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from tasks.eagle3.verifier import check_layer_ids, check_layer_order, default_layer_ids
from tasks.gpus import GpuPolicy
from tasks.stage_settings import StageSettings


class CaptureSettings(StageSettings):
    """How the verifier's hidden states are captured."""

    resources: ClassVar[frozenset[str]] = frozenset(
        {
            "rows_per_shard",
            "shard_megabytes",
            "gpus",
            "gpus_per_process",
            "nodes",
            "deployment",
            "device",
            "tokens_per_batch",
            "retry_quarantined",
            "compile",
            "busy_gpus",
            "wait_minutes",
        }
    )

    engine: Literal["transformers"] = "transformers"
    """What runs the verifier."""
    layers: tuple[int, ...] | None = None
    """Layer ids to capture: id i is the input of decoder layer i. Default: 2, half, and the last but two."""
    codec: Literal["bf16", "fp8"] = "bf16"
    """How states are stored: bf16, or fp8 (e4m3, a scale for each token and layer) in half the bytes."""
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the verifier computes in; auto: as its weights are stored, on a CPU bfloat16 if it is native."""
    rows_per_shard: PositiveInt = 2000
    """Most samples of a shard."""
    shard_megabytes: PositiveInt = 2000
    """Size at which a shard is closed, in MB."""
    gpus: PositiveInt = 1
    """GPUs to use; on a machine without, the number of CPU processes."""
    gpus_per_process: PositiveInt = 1
    """GPUs that one process spreads the verifier over."""
    nodes: PositiveInt = 1
    """Machines with so many GPUs each; with more than one, each captures its share in a run of capture.deployment."""
    deployment: str = Field(default="capture-states/capture-states", pattern=r"^[^/]+/[^/]+$")
    """Prefect deployment whose runs capture on other machines, with capture.nodes."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: the GPUs where there are any."""
    tokens_per_batch: PositiveInt = 4096
    """Tokens that go through the verifier at once; fewer from the first batch on that does not fit the memory."""
    retry_quarantined: bool = False
    """Try samples again whose states were not usable before (NaN or infinite)."""
    compile: bool = False
    """Compile the verifier's layers: on a GPU faster after about a minute in each process. Needs one GPU a process."""

    busy_gpus: Literal["refuse", "wait", "ignore"] = "refuse"
    """What a run does when others hold its GPUs, before any stage that computes on them."""
    wait_minutes: PositiveFloat = 60.0
    """How long it waits for them, with busy_gpus wait."""

    @field_validator("layers")
    @classmethod
    def _ordered(cls, layers: tuple[int, ...] | None) -> tuple[int, ...] | None:
        if layers is not None:
            check_layer_order(layers)
        return layers

    @model_validator(mode="after")
    def _whole_processes(self) -> Self:
        if self.gpus % self.gpus_per_process:
            raise ValueError(
                f"capture.gpus {self.gpus} is no multiple of capture.gpus_per_process {self.gpus_per_process}"
            )
        if self.compile and self.gpus_per_process > 1:
            raise ValueError(
                "capture.compile needs capture.gpus_per_process 1; leave one of them out"
            )
        return self

    @property
    def processes(self) -> int:
        """Processes that capture at the same time."""
        return self.gpus // self.gpus_per_process

    @property
    def gpu_policy(self) -> GpuPolicy:
        """What a run does when others hold its GPUs."""
        return GpuPolicy(self.busy_gpus, self.wait_minutes)

    def layer_ids(self, num_layers: int) -> tuple[int, ...]:
        """Return the layer ids for a verifier of `num_layers` layers; ValueError when it has too few."""
        if self.layers is None:
            return tuple(default_layer_ids(num_layers))
        check_layer_ids(self.layers, num_layers)
        return self.layers
