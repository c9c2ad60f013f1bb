import logging
import os
import signal
import subprocess
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tasks.child import Child, JobFailedError, JobRefusedError
from tasks.progress import ProgressMeter
from tasks.worker_pool import WorkerPool

MODULE = "tests.jobs.echo"
PARENT = """
import sys, time
from tasks.child import Child
child = Child("tests.jobs.echo")
print(child.request({"do": "echo", "value": 1})["pid"], flush=True)
child.request({"do": "sleep"})
"""


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until_gone(pid: int, seconds: float = 10) -> bool:
    until = time.monotonic() + seconds
    while is_running(pid) and time.monotonic() < until:
        time.sleep(0.05)
    return not is_running(pid)


def test_a_child_serves_many_requests_and_its_output_is_log_text() -> None:
    seen: list[dict[str, object]] = []
    with Child(MODULE) as child:
        first = child.request({"do": "echo", "value": "a"}, seen.append)
        second = child.request({"do": "echo", "value": [1, 2]}, seen.append)
    assert (first["value"], second["value"]) == ("a", [1, 2])
    assert first["pid"] == second["pid"] == child.pid
    assert seen == [{"half": "a"}, {"half": [1, 2]}]


def test_output_that_is_no_text_is_read_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), Child(MODULE) as child:
        child.request({"do": "print bytes"})  # more than a pipe holds
        assert child.request({"do": "echo", "value": 1})["value"] == 1
    assert "no text" in caplog.text


def test_wrong_input_and_a_broken_job_are_told_apart_and_the_child_lives_on() -> None:
    with Child(MODULE) as child:
        with pytest.raises(JobRefusedError, match="the value 7 is too large; lower it"):
            child.request({"do": "refuse"})
        with pytest.raises(JobFailedError, match="the disk went away"):
            child.request({"do": "fail"})
        assert child.request({"do": "echo", "value": 1})["value"] == 1


def test_a_killed_child_is_an_error_with_the_signal_and_its_last_words() -> None:
    with Child(MODULE) as child:
        with pytest.raises(JobFailedError, match=r"SIGKILL.*last words"):
            child.request({"do": "die"})
        assert not child.alive
        with pytest.raises(JobFailedError):
            child.request({"do": "echo", "value": 1})


def test_a_signal_without_a_name_is_told_by_its_number() -> None:
    with Child(MODULE) as child, pytest.raises(JobFailedError, match="ended by signal 40"):
        child.request({"do": "die by signal", "number": 40})


def test_closing_does_not_wait_for_a_process_that_left_the_group_with_the_output() -> None:
    child = Child(MODULE)
    left = child.request({"do": "detached"})["pid"]
    began = time.monotonic()
    child.close()
    assert time.monotonic() - began < 10
    os.kill(left, signal.SIGKILL)


def test_a_thread_of_a_job_ends_its_work_before_the_process_ends(tmp_path: Path) -> None:
    with Child(MODULE) as child:
        child.request({"do": "thread", "path": str(tmp_path / "file")})
    assert (tmp_path / "file").read_text() == "written"


def test_closing_a_child_ends_what_it_has_started() -> None:
    with Child(MODULE) as child:
        grandchild = child.request({"do": "grandchild"})["pid"]
        assert is_running(grandchild)
    assert wait_until_gone(child.pid)
    assert wait_until_gone(grandchild)


def test_a_child_dies_with_its_parent_however_that_ends() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    pid = int(parent.stdout.readline())
    assert is_running(pid)
    os.kill(parent.pid, signal.SIGKILL)
    parent.communicate()
    assert wait_until_gone(pid)


def test_a_pool_replaces_a_dead_worker_and_leaves_none_behind() -> None:
    with WorkerPool(MODULE, processes=1, gpus_per_process=1) as pool:
        first = pool.request({"do": "echo", "value": 1})["pid"]
        with pytest.raises(JobFailedError):
            pool.request({"do": "die"})
        second = pool.request({"do": "echo", "value": 1})["pid"]
    assert first != second
    assert pool.pids == {first, second}
    assert wait_until_gone(second)
    with pytest.raises(JobRefusedError):
        pool.request({"do": "echo", "value": 1})


def test_a_worker_takes_the_next_request_while_it_writes_what_it_has_computed() -> None:
    computing = threading.Event()
    with (
        WorkerPool(MODULE, processes=1, gpus_per_process=1) as pool,
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(pool.request, {"do": "write behind"}, lambda _: computing.set())
        assert computing.wait(timeout=30)
        # the first one's file is written only once the second is served: one after the other they would time out
        assert pool.request({"do": "let it write"}) == {}
        assert first.result(timeout=30) == {"written": True}


def test_a_worker_that_dies_fails_all_it_had_taken_and_the_next_is_fresh() -> None:
    computing = threading.Event()
    with (
        WorkerPool(MODULE, processes=1, gpus_per_process=1) as pool,
        ThreadPoolExecutor(1) as threads,
    ):
        first = threads.submit(pool.request, {"do": "write behind"}, lambda _: computing.set())
        assert computing.wait(timeout=30)
        with pytest.raises(JobFailedError, match="SIGKILL"):
            pool.request({"do": "die"})
        with pytest.raises(JobFailedError, match="SIGKILL"):
            first.result(timeout=30)
        assert pool.request({"do": "echo", "value": 1})["value"] == 1


def test_an_error_in_what_is_left_to_do_reaches_who_asked() -> None:
    with Child(MODULE) as child:
        with pytest.raises(JobRefusedError, match="no room for the file; make some"):
            child.request({"do": "refuse behind"})
        assert child.request({"do": "echo", "value": 1})["value"] == 1


def test_each_worker_of_a_pool_has_gpus_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    pool = WorkerPool(MODULE, processes=2, gpus_per_process=2)
    assert pool._environment(0)["CUDA_VISIBLE_DEVICES"] == "4,5"
    assert pool._environment(1)["CUDA_VISIBLE_DEVICES"] == "6,7"
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES")
    assert pool._environment(1)["CUDA_VISIBLE_DEVICES"] == "2,3"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    assert pool._environment(0)["CUDA_VISIBLE_DEVICES"] == ""


def test_a_failed_try_takes_back_what_it_has_counted(caplog: pytest.LogCaptureFixture) -> None:
    meter = ProgressMeter("capture", 10, "tokens")
    with caplog.at_level(logging.INFO, "tasks.progress"):
        with suppress(RuntimeError), meter.share() as share:
            share.advance(6)
            raise RuntimeError("the worker died")
        with meter.share() as share:
            share.advance(10)

    logged = [record.getMessage() for record in caplog.records if record.name == "tasks.progress"]
    assert [line.split(" (")[0] for line in logged] == ["capture: 10 of 10 tokens"]
