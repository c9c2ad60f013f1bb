"""Child processes that are kept for many requests, each with GPUs or CPU threads of its own."""

import os
import queue
from collections.abc import Mapping
from typing import Any, Self

from tasks.child import Child, JobRefusedError, ProgressCallback
from tasks.gpus import warn_of_leftovers

REQUESTS_PER_WORKER = 2
"""Requests that keep a worker busy: it computes one while it writes the files of the one before."""


class WorkerPool:
    """Worker processes that each hold the verifier; one that died is replaced when it is needed again.

    Each has GPUs of its own, `gpus_per_process` of them, or its share of the CPU's threads.
    """

    def __init__(self, module: str, *, processes: int, gpus_per_process: int) -> None:
        self._module, self._processes = module, processes
        self._gpus_per_process = gpus_per_process
        self._free: queue.Queue[int] = queue.Queue()
        for slot in range(processes):
            self._free.put(slot)
        self._children: dict[int, Child] = {}
        self._pids: set[int] = set()
        self._closed = False

    @property
    def pids(self) -> frozenset[int]:
        """All processes that were ever started, dead ones too."""
        return frozenset(self._pids)

    def request(
        self, request: Mapping[str, Any], progress: ProgressCallback | None = None
    ) -> dict[str, Any]:
        """Give a request to the next free worker and wait for its reply.

        A worker is free again as soon as it has computed: its files are written behind the next request. Raises what
        `Child.request` does, and JobRefusedError once the pool is closed: no retry may start another worker then.
        """
        slot = self._free.get()
        held = True

        def free() -> None:
            nonlocal held
            if held:
                held = False
                self._free.put(slot)

        try:
            return self._worker(slot).request(request, progress, computed=free)
        finally:
            free()

    def close(self) -> None:
        """End all workers, busy ones too, and see that they leave nothing on the GPUs."""
        self._closed = True
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.close()
        warn_of_leftovers(self._pids)

    def __enter__(self) -> Self:
        """Use as a context manager: no worker outlives the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all workers."""
        self.close()

    def _worker(self, slot: int) -> Child:
        if self._closed:
            raise JobRefusedError("the capture was given up")
        child = self._children.get(slot)
        if child is None or not child.alive:
            if child is not None:
                child.close()
            child = self._children[slot] = Child(self._module, self._environment(slot))
            self._pids.add(child.pid)
        return child

    def _environment(self, slot: int) -> dict[str, str]:
        count = self._gpus_per_process
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = (
            named.split(",")
            if named is not None
            else [str(i) for i in range(count * self._processes)]
        )
        mine = gpus[slot * count : (slot + 1) * count]
        threads = max(1, (os.cpu_count() or 1) // self._processes)
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine), "OMP_NUM_THREADS": str(threads)}
