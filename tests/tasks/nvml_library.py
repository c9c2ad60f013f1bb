"""The driver's library as NVML's C functions answer: recorded on an H200, so that a machine without a GPU has some."""

import ctypes
from dataclasses import dataclass, field
from typing import Any

import pynvml

SUCCESS, INSUFFICIENT_SIZE = 0, 7
H200_BYTES = 150_754_820_096
IDLE_BYTES = 652_148_736  # in use by the driver alone


@dataclass
class Device:
    """One GPU: pid -> bytes that it holds."""

    processes: dict[int, int] = field(default_factory=dict)
    unnamed_bytes: int = 0


class NvmlLibrary:
    """Stands where `pynvml` keeps the loaded libnvidia-ml.so.1; its functions fill C structures in place."""

    def __init__(self, devices: list[Device]) -> None:
        self.devices = devices

    def nvmlInitWithFlags(self, flags: int) -> int:  # noqa: N802 - names of the C library
        return SUCCESS

    def nvmlShutdown(self) -> int:  # noqa: N802
        return SUCCESS

    def nvmlDeviceGetCount_v2(self, count: Any) -> int:  # noqa: N802
        count._obj.value = len(self.devices)
        return SUCCESS

    def nvmlDeviceGetHandleByIndex_v2(self, index: Any, handle: Any) -> int:  # noqa: N802
        place = ctypes.cast(index.value + 1, type(handle._obj))
        ctypes.pointer(handle._obj)[0] = place
        return SUCCESS

    def nvmlDeviceGetUUID(self, handle: Any, text: Any, size: Any) -> int:  # noqa: N802
        text.value = f"GPU-{self._index(handle):08x}-aaaa-bbbb-cccc-ddddeeeeffff".encode()
        return SUCCESS

    def nvmlDeviceGetMemoryInfo(self, handle: Any, memory: Any) -> int:  # noqa: N802
        device = self.devices[self._index(handle)]
        used = IDLE_BYTES + device.unnamed_bytes + sum(device.processes.values())
        memory._obj.total, memory._obj.used = H200_BYTES, used
        memory._obj.free = H200_BYTES - used
        return SUCCESS

    def nvmlDeviceGetComputeRunningProcesses_v3(self, handle: Any, count: Any, into: Any) -> int:  # noqa: N802
        held = list(self.devices[self._index(handle)].processes.items())
        room, count._obj.value = count._obj.value, len(held)
        if len(held) > room:
            return INSUFFICIENT_SIZE
        for place, (pid, used_bytes) in enumerate(held):
            into[place].pid, into[place].usedGpuMemory = pid, used_bytes
        return SUCCESS

    def _index(self, handle: Any) -> int:
        return int(ctypes.cast(handle, ctypes.c_void_p).value or 0) - 1


def install(monkeypatch: Any, devices: list[Device]) -> NvmlLibrary:
    """Let `pynvml` find this library loaded; it is the real one again after the test."""
    library = NvmlLibrary(devices)
    monkeypatch.setattr(pynvml, "nvmlLib", library)
    monkeypatch.setattr(pynvml, "_nvmlGetFunctionPointer_cache", {})
    return library
