"""A job module for the tests of child processes: it does what the request says."""

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tasks.child import ProgressCallback

_may_write = threading.Event()

Reply = dict[str, Any]


def run(  # noqa: C901, PLR0911, PLR0912 - it does many things
    request: dict[str, Any], progress: ProgressCallback
) -> Reply | Callable[[], Reply]:
    match request["do"]:
        case "echo":
            progress({"half": request["value"]})
            print("a library's chatter")
            return {"value": request["value"], "pid": os.getpid()}
        case "print bytes":
            os.write(1, b"\xff\xfe no text\n" * 6_000)
        case "refuse":
            raise ValueError("the value 7 is too large; lower it")
        case "fail":
            raise OSError("the disk went away")
        case "die":
            print("last words", flush=True)
            _end(request.get("status"))
        case "grandchild":
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            return {"pid": process.pid}
        case "detached":
            command = [sys.executable, "-c", "import time; time.sleep(600)"]
            return {"pid": subprocess.Popen(command, start_new_session=True).pid}
        case "die by signal":
            os.kill(os.getpid(), request["number"])
        case "thread":
            threading.Thread(target=_write_later, args=(Path(request["path"]),)).start()
        case "random":
            return _random()
        case "write behind":
            progress({"computing": True})
            return lambda: {"written": _may_write.wait(timeout=60)}
        case "refuse behind":
            return _refuse
        case "let it write":
            _may_write.set()
        case "sleep":
            time.sleep(600)
        case "surroundings":
            return _surroundings()
    return {}


def _write_later(path: Path) -> None:
    time.sleep(0.5)
    path.write_text("written")


def _random() -> Reply:
    import numpy as np
    import torch

    return {"numpy": np.random.rand(), "torch": torch.rand(1).item()}


def _end(status: int | None) -> None:
    if status is None:
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        os._exit(status)


def _surroundings() -> Reply:
    import torch

    return {
        "environment": dict(os.environ),
        "directory": str(Path.cwd()),
        "threads": torch.get_num_threads(),
    }


def _refuse() -> Reply:
    raise ValueError("no room for the file; make some")
