"""Child processes: where torch, transformers and the GPU live, never in the flow's own process.

`Child("tasks.jobs.train")` is a process of its own, forked from one that has imported torch and speculators already
(tasks.forks), or else `python -m tasks.child tasks.jobs.train`. Requests go to its stdin as JSON lines; replies come
back through a pipe of their own, so that whatever a library prints on stdout or stderr is log text and nothing else.

A job module has `run(request, progress) -> reply`, dictionaries both. It may return a function instead, when all that
is left is to write files: it is called, for the reply, in a thread of its own, behind the next request's work.

A child ends with its parent, however that ends: the kernel kills it (tasks.processes).
"""

import contextvars
import importlib
import json
import logging
import os
import queue
import signal
import subprocess
import sys
import threading
import traceback
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from types import TracebackType
from typing import Any, Self

from storage import retries
from storage.artifacts import ArtifactError
from tasks import forks
from tasks.processes import DEFAULTS, Descriptors, Process, die_with_parent, start_process

logger = logging.getLogger(__name__)

REPLY_FD = "OUTRIDER_REPLY_FD"
TAIL_LINES = 20
SWITCH_SECONDS = 0.0005
"""A thread that writes files may not keep the one that a GPU waits for from going on; Python's own is 5 ms."""
ProgressCallback = Callable[[dict[str, Any]], None]
Message = dict[str, Any]

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
        (given, requests), (output, printed), (replies, replied) = (os.pipe() for _ in range(3))
        self._requests = os.fdopen(requests, "w")
        # whatever is printed is read, or the pipe would fill up and the job wait
        self._output = os.fdopen(output, encoding="utf-8", errors="replace")
        self._replies = os.fdopen(replies)
        try:
            self._process = _start(module, dict(environment or {}), (given, printed, replied))
        except BaseException:
            for pipe in (self._requests, self._output, self._replies):
                pipe.close()
            raise
        finally:
            for descriptor in (given, printed, replied):
                os.close(descriptor)
        self._requests_lock, self._inboxes_lock = threading.Lock(), threading.Lock()
        self._inboxes: dict[int, queue.SimpleQueue[Message | None]] = {}
        self._sent, self._ended = 0, False
        # in this context, so that the lines belong to the task run that started the child
        run_here = contextvars.copy_context().run
        self._log_thread = threading.Thread(target=run_here, args=(self._forward_log,), daemon=True)
        self._reply_thread = threading.Thread(target=self._forward_replies, daemon=True)
        self._log_thread.start()
        self._reply_thread.start()
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
        self,
        request: Mapping[str, Any],
        progress: ProgressCallback | None = None,
        computed: Callable[[], None] | None = None,
    ) -> dict[str, Any]:
        """Send one request and wait for its reply; `progress` gets every message on the way.

        `computed` is called once the process can take another request, which may be before this one's files are
        written. Safe to call from several threads.

        Raises JobRefusedError when the job calls its input wrong, ArtifactError when what it needs of the store has
        gone or is corrupt, JobFailedError when it or its process broke.
        """
        with self._inbox() as (number, inbox):
            try:
                with self._requests_lock:
                    self._requests.write(
                        json.dumps({"number": number, "request": dict(request)}) + "\n"
                    )
                    self._requests.flush()
            except (OSError, ValueError) as error:  # the pipe is broken, or closed on this side
                raise self._died() from error
            while (message := inbox.get()) is not None:
                if "progress" in message:
                    if progress is not None:
                        progress(message["progress"])
                elif "computed" in message:
                    if computed is not None:
                        computed()
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
            for thread in (self._log_thread, self._reply_thread):
                thread.join(timeout=2)  # a process that left the group may hold the other end

    def kill(self) -> None:
        """SIGKILL to the whole process group; a request that is under way is refused, not worth a retry."""
        self._killed = self._killed or self.alive  # one that had died by itself is worth a retry
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
        with self._output:
            for line in self._output:
                text = line.rstrip()
                if text:
                    self._tail.append(text)
                    logger.info("[%s %d] %s", self.module.rsplit(".", 1)[-1], self.pid, text)

    @contextmanager
    def _inbox(self) -> Iterator[tuple[int, "queue.SimpleQueue[Message | None]"]]:
        """A request's number and where its messages come; None is the last when the process has ended."""
        inbox: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        with self._inboxes_lock:
            self._sent += 1
            number = self._sent
            self._inboxes[number] = inbox
            if self._ended:
                inbox.put(None)
        try:
            yield number, inbox
        finally:
            with self._inboxes_lock:
                del self._inboxes[number]

    def _forward_replies(self) -> None:
        with self._replies:
            for line in self._replies:
                if not line.endswith("\n"):  # killed while it wrote
                    break
                message = json.loads(line)
                with self._inboxes_lock:
                    inbox = self._inboxes.get(message.pop("number"))
                if inbox is not None:
                    inbox.put(message)
        with self._inboxes_lock:
            self._ended = True
            for inbox in self._inboxes.values():
                inbox.put(None)

    def _died(self) -> JobFailedError | JobRefusedError:
        code = self._process.wait()
        if self._killed:
            return JobRefusedError(f"{self.module} (process {self.pid}) was stopped")
        self._log_thread.join(timeout=2)
        how = f"signal {_signal_name(-code)}" if code < 0 else f"exit status {code}"
        said = "; its last lines: " + " | ".join(self._tail) if self._tail else ""
        return JobFailedError(
            f"{self.module} (process {self.pid}) ended by {how} in mid-work{said}"
        )


