"""Child processes that are kept for many requests, each with GPUs or CPU threads of its own."""

import os
import queue
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from tasks.child import Child, JobRefusedError


class WorkerPool:
    """Worker processes that each hold the verifier; one that died is replaced when it is needed again.

    Each has GPUs of its own, `gpus_per_process` of them, or its share of the CPU's threads.
    """

    def __init__(self, module: str, *, processes: int, gpus_per_process: int) -> None:
        self._module, self._processes = module, processes
        self._gpus_per_process = gpus_per_process
        self._slots: queue.Queue[tuple[int, Child | None]] = queue.Queue()
        for slot in range(processes):
            self._slots.put((slot, None))
        self._children: dict[int, Child] = {}
        self._closed = False

    @contextmanager
    def worker(self) -> Iterator[Child]:
        """Give a free worker, starting it when there is none in the slot.

        Raises JobRefusedError once the pool is closed: no retry may start another worker then.
        """
        slot, child = self._slots.get()
        try:
            if self._closed:
                raise JobRefusedError("the capture was given up")
            if child is None or not child.alive:
                if child is not None:
                    child.close()
                child = self._children[slot] = Child(self._module, self._environment(slot))
            yield child
        finally:
            self._slots.put((slot, child))

    def close(self) -> None:
        """End all workers, busy ones too."""
        self._closed = True
        for child in self._children.values():
            child.kill()
        for child in self._children.values():
            child.close()

    def __enter__(self) -> Self:
        """Use as a context manager: no worker outlives the block."""
        return self

    def __exit__(self, *_: object) -> None:
        """End all workers."""
        self.close()

    def _environment(self, slot: int) -> dict[str, str]:
        count = self._gpus_per_process
        named = os.environ.get("CUDA_VISIBLE_DEVICES")
        gpus = named.split(",") if named else [str(i) for i in range(count * self._processes)]
        mine = gpus[slot * count : (slot + 1) * count]
        threads = max(1, (os.cpu_count() or 1) // self._processes)
        return {"CUDA_VISIBLE_DEVICES": ",".join(mine), "OMP_NUM_THREADS": str(threads)}
