"""Processes that end with the one that started them.

The kernel kills them (PR_SET_PDEATHSIG), however their parent ends. The signal is tied to the *thread* that started a
process, so all are started by one thread that lives as long as this process.
"""

import ctypes
import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Protocol

PR_SET_PDEATHSIG = 1  # linux/prctl.h
PARENT_PID = "OUTRIDER_PARENT_PID"
DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    # Threads that wait spin for some microseconds, then sleep: a training step of 512 tokens takes 280 ms on 2 cores,
    # 350 without spinning. libgomp's own 300,000 rounds make two busy processes there 10 to 28 times slower.
    "GOMP_SPINCOUNT": "3000",
    "TOKENIZERS_PARALLELISM": "false",
    # GPUs count here as the driver counts them (tasks.gpus); CUDA's own order is fastest first.
    "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
    # Bars of libraries are drawn for a terminal that a child does not have.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # speculators warns at every load of a tied or single-file verifier.
    "LOGURU_LEVEL": "ERROR",
    # Whether there are GPUs is asked without starting CUDA, which no fork could use afterwards.
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
}
"""Environment of job processes, where it says nothing else."""

Descriptors = tuple[int, int, int]
"""What a job process reads its requests from, prints to, and replies to."""

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="child-starter")


class Process(Protocol):
    """What is needed of a process that was started or forked."""

    pid: int

    def poll(self) -> int | None:
        """Exit status, negative for a signal, or None while it runs."""

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired when that does not come in time."""


def start_process(
    command: list[str], *, env: Mapping[str, str], **options: Any
) -> "subprocess.Popen[str]":
    """Start a process that `die_with_parent` may call in: in a session of its own, output piped together."""

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            env={**env, PARENT_PID: str(os.getpid())},
            **{"stdout": subprocess.PIPE, **options},
        )

    return _starter.submit(start).result()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux), and leave if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT_PID)
    if expected is not None and os.getppid() != int(expected):
        sys.exit(1)
