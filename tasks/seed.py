"""The seed: a process that has imported what jobs need and is forked for each of them (`tasks.forks`).

It runs no job, no threads but those that libraries start with their import (and know to restart in a fork), and touches
no GPU. It ends with the process that started it, and its forks end with it.
"""

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import selectors
import socket
import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tasks import child
from tasks.child import REPLY_FD
from tasks.forks import MESSAGE_BYTES, NOT_FORKED, Request
from tasks.processes import PARENT_PID, die_with_parent

PRELOADED = (
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.tokenization_auto",
    "tasks.eagle3.draft",
)
DESCRIPTORS = 3
"""Of a job: what it reads its requests from, prints to, and replies to."""
ARGUMENTS = (48, 49)
"""Fields of /proc/PID/stat (proc(5)) with the addresses of a process's arguments."""


def preload() -> None:
    """Import what jobs need, for good."""
    for module in PRELOADED:
        with contextlib.suppress(Exception):  # a job that needs it says what is wrong
            importlib.import_module(module)
    gc.collect()
    gc.freeze()  # no collection in a fork looks at, and so copies, what was imported


def serve(connection: socket.socket) -> Request | None:
    """Fork for every request; returns the request in a fork, None when there are no more."""
    seed, waiting = os.getpid(), dict[int, int]()
    asked = True
    with selectors.DefaultSelector() as ready:
        ready.register(connection, selectors.EVENT_READ)
        while asked or waiting:
            for key, _ in ready.select():
                if key.data is not None:
                    ready.unregister(key.fd)
                    os.close(key.fd)
                    del waiting[key.data]
                    status = os.waitstatus_to_exitcode(os.waitpid(key.data, 0)[1])
                    _tell(connection, {"pid": key.data, "returncode": status})
                    continue
                data, descriptors, *_ = socket.recv_fds(connection, MESSAGE_BYTES, DESCRIPTORS)
                if not data:
                    asked = False
                    ready.unregister(connection)
                    continue
                request = json.loads(data)
                pid = _fork(descriptors)
                if pid == 0:
                    os.setpgid(0, 0)
                    connection.close()
                    for descriptor in waiting.values():
                        os.close(descriptor)
                    return {**request, "seed": seed, "descriptors": list(descriptors)}
                for descriptor in descriptors:
                    os.close(descriptor)
                if pid != NOT_FORKED:
                    with contextlib.suppress(OSError):  # the fork itself was faster
                        os.setpgid(pid, pid)
                    waiting[pid] = os.pidfd_open(pid)
                    ready.register(waiting[pid], selectors.EVENT_READ, pid)
                _tell(connection, {"number": request["number"], "pid": pid})
    return None


def _fork(descriptors: Sequence[int]) -> int:
    """Fork; NOT_FORKED when the system has no process, memory or descriptors left: other jobs are not to suffer."""
    if len(descriptors) < DESCRIPTORS:
        return NOT_FORKED
    try:
        return os.fork()
    except OSError:
        return NOT_FORKED


def become(request: Request) -> None:
    """Take on what makes a fork the process that was asked for: its streams, environment, threads and name."""
    given, printed, replied = request["descriptors"]
    for source, target in ((given, 0), (printed, 1), (printed, 2)):
        os.dup2(source, target)
    os.close(given)
    os.close(printed)
    os.environ.clear()
    os.environ.update(request["environment"])
    os.environ.update({PARENT_PID: str(request["seed"]), REPLY_FD: str(replied)})
    os.chdir(request["directory"])
    _show_command([sys.executable, "-m", "tasks.child", request["module"]])
    if "torch" in sys.modules:
        _take_on_threads(sys.modules["torch"])
        sys.modules["torch"].default_generator.seed()  # or unseeded draws were the same in all
        sys.modules["numpy"].random.seed()


def _take_on_threads(torch: Any) -> None:
    """As OpenMP reads it: the first of a list, what is no number is passed over; no more than there are cores."""
    threads = os.environ.get("OMP_NUM_THREADS", "").split(",")[0].strip()
    if threads.isdecimal() and int(threads):
        torch.set_num_threads(min(int(threads), os.cpu_count() or 1))


def _show_command(words: list[str]) -> None:
    """Let `ps` and what holds a GPU show these words: written over the seed's own, whose last one makes room."""
    after_name = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = (int(after_name[field - 3]) for field in ARGUMENTS)
    shown = b"".join(word.encode() + b"\0" for word in words)[: end - start - 1]
    ctypes.memmove(start, shown.ljust(end - start, b"\0"), end - start)


def _tell(connection: socket.socket, message: Mapping[str, Any]) -> None:
    with contextlib.suppress(OSError):  # nobody listens any more
        connection.send(json.dumps(message).encode())


if __name__ == "__main__":
    die_with_parent()
    preload()
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    if wanted is not None:
        become(wanted)
        child.serve(wanted["module"])
        # Not by taking down the interpreter: that touches, and so copies, all that is shared with the seed.
        threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
        atexit._run_exitfuncs()
        sys.stdout.flush()
        os._exit(0)
