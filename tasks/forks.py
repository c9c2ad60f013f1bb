"""Job processes forked from one that has imported what they need: the side of the process that wants them.

torch, transformers and speculators take 6 to 15 seconds to import; a fork takes milliseconds and shares their memory.
`spawn` starts the seed (`python -m tasks.seed`) when the first job asks for it, with the environment of that moment.
Another takes its place when a variable that imports read has changed since.
"""

import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

from tasks.processes import DEFAULTS, Descriptors, start_process

AVAILABLE = hasattr(os, "pidfd_open") and sys.platform == "linux"
READ_BY_IMPORTS = (
    "CUDA_", "GOMP_", "HF_", "HOME", "HUGGINGFACE_", "LOGURU_", "MKL_", "OMP_", "PYTHON", "PYTORCH_", "TOKENIZERS_",
    "TORCH", "TRANSFORMERS_", "TRITON_", "XDG_",
)  # fmt: skip
"""How the names of variables begin that libraries read when they are imported."""
ROOM = "-" * 100
"""A fork shows its own command in the place of the seed's."""
MESSAGE_BYTES = 1 << 20
NOT_FORKED = -1
"""What the seed tells instead of a process id when the system has no process, memory or descriptors left."""
EXIT_SECONDS = 5.0

Request = dict[str, Any]


class Forked:
    """A process forked from the seed: the part of `subprocess.Popen` that a `Child` needs."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended, self._looking = threading.Event(), threading.Lock()
        try:
            self._pidfd: int | None = os.pidfd_open(pid)
        except ProcessLookupError:  # it has ended, and the seed has waited for it
            self._pidfd = None

    def poll(self) -> int | None:
        """Exit status, as Popen gives it, or None while it runs."""
        with self._looking:
            dead = self._pidfd is None or select.select([self._pidfd], [], [], 0)[0]
        if dead:
            self._ended.wait(EXIT_SECONDS)  # the seed is about to tell
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired when that does not come in time."""
        if not self._ended.wait(timeout):
            raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def end(self, returncode: int) -> None:
        """It has ended."""
        self.returncode = returncode
        self._ended.set()
        with self._looking:
            if self._pidfd is not None:
                os.close(self._pidfd)
            self._pidfd = None


class Seed:
    """The parent's side of one seed."""

    def __init__(self, process: "subprocess.Popen[str]", connection: socket.socket) -> None:
        self._process, self._connection = process, connection
        self._forked: dict[int, Forked] = {}
        self._asked, self._told = threading.Lock(), threading.Condition()
        self._newest: Forked | None = None
        self._answered = False
        self.gone = False
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    def start(cls, variables: dict[str, str]) -> "Seed":
        """Start one; it imports while the first request waits."""
        ours, its = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with its:
            process = start_process(
                [sys.executable, "-m", "tasks.seed", str(its.fileno()), ROOM],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=(its.fileno(),),
                env=variables,
            )
        return cls(process, ours)

    def spawn(self, request: Request, descriptors: list[int]) -> Forked:
        """Fork a process that serves the job module of `request`; ConnectionError when the seed cannot or has gone."""
        with self._asked:
            try:
                socket.send_fds(self._connection, [json.dumps(request).encode()], descriptors)
            except OSError as error:
                raise ConnectionError("the seed has gone") from error
            with self._told:
                self._told.wait_for(lambda: self._answered or self.gone)
                found, self._newest, self._answered = self._newest, None, False
        if found is None:
            raise ConnectionError("the seed has gone or cannot fork")
        return found

    def close(self) -> None:
        """Let it end; what it has forked goes on until it has ended too."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def _listen(self) -> None:
        while data := self._receive():
            message = json.loads(data)
            if "returncode" in message:
                self._forked.pop(message["pid"]).end(message["returncode"])
            else:
                with self._told:
                    self._answered = True
                    if message["pid"] != NOT_FORKED:
                        self._newest = self._forked[message["pid"]] = Forked(message["pid"])
                    self._told.notify_all()
        for forked in (
            self._forked.values()
        ):  # the kernel kills them with it; what they have started goes too
            with contextlib.suppress(OSError):
                os.killpg(forked.pid, signal.SIGKILL)
            forked.end(-signal.SIGKILL)
        with self._told:
            self.gone = True
            self._told.notify_all()
        self._process.wait()
        self._connection.close()

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(MESSAGE_BYTES)
        except OSError:
            return b""


_lock = threading.Lock()
_seed: tuple[dict[str, str], Seed] | None = None


def spawn(module: str, environment: dict[str, str], descriptors: Descriptors) -> Forked:
    """Fork a process that serves `module` with these variables on top of this process's own.

    Raises ConnectionError when the seed was lost, where the next call starts another, or cannot fork.
    """
    global _seed  # noqa: PLW0603 - one for the process
    variables = {**DEFAULTS, **os.environ}
    read = {name: value for name, value in variables.items() if name.startswith(READ_BY_IMPORTS)}
    with _lock:
        if _seed is not None and (_seed[0] != read or _seed[1].gone):
            _seed[1].close()
            _seed = None
        if _seed is None:
            _seed = read, Seed.start(variables)
        seed = _seed[1]
    request = {
        "module": module,
        "environment": {**variables, **environment},
        "directory": str(Path.cwd()),
    }
    return seed.spawn(request, list(descriptors))