def kill_children() -> None:
    """End all children of this process at once: for a run that was stopped, whose threads wait for them."""
    forks.give_up()
    for child in list(_children):
        if child.alive:
            child.kill()


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return str(number)


def _start(module: str, environment: dict[str, str], descriptors: Descriptors) -> Process:
    """Start the process of a job module, forked from the seed where the system can do that."""
    if forks.AVAILABLE:
        try:
            return forks.spawn(module, environment, descriptors)
        except forks.StoppedError as error:
            raise JobRefusedError(f"{module} was stopped before it began") from error
        except (ConnectionError, FileNotFoundError) as error:  # no seed, or no directory any more
            logger.debug("%s: %s starts alone", error, module)
    given, printed, replied = descriptors
    return start_process(
        [sys.executable, "-m", "tasks.child", module],
        stdin=given,
        stdout=printed,
        pass_fds=(replied,),
        env={**DEFAULTS, **os.environ, **environment, REPLY_FD: str(replied)},
    )


def _kind_of(error: Exception) -> str:
    if isinstance(error, ArtifactError):
        return "lost"
    # another try finds a full disk as full
    lasting = isinstance(error, ValueError) or retries.FULL_WAY_OUT in str(error)
    return "refused" if lasting else "failed"


def serve(module: str) -> None:
    """The child's side: answer requests from stdin until it closes."""
    die_with_parent()
    sys.setswitchinterval(SWITCH_SECONDS)
    logging.basicConfig(level=logging.INFO, format="%(message)s", stream=sys.stdout)
    logging.getLogger("httpx").setLevel(logging.WARNING)
    run = importlib.import_module(module).run
    lock = threading.Lock()
    with (
        os.fdopen(int(os.environ[REPLY_FD]), "w", buffering=1) as replies,
        ThreadPoolExecutor(max_workers=1) as behind,
    ):

        def send(number: int, message: Message) -> None:
            with lock:
                replies.write(json.dumps({"number": number, **message}) + "\n")

        before: Future[Any] | None = None
        for line in sys.stdin:
            request = json.loads(line)
            tell = partial(send, request["number"])
            report = partial(_report, tell)
            rest = _answer(partial(run, request["request"], report), tell)
            if rest is not None:
                if before is not None:
                    before.result()  # one at a time: what waits to be written is in memory
                before = behind.submit(_answer, rest, tell)
                tell({"computed": True})


def _report(tell: Callable[[Message], None], done: dict[str, Any]) -> None:
    tell({"progress": done})


def _answer(
    work: Callable[[], Any], tell: Callable[[Message], None]
) -> Callable[[], dict[str, Any]] | None:
    """Tell what `work` gave or how it failed; returns what is left to do behind the next request, if anything is."""
    try:
        result = work()
    except Exception as error:
        tell(
            {
                "error": str(error) or type(error).__name__,
                "kind": _kind_of(error),
                "traceback": traceback.format_exc(),
            }
        )
        return None
    if callable(result):
        rest: Callable[[], dict[str, Any]] = result
        return rest
    tell({"reply": result})
    return None


if __name__ == "__main__":
    serve(sys.argv[1])
