"""What this machine computes in: settled before the work, so that identities hold dtypes and never "auto". No torch."""

import os
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

NVIDIA_DEVICE = Path("/dev/nvidiactl")
STORED = "stored"
"""The dtype that the verifier's weights are stored in."""


@dataclass(frozen=True)
class Machine:
    """What a machine has to hold a model in."""

    ram_bytes: int
    gpu_bytes: tuple[int, ...]
    """Memory of each GPU."""
    native_bf16: bool
    """Whether the CPU multiplies bf16; else models are computed there in fp32."""


def this_machine() -> Machine:
    """Return this machine's memory, and that of its GPUs as nvidia-smi names it."""
    ram_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return Machine(ram_bytes, _gpu_bytes(), native_bf16())


def _gpu_bytes() -> tuple[int, ...]:
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return ()
    command = [tool, "--query-gpu=memory.total", "--format=csv,noheader,nounits"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return tuple(int(line) << 20 for line in done.stdout.split())  # MiB
    except (OSError, ValueError, subprocess.SubprocessError):  # a tool without its driver
        return ()


def uses_gpu(device: str) -> bool:
    """Tell whether a device setting (auto, cpu, cuda, cuda:N) means a GPU on this machine."""
    return NVIDIA_DEVICE.exists() if device == "auto" else device.startswith("cuda")


def native_bf16() -> bool:
    """Tell whether this CPU multiplies bf16 matrices natively; where it does not, bf16 is some 20 times slower."""
    try:
        flags = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    return "avx512_bf16" in flags or "amx_bf16" in flags


def capture_dtype(setting: str, device: str) -> str:
    """Settle capture.dtype: what is fast here and as exact as the stored states are (bf16)."""
    if setting != "auto":
        return setting
    if uses_gpu(device):
        return STORED
    return "bfloat16" if native_bf16() else "float32"


def decoding_dtype(setting: str, device: str) -> str:
    """Settle evaluate.dtype: fp32 on a CPU, where texts are then compared exactly; as stored on a GPU."""
    if setting != "auto":
        return setting
    return STORED if uses_gpu(device) else "float32"


def training_precision(setting: str, device: str) -> str:
    """Settle train.precision: bf16 products where the hardware has them."""
    if setting != "auto":
        return setting
    return "bf16" if uses_gpu(device) or native_bf16() else "fp32"
