"""Batches where the training runs, with their plans; on a GPU made ready while the steps before them run."""

import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tasks.eagle3.batches import PackedBatch, TrainingSample, pack
from tasks.eagle3.step_plan import StepPlan

AHEAD = 2
"""Batches that are made ready at a time: one is being copied while the next is being packed."""


@dataclass(frozen=True)
class ReadyBatch:
    """A batch and its plan on the device."""

    batch: PackedBatch
    plan: StepPlan
    copied: Any = None  # event of the copy, where there is one


class BatchFeed:
    """Packs, plans and moves the batches of some samples, each a list of their indices."""

    def __init__(
        self,
        samples: Sequence[TrainingSample],
        device: torch.device,
        plan: Callable[[PackedBatch], StepPlan],
    ) -> None:
        self._samples, self._device, self._plan = samples, device, plan
        self._pinned = device.type == "cuda"
        make_stream: Any = torch.cuda.Stream
        self._stream = make_stream(device) if self._pinned else None
        self.waited_seconds = 0.0
        """Time that the training has waited for its batches."""

    def batches(self, planned: Iterable[list[int]]) -> Generator[ReadyBatch, None, None]:
        """Give the batches in their order."""
        if not self._pinned:
            for indices in planned:
                started = time.monotonic()
                ready = self._prepare(indices)
                self.waited_seconds += time.monotonic() - started
                yield ready
            return
        with ThreadPoolExecutor(1, thread_name_prefix="batch-feed") as thread:
            waiting: deque[Future[ReadyBatch]] = deque()
            for indices in planned:
                waiting.append(thread.submit(self._prepare, indices))
                if len(waiting) > AHEAD:
                    yield self._take(waiting.popleft())
            while waiting:
                yield self._take(waiting.popleft())

    def _prepare(self, indices: list[int]) -> ReadyBatch:
        batch = pack([self._samples[i] for i in indices], pinned=self._pinned)
        plan = self._plan(batch)
        if self._stream is None:
            return ReadyBatch(batch.to(self._device), plan.to(self._device))
        with torch.cuda.stream(self._stream):
            return ReadyBatch(
                batch.to(self._device), plan.to(self._device), self._stream.record_event()
            )

    def _take(self, future: Future[ReadyBatch]) -> ReadyBatch:
        started = time.monotonic()
        ready = future.result()
        self.waited_seconds += time.monotonic() - started
        stream = torch.cuda.current_stream(self._device)
        stream.wait_event(ready.copied)
        for tensor in _tensors([ready.batch, ready.plan]):
            tensor.record_stream(stream)  # its memory is not the copy's any more
        return ready


def _tensors(value: Any) -> Iterator[Tensor]:
    """All tensors within dataclasses and sequences."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _tensors(item)
    elif hasattr(value, "__dataclass_fields__"):
        yield from _tensors(list(vars(value).values()))
