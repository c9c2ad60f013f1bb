"""Processes that outlive the command that started them: what a record says of one that has ended, or cannot say."""

import json
import os
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from flows.daemons import Daemon
from tests.tiny_runs import wait_for

pytestmark = [
    # nobody waits for a process that is to outlive its starter
    pytest.mark.filterwarnings("ignore:subprocess .* is still running:ResourceWarning"),
    pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning"),
]

SLEEP = [sys.executable, "-c", "import time; time.sleep(600)"]
STUBBORN = [
    sys.executable,
    "-c",
    "import signal, time\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nprint('deaf', flush=True)\ntime.sleep(600)",
]


def test_a_process_is_found_by_another_command_and_started_once(tmp_path: Path) -> None:
    pid = Daemon("one", tmp_path).start(SLEEP, os.environ, address="http://here")

    again = Daemon("one", tmp_path)
    assert (again.pid(), again.address()) == (pid, "http://here")
    assert again.start(SLEEP, os.environ) == pid
    assert again.stop(seconds=10)
    wait_for(lambda: ended(pid), seconds=10)
    assert not again.stop(seconds=10)


def test_a_pid_that_another_process_has_by_now_is_not_ended(tmp_path: Path) -> None:
    with subprocess.Popen(SLEEP) as other:
        record = {"pid": other.pid, "began": "12", "address": ""}
        (tmp_path / "one.json").write_text(json.dumps(record))
        one = Daemon("one", tmp_path)

        assert one.pid() is None
        assert not one.stop(seconds=1)
        assert other.poll() is None
        other.kill()


@pytest.mark.parametrize("text", ["", '{"pid": 1', "[]", '{"pid": null, "began": "1"}', "7"])
def test_a_record_that_cannot_be_read_is_named_with_the_way_out(tmp_path: Path, text: str) -> None:
    (tmp_path / "server.json").write_text(text)

    with pytest.raises(RuntimeError, match=r"server\.json cannot be read .* end it, then delete"):
        Daemon("server", tmp_path).pid()


def test_a_process_that_cannot_be_recorded_is_ended(tmp_path: Path) -> None:
    (tmp_path / "one.new").mkdir()  # where the record is written first
    before = {child.pid for child in psutil.Process().children()}

    with pytest.raises(IsADirectoryError):
        Daemon("one", tmp_path).start(SLEEP, os.environ)

    made = [child for child in psutil.Process().children() if child.pid not in before]
    (process,) = made
    wait_for(lambda: ended(process.pid), seconds=10)


def test_one_that_does_not_end_is_killed(tmp_path: Path) -> None:
    one = Daemon("one", tmp_path)
    pid = one.start(STUBBORN, os.environ)
    while "deaf" not in one.last_words():
        assert psutil.pid_exists(pid)

    assert one.stop(seconds=0.5)

    wait_for(lambda: ended(pid), seconds=10)


def ended(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True
