"""Are the GPUs asked for there, and free? Asked of the driver's library (NVML): no torch, no CUDA context.

Indices are those of the PCI bus, which CUDA counts by in our child processes (CUDA_DEVICE_ORDER).
"""

import logging
import os
import threading
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from tasks import hardware

logger = logging.getLogger(__name__)

BUSY_BYTES = 1 << 30
"""Memory in use from which a GPU counts as busy though no process is named, as for one in another container."""

POLL_SECONDS = 5.0
LEAVING_SECONDS = 10.0
"""The driver takes a while to free the memory of a killed process."""

MIB = 1 << 20

_stopped = threading.Event()


class GpusBusyError(ValueError):
    """GPUs that the run was to use are held by others; the message names them. Not worth a retry: who waits says so."""


class GpuPolicy(NamedTuple):
    """What a run does when others hold its GPUs."""

    busy: Literal["refuse", "wait", "ignore"] = "refuse"
    wait_minutes: float = 60.0


REFUSE = GpuPolicy()


class GpuNeed(NamedTuple):
    """The GPUs that a stage is to compute on."""

    device: str
    """As set: auto (as many as are there, none too), cpu, cuda, or one of them, cuda:1."""
    number: int = 1
    policy: GpuPolicy = REFUSE

    def of(self, gpus: Sequence["Gpu"]) -> Sequence["Gpu"]:
        """Choose from those that are there."""
        _, _, place = self.device.partition(":")
        return gpus[int(place) :][:1] if place else gpus[: self.number]


@dataclass(frozen=True)
class Holder:
    """A process that computes on a GPU."""

    pid: int
    command: str
    used_bytes: int

    def __str__(self) -> str:
        """For a message."""
        return f"process {self.pid} ({self.command}) holds {self.used_bytes // MIB:,} MB"


@dataclass(frozen=True)
class Gpu:
    """One GPU and who holds it."""

    index: int
    uuid: str
    used_bytes: int
    holders: tuple[Holder, ...]

    @property
    def busy(self) -> bool:
        """Whether others compute on it, or something holds its memory."""
        return bool(self.holders) or self.used_bytes > BUSY_BYTES

    def __str__(self) -> str:
        """For a message."""
        held = ", ".join(map(str, self.holders))
        return f"GPU {self.index}: {held or f'{self.used_bytes // MIB:,} MB are in use'}"


def check_there(devices: Mapping[str, str]) -> None:
    """Raise ValueError when a device setting, by its key, names a GPU and this machine has none."""
    for key, device in devices.items():
        if device.startswith("cuda") and not hardware.NVIDIA_DEVICE.exists():
            raise ValueError(f"{key} is {device}, and this machine has no GPU; use auto or cpu")


def claim_gpus(need: GpuNeed, *, stage: str, group: int = 1) -> int:
    """Return how many GPUs a stage may use, once these are free; 0 means that it computes on the CPU.

    A process of the stage takes `group` of them: the number is a multiple of it.

    Raises GpusBusyError when they are held by others and the policy is to refuse, or the time to wait is over;
    ValueError when more are asked for by name ("cuda") than there are, or fewer are there than one process takes.
    """
    if not hardware.uses_gpu(need.device):
        return 0
    if "MIG-" in os.environ.get("CUDA_VISIBLE_DEVICES", ""):
        return need.number  # parts of GPUs: the driver does not tell whose process is on which
    there = need.of(visible_gpus())
    if 0 < len(there) < group:
        raise ValueError(
            f"{stage}.gpus_per_process is {group} and {len(there)} GPUs are there{_hidden()}; lower it if fewer hold "
            "the verifier"
        )
    if len(there) < need.number:
        if need.device != "auto":
            raise ValueError(
                f"{stage} asks for {need.number} GPUs by device {need.device}, and {len(there)} are there{_hidden()}; "
                f"lower {stage}.gpus or change {stage}.device"
            )
        if there:
            logger.warning(
                "%s: %d of the %d GPUs asked for are there%s",
                stage,
                len(there),
                need.number,
                _hidden(),
            )
    if need.policy.busy != "ignore":
        _wait_until_free(need, stage=stage)
    return len(there) - len(there) % group


