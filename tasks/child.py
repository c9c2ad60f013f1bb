"""Child processes: where torch, transformers and the GPU live, never in the flow's own process.

`Child("tasks.jobs.train")` starts `python -m tasks.child tasks.jobs.train` in a session of its own. Requests go
to its stdin as JSON lines; replies come back through a pipe of their own, so that whatever a library prints
on stdout or stderr is log text and nothing else. A job module has `run(request, progress) -> reply`,
dictionaries both.

A child ends with its parent, however that ends: the kernel kills it (PR_SET_PDEATHSIG). The signal is tied to
the *thread* that started the child, so all children are started by one thread that lives as long as the process.
"""

import contextvars
import ctypes
import importlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, Self

from storage import retries
from storage.artifacts import ArtifactError

logger = logging.getLogger(__name__)

PR_SET_PDEATHSIG = 1  # linux/prctl.h
REPLY_FD = "OUTRIDER_REPLY_FD"
PARENT_PID = "OUTRIDER_PARENT_PID"
TAIL_LINES = 20
DEFAULTS = {
    "PYTHONUNBUFFERED": "1",
    # Threads that wait spin for some microseconds, then sleep: a training step of 512 tokens takes 280 ms on 2 cores,
    # 350 without spinning. libgomp's own 300,000 rounds make two busy processes there 10 to 28 times slower.
    "GOMP_SPINCOUNT": "3000",
    "TOKENIZERS_PARALLELISM": "false",
    # Bars of libraries are drawn for a terminal that a child does not have.
    "HF_HUB_DISABLE_PROGRESS_BARS": "1",
    # speculators warns at every load of a tied or single-file verifier.
    "LOGURU_LEVEL": "ERROR",
}

ProgressCallback = Callable[[dict[str, Any]], None]

_starter = ThreadPoolExecutor(max_workers=1, thread_name_prefix="child-starter")
_children: "weakref.WeakSet[Child]" = weakref.WeakSet()


class JobRefusedError(ValueError):
    """The job found its input wrong: trying again gives the same."""


class JobFailedError(RuntimeError):
    """The job or its process broke: trying again may help."""


FAILURES: dict[str, type[Exception]] = {
    "refused": JobRefusedError,
    "lost": ArtifactError,
    "failed": JobFailedError,
}
"""What becomes of a job's error on the parent's side."""


