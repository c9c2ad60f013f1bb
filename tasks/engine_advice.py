"""Which engine a verifier is best captured with, on which machine, and why."""

import math
from dataclasses import dataclass

from tasks.hardware import Machine

HEADROOM = 1.2
"""Memory that a model takes to its weights: activations, states on their way to the disk, the CUDA context."""

COMMON_GPU_BYTES = 80_000_000_000
"""What is reckoned with where there is no GPU: an A100 or H100."""
GPUS_OF_A_MACHINE = 8


@dataclass(frozen=True)
class Advice:
    """An engine, where it runs, and the reason in a line."""

    engine: str
    where: str
    reason: str


def advise(weight_bytes: int, parameters: int, *, quantized: bool, machine: Machine) -> Advice:
    """Choose the simplest engine that holds the model: transformers while it can, else vLLM.

    transformers spreads layers over GPUs, of which one works at a time, and unpacks most quantized weights
    as it loads them; vLLM splits each layer and computes on them as they are.
    """
    needed = weight_bytes * HEADROOM
    owned = len(machine.gpu_bytes) or "none"
    if machine.gpu_bytes:
        gpu, gpus, here = min(machine.gpu_bytes), len(machine.gpu_bytes), "of this machine's"
    else:
        gpu, gpus, here = COMMON_GPU_BYTES, GPUS_OF_A_MACHINE, "(this machine has none)"
        on_cpu = parameters * (2 if machine.native_bf16 else 4) * HEADROOM
        if on_cpu <= machine.ram_bytes and not quantized:
            dtype = "bf16" if machine.native_bf16 else "fp32"
            return Advice(
                "transformers",
                "this machine's CPU",
                f"it takes {_gb(on_cpu)} in {dtype} of {_gb(machine.ram_bytes)} RAM, and there is no GPU",
            )
    takes = f"its weights and what computing takes are {_gb(needed)}"
    if needed <= gpu:
        return Advice("transformers", f"one GPU {here}", f"{takes} of {_gb(gpu)}")
    count = math.ceil(needed / gpu)
    if count <= gpus and not quantized:
        return Advice(
            "transformers",
            f"{count} GPUs {here}: capture.gpus_per_process {count}",
            f"{takes}, more than one GPU of {_gb(gpu)} has",
        )
    split = 2 ** math.ceil(math.log2(count))  # attention heads are split evenly
    kind = "it is quantized, and " if quantized else ""
    enough = here if machine.gpu_bytes and split <= gpus else f"(this machine has {owned})"
    return Advice(
        "vllm",
        f"{split} GPUs of {_gb(gpu)} {enough}",
        f"{kind}{takes}, more than {'one GPU has' if quantized else f'{gpus} GPUs have'}",
    )


def _gb(count: float) -> str:
    return f"{count / 1e9:,.1f} GB"