def visible_gpus() -> list[Gpu]:
    """Return the GPUs that CUDA_VISIBLE_DEVICES leaves, in its order; none without a driver."""
    with _nvml() as nvml:
        if nvml is None:
            return []
        every = [_read(nvml, index) for index in range(nvml.nvmlDeviceGetCount())]
    named = os.environ.get("CUDA_VISIBLE_DEVICES")
    if named is None:
        return every
    chosen = []
    for name in named.split(","):
        match = [gpu for gpu in every if _is_named(gpu, name.strip())]
        if not match:  # CUDA leaves out what follows, too
            break
        chosen.append(match[0])
    return chosen


def warn_of_leftovers(pids: Collection[int]) -> list[Holder]:
    """Warn of GPU memory that these processes, which have ended, still hold after a while; returns who."""
    if not hardware.NVIDIA_DEVICE.exists():
        return []
    until = time.monotonic() + LEAVING_SECONDS
    while True:
        left = [h for gpu in visible_gpus() for h in gpu.holders if h.pid in pids]
        if not left or time.monotonic() > until:
            break
        time.sleep(0.2)
    for holder in left:
        logger.warning("the GPU memory of an ended process was not given back: %s", holder)
    return left


def stop_waiting() -> None:
    """End all waiting for GPUs at once: for a run that was stopped."""
    _stopped.set()


def _wait_until_free(need: GpuNeed, *, stage: str) -> None:
    policy = need.policy
    until = time.monotonic() + 60 * policy.wait_minutes
    said: str | None = None
    while busy := [gpu for gpu in need.of(visible_gpus()) if gpu.busy]:
        what = "; ".join(map(str, busy))
        if policy.busy == "refuse":
            raise GpusBusyError(
                f"{stage}: {len(busy)} of its GPUs are busy: {what}; end what holds them, choose others by "
                "CUDA_VISIBLE_DEVICES, or set capture.busy_gpus to wait"
            )
        if time.monotonic() >= until:
            raise GpusBusyError(
                f"{stage}: {len(busy)} of its GPUs are still busy after {policy.wait_minutes:g} minutes: {what}; "
                "raise capture.wait_minutes, or run again to go on here"
            )
        if what != said:
            logger.info("%s: waiting for its GPUs: %s", stage, what)
            said = what
        if _stopped.wait(timeout=POLL_SECONDS):
            raise GpusBusyError(f"{stage}: the run was stopped while it waited for its GPUs")


@contextmanager
def _nvml() -> Iterator[Any]:
    """The driver's library, or None where there is no driver."""
    import pynvml  # noqa: PLC0415 - only a machine with a driver needs it

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        logger.debug("no NVML: %s", error)
        yield None
        return
    try:
        yield pynvml
    finally:
        pynvml.nvmlShutdown()


def _read(nvml: Any, index: int) -> Gpu:
    handle = nvml.nvmlDeviceGetHandleByIndex(index)
    holders = [
        Holder(process.pid, _command(process.pid), process.usedGpuMemory or 0)
        for process in nvml.nvmlDeviceGetComputeRunningProcesses(handle)
        if process.pid != os.getpid()
    ]
    used = nvml.nvmlDeviceGetMemoryInfo(handle).used
    return Gpu(index, nvml.nvmlDeviceGetUUID(handle), used, tuple(holders))


def _command(pid: int) -> str:
    try:
        words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    except OSError:
        return "not of this container"
    return " ".join(word.decode(errors="replace") for word in words[:4]).strip()[:80] or "unnamed"


def _is_named(gpu: Gpu, name: str) -> bool:
    return name == str(gpu.index) or (name.startswith("GPU-") and gpu.uuid.startswith(name))


def _hidden() -> str:
    named: str | Sequence[str] | None = os.environ.get("CUDA_VISIBLE_DEVICES")
    return "" if named is None else f" (CUDA_VISIBLE_DEVICES is {named!r})"
