"""States on their way from a GPU to the host, in streams beside its compute. On a CPU plain copies."""

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from typing import Any

import torch
from torch import Tensor


def beside(device: torch.device, purpose: str) -> AbstractContextManager[Any]:
    """Where work goes that fills what the current stream leaves of a GPU: one stream for each purpose."""
    return torch.cuda.stream(_stream(device, purpose)) if device.type == "cuda" else nullcontext()


@cache
def _stream(device: torch.device, _purpose: str) -> Any:
    make_stream: Any = torch.cuda.Stream
    return make_stream(device)


def make_room(like: Tensor, rows: int) -> Tensor:
    """Memory of the host for so many rows of its kind; page-locked for a GPU's copies."""
    locked = like.device.type == "cuda"
    return torch.empty(rows, *like.shape[1:], dtype=like.dtype, pin_memory=locked)


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Send a tensor of the host to `device` without waiting for what a GPU has to do before."""
    if device.type == "cuda":
        return tensor.pin_memory().to(device, non_blocking=True)
    return tensor.to(device)


class Copying:
    """Tensors that hold the rows of some samples, copied to the host, each sample's rows to where they start there."""

    def __init__(
        self,
        sources: Sequence[Tensor],
        targets: Sequence[Tensor],
        starts: Sequence[int],
        lengths: Sequence[int],
    ) -> None:
        """Begin. The samples lie side by side in each source, in the order of `starts` and `lengths`."""
        self._rows = sum(lengths)
        pieces = list(_pieces(starts, lengths))
        pairs = zip(sources, targets, strict=True)
        self._events = [_copy(source, target, pieces) for source, target in pairs]

    def wait(self) -> int:
        """Return, once they are there, how many rows it was."""
        for event in self._events:
            if event is not None:
                event.synchronize()
        return self._rows


def _pieces(starts: Sequence[int], lengths: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """First row here, first row there and length of what can be copied at once: neighbors are neighbors there too."""
    here = begun = 0
    for i, length in enumerate(lengths):
        here += length
        if i + 1 == len(lengths) or starts[i + 1] != starts[i] + length:
            size = here - begun
            yield begun, starts[i] + length - size, size
            begun = here


def _copy(source: Tensor, target: Tensor, pieces: Sequence[tuple[int, int, int]]) -> Any:
    """Copy rows to the host; from a GPU in a stream beside its compute: returns the event of the end."""
    device = source.device
    cuda = device.type == "cuda"
    computed = torch.cuda.current_stream(device).record_event() if cuda else None
    with beside(device, "copies"):
        if computed is not None:
            computed.wait()
        for here, there, size in pieces:
            target[there : there + size].copy_(source[here : here + size], non_blocking=cuda)
        if computed is None:
            return None
        stream = torch.cuda.current_stream(device)
        source.record_stream(stream)  # whose memory is free again only then
        return stream.record_event()
