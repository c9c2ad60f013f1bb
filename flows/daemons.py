"""Processes that go on after the command that started them, recorded in a directory so that another one stops them."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Daemon:
    """One process by its name: `<name>.json` in the directory holds its pid, `<name>.log` what it said."""

    name: str
    directory: Path

    @property
    def log(self) -> Path:
        """What it printed, this time and before."""
        return self.directory / f"{self.name}.log"

    @property
    def _record(self) -> Path:
        return self.directory / f"{self.name}.json"

    def pid(self) -> int | None:
        """Its pid while it runs; None when it has ended, or another process has that pid by now.

        Raises RuntimeError when the record cannot be read.
        """
        values = self._read()
        return int(values["pid"]) if values is not None else None

    def address(self) -> str | None:
        """Where it is to be found while it runs, as it was started with."""
        values = self._read()
        return str(values["address"]) if values and values.get("address") else None

    def _read(self) -> dict[str, Any] | None:
        """The record of the process; None when it does not run."""
        try:
            values: dict[str, Any] = json.loads(self._record.read_text())
            lives = _began(int(values["pid"])) == values["began"]
        except FileNotFoundError:
            return None
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise RuntimeError(
                f"{self._record} cannot be read ({error!r}), so whether the {self.name} runs is unknown: if "
                f"`ps -ef` shows a `prefect {self.name} start`, end it, then delete the file"
            ) from error
        return values if lives else None

    def start(
        self, command: Sequence[str], environment: Mapping[str, str], *, address: str = ""
    ) -> int:
        """Start it in a session of its own, unless it runs; returns its pid."""
        running = self.pid()
        if running is not None:
            return running
        with self.log.open("ab") as log:
            process = subprocess.Popen(
                command,
                env=dict(environment),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        values = {"pid": process.pid, "began": _began(process.pid), "address": address}
        new = self._record.with_suffix(".new")
        try:
            new.write_text(json.dumps(values | {"command": list(command)}))
            new.replace(self._record)
        except OSError:  # without a record nobody would ever stop it
            os.killpg(process.pid, signal.SIGKILL)
            raise
        return process.pid

    def stop(self, *, seconds: float) -> bool:
        """End it by SIGTERM, after so many seconds its session by SIGKILL; False when it did not run."""
        pid = self.pid()
        if pid is not None:
            os.kill(pid, signal.SIGTERM)
            until = time.monotonic() + seconds
            while self.pid() is not None and time.monotonic() < until:
                _reap(pid)
                time.sleep(0.1)
            if self.pid() is not None:
                os.killpg(pid, signal.SIGKILL)
                _reap(pid)
        self._record.unlink(missing_ok=True)
        return pid is not None

    def last_words(self) -> str:
        """The end of its log, in one line."""
        try:
            return " ".join(self.log.read_text(errors="replace").split())[-500:]
        except OSError:
            return ""


def _began(pid: int) -> str | None:
    """When a process started, as text that no other process of that pid has; None when there is none."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        if Path("/proc/self").exists():
            return None
        said = subprocess.run(  # a system without /proc
            ["/bin/ps", "-o", "lstart=", "-p", str(pid)],
            capture_output=True,
            text=True,
            check=False,
        )
        return said.stdout.strip() or None
    return None if fields[0] == "Z" else fields[19]  # proc(5): state is field 3, starttime 22


def _reap(pid: int) -> None:
    """Collect a child that has ended; others are collected by whoever started them."""
    try:
        os.waitpid(pid, os.WNOHANG)
    except ChildProcessError:
        return
