"""The other processes of a training on several GPUs: started by the first one, and gone with it."""

import logging
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch

from tasks.child import Child, JobRefusedError
from tasks.eagle3.ranks import ALONE, Ranks

logger = logging.getLogger(__name__)

LOST_ANOTHER = 70
"""Exit status of a first process that cannot go on: one of the others broke."""
LOSS_SECONDS = 2.0
"""What the loss of a process breaks in the first one may be seen there before the loss itself."""
GRACE_SECONDS = 30.0
"""What one process refuses, the first one is about to refuse too, in its own words."""


@contextmanager
def joined(request: dict[str, Any], module: str, *, count: int) -> Iterator[Ranks]:
    """Be one of `count` processes for the length of the block; the first one starts the others.

    They get the same request with their place in it. Where one of them breaks, the first process ends: it may be
    waiting for that one in the middle of a step. Whoever started it tries again, from the last checkpoint.
    """
    if count == 1:
        yield ALONE
        return
    # all are on this machine, whatever its name resolves to
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(_threads(count))
    if "place" in request:
        with _met(request["place"]["rank"], count, request["place"]["meeting"]) as ranks:
            yield ranks
        return
    with (
        tempfile.TemporaryDirectory(prefix="outrider-ranks-") as scratch,
        _others(request, module, count=count, meeting=str(Path(scratch, "meeting"))) as meeting,
        _met(0, count, meeting) as ranks,
    ):
        yield ranks


@contextmanager
def _met(rank: int, count: int, meeting: str) -> Iterator[Ranks]:
    ranks = Ranks.join(rank, count, meeting)
    try:
        yield ranks
    finally:
        ranks.leave()


@contextmanager
def _others(request: dict[str, Any], module: str, *, count: int, meeting: str) -> Iterator[str]:
    """Have all but the first process at work; at the end of the block they have ended too."""
    environment = {"OMP_NUM_THREADS": str(_threads(count))}
    given_up = threading.Event()

    def watch(child: Child, rank: int) -> None:
        try:
            child.request({**request, "place": {"rank": rank, "meeting": meeting}})
        except Exception as error:
            grace = GRACE_SECONDS if isinstance(error, JobRefusedError) else 0.0
            if not given_up.wait(grace):
                logger.error("process %d of %d ended: %s", rank, count, error)
                os._exit(LOST_ANOTHER)

    with ExitStack() as stack:
        children = [stack.enter_context(Child(module, environment)) for _ in range(1, count)]
        threads = [
            threading.Thread(target=watch, args=(child, rank), daemon=True)
            for rank, child in enumerate(children, start=1)
        ]
        for thread in threads:
            thread.start()
        try:
            yield meeting
        except BaseException as error:
            # where another is lost, its thread says so now and ends this process
            if isinstance(error, (RuntimeError, OSError)):
                given_up.wait(LOSS_SECONDS)
            given_up.set()
            raise
        for thread in threads:
            thread.join()


def _threads(count: int) -> int:
    return max(1, (os.cpu_count() or 1) // count)