class Child:
    """One child process that serves requests of one job module until it is closed."""

    def __init__(self, module: str, environment: Mapping[str, str] | None = None) -> None:
        self.module = module
        self._tail: deque[str] = deque(maxlen=TAIL_LINES)
        self._killed = False
        read_fd, write_fd = os.pipe()
        variables = {
            **DEFAULTS,
            **os.environ,
            **(environment or {}),
            REPLY_FD: str(write_fd),
        }
        self._process = start_process(
            [sys.executable, "-m", "tasks.child", module],
            stdin=subprocess.PIPE,
            pass_fds=(write_fd,),
            env=variables,
        )
        os.close(write_fd)
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._requests, self._output = self._process.stdin, self._process.stdout
        self._replies = os.fdopen(read_fd, "r")
        # in this context, so that the lines belong to the task run that started the child
        run_here = contextvars.copy_context().run
        self._log_thread = threading.Thread(target=run_here, args=(self._forward_log,), daemon=True)
        self._log_thread.start()
        _children.add(self)

    @property
    def pid(self) -> int:
        """Process id, which is also its process group's."""
        return int(self._process.pid)

    @property
    def alive(self) -> bool:
        """Whether the process still runs."""
        return self._process.poll() is None

    def request(
        self, request: Mapping[str, Any], progress: ProgressCallback | None = None
    ) -> dict[str, Any]:
        """Send one request and wait for its reply; `progress` gets every message on the way.

        Raises JobRefusedError when the job calls its input wrong, ArtifactError when what it needs of the store has
        gone or is corrupt, JobFailedError when it or its process broke.
        """
        try:
            self._requests.write(json.dumps(request) + "\n")
            self._requests.flush()
        except (BrokenPipeError, OSError) as error:
            raise self._died() from error
        for line in self._replies:
            message = json.loads(line)
            if "progress" in message:
                if progress is not None:
                    progress(message["progress"])
            elif "error" in message:
                logger.debug("%s", message["traceback"])
                raise FAILURES[message["kind"]](message["error"])
            else:
                reply: dict[str, Any] = message["reply"]
                return reply
        raise self._died()

    def close(self) -> None:
        """End the process and all it started; a process that is idle leaves by itself."""
        try:
            self._requests.close()
            self._process.wait(timeout=2)
        except (subprocess.TimeoutExpired, OSError):
            pass
        finally:
            self.kill()
            self._process.wait()
            self._log_thread.join(timeout=2)
            self._replies.close()
            self._output.close()

    def kill(self) -> None:
        """SIGKILL to the whole process group; a request that is under way is refused, not worth a retry."""
        self._killed = True
        try:
            os.killpg(self._process.pid, signal.SIGKILL)
        except (ProcessLookupError, PermissionError):
            return

    def __enter__(self) -> Self:
        """Use as a context manager: the process ends with the block."""
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        """End the process, at once when the block failed."""
        if kind is not None:
            self.kill()
        self.close()

    def _forward_log(self) -> None:
        for line in self._output:
            text = line.rstrip()
            if text:
                self._tail.append(text)
                logger.info("[%s %d] %s", self.module.rsplit(".", 1)[-1], self.pid, text)

    def _died(self) -> JobFailedError | JobRefusedError:
        code = self._process.wait()
        if self._killed:
            return JobRefusedError(f"{self.module} (process {self.pid}) was stopped")
        self._log_thread.join(timeout=2)
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        said = "; its last lines: " + " | ".join(self._tail) if self._tail else ""
        return JobFailedError(
            f"{self.module} (process {self.pid}) ended by {how} in mid-work{said}"
        )


def kill_children() -> None:
    """End all children of this process at once: for a run that was stopped, whose threads wait for them."""
    for child in list(_children):
        if child.alive:
            child.kill()


def start_process(
    command: list[str], *, env: Mapping[str, str], **options: Any
) -> "subprocess.Popen[str]":
    """Start a process that `die_with_parent` may call in: in a session of its own, output piped together."""

    def start() -> "subprocess.Popen[str]":
        return subprocess.Popen(
            command,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            text=True,
            env={**env, PARENT_PID: str(os.getpid())},
            **{"stdout": subprocess.PIPE, **options},
        )

    return _starter.submit(start).result()


def die_with_parent() -> None:
    """Ask the kernel to kill this process when its parent ends (Linux), and leave if it has ended already."""
    if sys.platform == "linux":
        ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    expected = os.environ.get(PARENT_PID)
    if expected is not None and os.getppid() != int(expected):
        sys.exit(1)


def _kind_of(error: Exception) -> str:
    if isinstance(error, ArtifactError):
        return "lost"
    # another try finds a full disk as full
    lasting = isinstance(error, ValueError) or retries.FULL_WAY_OUT in str(error)
    return "refused" if lasting else "failed"


def serve(module: str) -> None:
    """The child's side: answer requests from stdin until it closes."""
    die_with_parent()
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run = importlib.import_module(module).run
    with os.fdopen(int(os.environ[REPLY_FD]), "w", buffering=1) as replies:

        def send(message: dict[str, Any]) -> None:
            replies.write(json.dumps(message) + "\n")

        for line in sys.stdin:
            try:
                send({"reply": run(json.loads(line), lambda done: send({"progress": done}))})
            except Exception as error:
                send(
                    {
                        "error": str(error) or type(error).__name__,
                        "kind": _kind_of(error),
                        "traceback": traceback.format_exc(),
                    }
                )


if __name__ == "__main__":
    serve(sys.argv[1])
