"""Job processes forked from one that has imported what they need: the side of the process that wants them.

torch, transformers and speculators take 6 to 15 seconds to import; a fork takes milliseconds and shares their memory.
`spawn` starts the seed (`python -m tasks.seed`) when the first job asks for it, with the environment of that moment.
Another takes its place when a variable that imports read has changed since.
"""

import contextlib
import itertools
import json
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
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
"""That the seed may take to tell of a death."""
LOOK_SECONDS = 0.5
ANSWER_SECONDS = 300.0
"""That it may take to import and to fork: longer, and it is killed."""
UNTOLD = 255
"""Exit status of a process whose own nobody told: its seed is stopped."""
TAKEN_ON = frozenset({"CUDA_VISIBLE_DEVICES", "OMP_NUM_THREADS"})
"""Of these variables a fork may have others than the seed: they count after the imports too."""

Request = dict[str, Any]


class StoppedError(Exception):
    """A process was being waited for when all were told to end (`give_up`)."""


class Forked:
    """A process forked from the seed: the part of `subprocess.Popen` that a `Child` needs.

    OSError when this process has no descriptor left to watch it by.
    """

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
        if self._is_dead(0.0) and not self._ended.wait(EXIT_SECONDS):  # the seed is about to tell
            self.end(UNTOLD)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for its end; subprocess.TimeoutExpired when that does not come in time."""
        until = None if timeout is None else time.monotonic() + timeout
        while not self._ended.wait(LOOK_SECONDS if timeout is None else min(timeout, LOOK_SECONDS)):
            if self.poll() is None and until is not None and time.monotonic() >= until:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
        assert self.returncode is not None
        return self.returncode

    def end(self, returncode: int) -> None:
        """It has ended."""
        with self._looking:
            if self._ended.is_set():
                return
            self.returncode = returncode
            self._ended.set()
            if self._pidfd is not None:
                os.close(self._pidfd)
            self._pidfd = None

    def _is_dead(self, seconds: float) -> bool:
        with self._looking:
            if self._pidfd is None:
                return True
            watched = select.poll()
            watched.register(self._pidfd, select.POLLIN)
            return bool(watched.poll(seconds * 1000))


class Seed:
    """The parent's side of one seed."""

    def __init__(self, process: "subprocess.Popen[str]", connection: socket.socket) -> None:
        self._process, self._connection = process, connection
        self._sending, self._told = threading.Lock(), threading.Condition()
        self._numbers = itertools.count()
        self._asked: set[int] = set()
        self._answers: dict[int, Forked | None] = {}
        self._forked: dict[int, Forked] = {}
        self._given_up = False
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
        """Fork a process that serves the job module of `request`.

        ConnectionError when the seed cannot, has gone or does not answer, StoppedError when it was given up meanwhile.
        """
        number = next(self._numbers)
        message = json.dumps({**request, "number": number}).encode()
        with self._told:
            self._asked.add(number)
        try:
            with self._sending:
                try:
                    socket.send_fds(self._connection, [message], descriptors)
                except OSError as error:
                    raise ConnectionError("the seed has gone") from error
            with self._told:
                answered = self._told.wait_for(
                    lambda: number in self._answers or self.gone, timeout=ANSWER_SECONDS
                )
                if self._given_up:
                    raise StoppedError
                found = self._answers.get(number)
        finally:  # from here on a late answer is nobody's
            with self._told:
                self._asked.discard(number)
                self._answers.pop(number, None)
        if not answered:
            self._process.kill()
        if found is None:
            raise ConnectionError("the seed has gone, does not answer or cannot fork")
        return found

    def close(self) -> None:
        """Let it end; what it has forked goes on until it has ended too."""
        with contextlib.suppress(OSError):
            self._connection.shutdown(socket.SHUT_WR)

    def give_up(self) -> None:
        """Kill it if it is being waited for, and with it what it has forked."""
        with self._told:
            self._given_up = bool(self._asked)
        if self._given_up:
            self._process.kill()

    def _listen(self) -> None:
        while data := self._receive():
            message = json.loads(data)
            if "returncode" in message:
                forked = self._forked.pop(message["pid"], None)
                if forked is not None:
                    forked.end(message["returncode"])
            else:
                self._take(message["number"], message["pid"])
        for forked in self._forked.values():  # the kernel kills them with it
            _kill_group(forked.pid)  # what they have started goes too
            forked.end(-signal.SIGKILL)
        with self._told:
            self.gone = True
            self._told.notify_all()
        self._process.wait()
        self._connection.close()

    def _take(self, number: int, pid: int) -> None:
        """Hand a fork to who asked for it; one that nobody waits for any more, or that cannot be watched, is killed."""
        found = None
        if pid != NOT_FORKED:
            with contextlib.suppress(OSError):
                found = Forked(pid)
        with self._told:
            wanted = number in self._asked
            if wanted:
                self._answers[number] = found
            if found is not None:
                self._forked[pid] = found
            self._told.notify_all()
        if pid != NOT_FORKED and not (wanted and found):
            _kill_group(pid)

    def _receive(self) -> bytes:
        try:
            return self._connection.recv(MESSAGE_BYTES)
        except OSError:
            return b""


def _kill_group(pid: int) -> None:
    with contextlib.suppress(OSError):
        os.killpg(pid, signal.SIGKILL)


_lock = threading.Lock()
_seed: tuple[dict[str, str], Seed] | None = None


def spawn(module: str, environment: dict[str, str], descriptors: Descriptors) -> Forked:
    """Fork a process that serves `module` with these variables on top of this process's own.

    Raises ConnectionError when the seed was lost, where the next call starts another, or cannot fork what is asked
    for, and StoppedError when `give_up` was called meanwhile.
    """
    global _seed  # noqa: PLW0603 - one for the process
    own = [n for n in environment if n.startswith(READ_BY_IMPORTS) and n not in TAKEN_ON]
    if own:
        raise ConnectionError(f"{', '.join(own)} of this job alone are read by imports")
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


def give_up() -> None:
    """End the wait for processes that are being forked: who waits gets StoppedError."""
    if _seed is not None:
        _seed[1].give_up()
