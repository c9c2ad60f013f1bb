"""A job module for the tests of child processes: it does what the request says."""

import os
import signal
import subprocess
import sys
import time
from typing import Any

from tasks.child import ProgressCallback


def run(request: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
    match request["do"]:
        case "echo":
            progress({"half": request["value"]})
            print("a library's chatter")
            return {"value": request["value"], "pid": os.getpid()}
        case "refuse":
            raise ValueError("the value 7 is too large; lower it")
        case "fail":
            raise OSError("the disk went away")
        case "die":
            print("last words", flush=True)
            os.kill(os.getpid(), signal.SIGKILL)
        case "grandchild":
            process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
            return {"pid": process.pid}
        case "sleep":
            time.sleep(600)
    return {}
