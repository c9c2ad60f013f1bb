"""Checkpoints behind the compute: copied off the device in a stream of its own, written in a thread.

The host waits for neither. The device waits where it would change what is still being copied, so no longer than the
copy takes. At most one checkpoint is under way, and memory is that of one copy of the state.
"""

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from tasks.eagle3.pinned_memory import PinnedMemory
from tasks.eagle3.training_state import TrainingState


class HostCopies:
    """One copy of named tensors in the host's memory, filled again and again; page-locked for a GPU's copies.

    For a GPU, memory of `expected_bytes` is made ready in a thread from now on: 11 GB take 3 s.
    """

    def __init__(self, device: torch.device, *, expected_bytes: int = 0) -> None:
        self._device = device
        self._ready = PinnedMemory(device, expected_bytes if device.type == "cuda" else 0)
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device) if device.type == "cuda" else None
        self._copied: Any = None
        self._memory: dict[str, Tensor] = {}

    def start(self, tensors: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], Any]:
        """Begin to copy; returns the copies and the event after which they are complete (None: they are).

        The first time takes as long as the memory is not ready.
        """
        new = {name: tensors[name] for name in tensors.keys() - self._memory.keys()}
        if self._stream is None:
            self._memory |= {name: torch.empty_like(value) for name, value in new.items()}
        elif new:
            self._memory |= self._ready.like(new)
        copies = {name: self._memory[name] for name in tensors}
        if self._stream is None:
            for name, copy in copies.items():
                copy.copy_(tensors[name])
            return copies, None
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            for name, copy in copies.items():
                copy.copy_(tensors[name], non_blocking=True)
            self._copied = self._stream.record_event()
        return copies, self._copied

    def before_change(self) -> None:
        """Let the device, not the host, wait until what is being copied may change."""
        if self._copied is not None:
            torch.cuda.current_stream(self._device).wait_event(self._copied)
            self._copied = None


class CheckpointWriter:
    """Hands states to `write` in a thread, one at a time; a context manager that ends with the last one written.

    An error of `write` comes out of whatever is called next, as it is.
    """

    def __init__(self, write: Callable[[TrainingState], None], copies: HostCopies) -> None:
        self._write, self._copies = write, copies
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="checkpoint-writer")
        self._running: Future[None] | None = None

    def is_idle(self) -> bool:
        """Whether nothing is under way; raises what ended the last checkpoint."""
        if self._running is not None and self._running.done():
            self.wait()
        return self._running is None

    def offer(self, state_now: Callable[[], TrainingState]) -> bool:
        """Begin a checkpoint of `state_now()`, unless one is under way.

        Returns whether it was begun. Its tensors may change after `HostCopies.before_change`.
        """
        if not self.is_idle():
            return False
        state = state_now()
        copies, copied = self._copies.start(state.tensors)
        self._running = self._thread.submit(self._finish, replace(state, tensors=copies), copied)
        return True

    def wait(self) -> None:
        """Wait for what is under way; raises what ended it."""
        running, self._running = self._running, None
        if running is not None:
            running.result()

    def _finish(self, state: TrainingState, copied: Any) -> None:
        if copied is not None:
            copied.synchronize()
        self._write(state)

    def __enter__(self) -> Self:
        """Use as a context manager."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """Let the last checkpoint be completed; its error does not hide another one."""
        try:
            if kind is None:
                self.wait()
        finally:
            self._thread.shutdown(wait=True)
