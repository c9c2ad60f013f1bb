"""Processes that train one draft together, each on batches of its own (data parallel), by torch.distributed.

A step of W processes is the step of one process on all W batches: counts, losses and gradients are summed, not
averaged, so that a mean is over all supervised rows, whoever has them.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from itertools import cycle, islice
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn import Parameter

TIMEOUT = timedelta(minutes=10)
"""How long one waits for the others: longer than a validation may be apart, shorter than a lost night."""


@dataclass
class Ranks:
    """This process's place among `count` of them; alone it sends nothing."""

    rank: int = 0
    count: int = 1
    _order: list[Parameter] = field(default_factory=list)
    """Parameters in the order in which all processes send their gradients, whatever order a backward makes them in."""
    _made: set[Parameter] = field(default_factory=set)
    _sent: list[Any] = field(default_factory=list)

    @classmethod
    def join(cls, rank: int, count: int, meeting_place: str) -> "Ranks":
        """Wait for all `count` processes of this machine to come; `meeting_place` is a file that is not there yet."""
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
            init_method=f"file://{meeting_place}",
            rank=rank,
            world_size=count,
            timeout=TIMEOUT,
        )
        return cls(rank, count)

    def leave(self) -> None:
        """Let go of the others."""
        if self.count > 1:
            dist.destroy_process_group()

    def mine(self, batches: Sequence[list[int]]) -> Sequence[list[int]]:
        """Return this process's of an epoch's batches: of every `count` in a row one.

        Where the last row is short, first batches are repeated in it, and count nothing: see `repeats`.
        """
        rows = -(-len(batches) // self.count)
        return list(islice(cycle(batches), self.rank, rows * self.count, self.count))

    def repeats(self, step: int, batches: int) -> bool:
        """Tell whether this process's batch of that step of an epoch of so many batches is a repetition."""
        return step * self.count + self.rank >= batches

    def total(self, numbers: Sequence[int]) -> list[int]:
        """Return the sums of all processes' numbers, on the host."""
        if self.count == 1:
            return list(numbers)
        summed = torch.tensor(numbers)
        dist.all_reduce(summed)
        return summed.tolist()

    def sum(self, values: dict[str, Tensor]) -> dict[str, Tensor]:
        """Return the sums of all processes' scalars of equal names, on their device."""
        if self.count == 1:
            return values
        stacked = torch.stack([value.detach().double() for value in values.values()])
        dist.all_reduce(stacked)
        return dict(zip(values, stacked.unbind(), strict=True))

    def first(self, value: float) -> float:
        """Return the first process's value: what all of them then decide by."""
        if self.count == 1:
            return value
        told = torch.tensor(value, dtype=torch.float64)
        dist.broadcast(told, src=0)
        return float(told)

    def send_gradients(self, parameters: Iterable[Parameter]) -> None:
        """From now on sum each gradient over all processes while the backward goes on."""
        if self.count == 1:
            return
        self._order = list(parameters)[::-1]  # about as a backward makes them
        for parameter in self._order:
            when_made: Any = parameter.register_post_accumulate_grad_hook
            when_made(self._send_made)

    def receive_gradients(self) -> None:
        """Wait, on a GPU without the host, until the gradients of the last backward are summed."""
        for parameter in self._order[len(self._sent) :]:
            if parameter.grad is None:  # this process's batch did not need it, another one's did
                parameter.grad = torch.zeros_like(parameter)
            self._send_made(parameter)
        for sent in self._sent:
            sent.wait()
        self._made.clear()
        self._sent.clear()

    def _send_made(self, parameter: Any) -> None:
        self._made.add(parameter)
        while len(self._sent) < len(self._order) and self._order[len(self._sent)] in self._made:
            gradient: Any = self._order[len(self._sent)].grad
            self._sent.append(dist.all_reduce(gradient, async_op=True))

    def check_same(self, step: int) -> None:
        """Raise RuntimeError unless all processes go on after the same step."""
        if self.total([step])[0] != step * self.count:
            raise RuntimeError(
                f"process {self.rank} of {self.count} goes on after step {step}, another one elsewhere; "
                "run again: all then read the newest checkpoint"
            )


ALONE = Ranks()
