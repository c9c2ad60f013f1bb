"""The process that jobs are forked from: what it shares, when another takes its place, and what its loss means."""

import contextlib
import os
import resource
import signal
import threading
import time
from pathlib import Path

import psutil
import pytest

from tasks import forks
from tasks.child import Child, JobFailedError, JobRefusedError, kill_children
from tests.tasks.test_child import MODULE, wait_until_gone

pytestmark = pytest.mark.skipif(not forks.AVAILABLE, reason="needs Linux's pidfd")


def seed_of(child: Child) -> int:
    return psutil.Process(child.pid).ppid()


def test_jobs_are_forks_of_one_process_and_show_their_own_command():
    with Child(MODULE) as first:
        open_files = psutil.Process(seed_of(first)).num_fds()
        second = Child(MODULE)
        assert first.pid != second.pid
        assert seed_of(first) == seed_of(second) != os.getpid()
        assert psutil.Process(first.pid).cmdline()[1:4] == ["-m", "tasks.child", MODULE]
        # the seed keeps no pipe of theirs, only what tells it that they have ended
        assert psutil.Process(seed_of(first)).num_fds() == open_files + 1
        second.close()
        assert psutil.Process(seed_of(first)).num_fds() == open_files


def test_a_job_has_the_environment_directory_and_threads_of_now(monkeypatch, tmp_path):
    monkeypatch.setenv("OUTRIDER_TEST", "now")
    monkeypatch.chdir(tmp_path)
    with Child(MODULE, {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "5"}) as child:
        found = child.request({"do": "surroundings"})
    assert found["directory"] == str(tmp_path)
    assert found["threads"] == 1
    assert found["environment"]["OUTRIDER_TEST"] == "now"
    assert found["environment"]["CUDA_VISIBLE_DEVICES"] == "5"


@pytest.mark.parametrize("value", ["garbage", "-1", "0", ""])
def test_a_number_of_threads_that_is_none_is_passed_over(value):
    with Child(MODULE, {"OMP_NUM_THREADS": value}) as child:
        assert child.request({"do": "surroundings"})["threads"] >= 1


@pytest.mark.parametrize(("value", "threads"), [("1,2", 1), ("1000", os.cpu_count())])
def test_of_a_list_of_threads_the_first_counts_and_cores_are_the_limit(value, threads):
    with Child(MODULE, {"OMP_NUM_THREADS": value}) as child:
        assert child.request({"do": "surroundings"})["threads"] == threads


def test_a_variable_of_one_job_that_imports_read_counts(tmp_path):
    with Child(MODULE, {"HF_HOME": str(tmp_path)}) as child:
        assert seed_of(child) == os.getpid()  # it is no fork
        assert child.request({"do": "surroundings"})["environment"]["HF_HOME"] == str(tmp_path)


def test_what_is_drawn_without_a_seed_differs_from_fork_to_fork():
    found = []
    for _ in range(2):
        with Child(MODULE) as child:
            found.append(child.request({"do": "random"}))
    assert found[0]["numpy"] != found[1]["numpy"]
    assert found[0]["torch"] != found[1]["torch"]


@pytest.fixture
def importing_seed(monkeypatch, tmp_path):
    """The next job needs a seed that has yet to import everything."""
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))


def test_a_wait_that_is_broken_off_leaves_its_answer_to_nobody_else(importing_seed):
    def ring(*_):
        raise TimeoutError("rung")

    before = signal.signal(signal.SIGALRM, ring)
    try:
        signal.setitimer(signal.ITIMER_REAL, 1.0)
        with pytest.raises(TimeoutError, match="rung"):
            Child(MODULE)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    with Child(MODULE) as first, Child(MODULE) as second:
        for child in (first, second):
            assert child.alive
            assert child.request({"do": "echo", "value": 1})["pid"] == child.pid
        jobs = {one.pid for one in psutil.Process(seed_of(first)).children()}
        assert jobs == {first.pid, second.pid}


def test_stopping_all_jobs_ends_the_wait_for_one_that_is_not_there_yet(importing_seed):
    threading.Timer(1.0, kill_children).start()
    began = time.monotonic()
    with pytest.raises(JobRefusedError, match="was stopped before it began"):
        Child(MODULE)
    assert time.monotonic() - began < 4
    with Child(MODULE) as child:  # another run of this process may have jobs
        assert child.request({"do": "echo", "value": 1})["value"] == 1


@pytest.mark.parametrize("free", range(5, 12))
def test_without_descriptors_a_job_is_refused_and_later_ones_are_not(free):
    with Child(MODULE) as child:
        assert child.alive
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = psutil.Process().num_fds()
    highest = max(int(path.name) for path in Path("/proc/self/fd").iterdir())
    filler = [os.dup(0) for _ in range(max(0, highest - used))]  # no gaps below the limit
    resource.setrlimit(resource.RLIMIT_NOFILE, (psutil.Process().num_fds() + free, limits[1]))
    try:
        with contextlib.suppress(OSError), Child(MODULE) as child:
            assert child.request({"do": "echo", "value": 1})["value"] == 1
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for descriptor in filler:
            os.close(descriptor)
    with Child(MODULE) as child:
        assert child.request({"do": "echo", "value": 1})["value"] == 1


def test_the_death_of_a_job_is_seen_although_its_seed_is_stopped(monkeypatch):
    monkeypatch.setattr(forks, "EXIT_SECONDS", 0.5)
    monkeypatch.setattr(forks, "ANSWER_SECONDS", 2.0)
    child = Child(MODULE)
    seed = seed_of(child)
    os.kill(seed, signal.SIGSTOP)
    os.kill(child.pid, signal.SIGKILL)
    began = time.monotonic()
    with pytest.raises(JobFailedError, match="exit status 255"):
        child.request({"do": "sleep"})
    child.close()
    # one that does not answer is given up, and the job starts alone
    with Child(MODULE) as alone:
        assert seed_of(alone) == os.getpid()
    assert time.monotonic() - began < 20
    assert wait_until_gone(seed)


def test_a_job_is_watched_with_more_descriptors_than_select_takes():
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2000), limits[1]))
    many = [os.dup(0) for _ in range(1100)]
    try:
        with Child(MODULE) as child:
            assert child.alive
    finally:
        for descriptor in many:
            os.close(descriptor)
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_a_variable_that_imports_read_gets_another_seed_and_others_do_not(monkeypatch, tmp_path):
    with Child(MODULE) as child:
        before = seed_of(child)
        monkeypatch.setenv("OUTRIDER_TEST", "other")
        with Child(MODULE) as same:
            assert seed_of(same) == before
        monkeypatch.setenv("HF_HOME", str(tmp_path))
        with Child(MODULE) as other:
            assert seed_of(other) != before
        assert child.request({"do": "echo", "value": 1})["value"] == 1  # its seed stays for it
    assert wait_until_gone(before)


def test_with_the_seed_its_jobs_are_lost_and_the_next_job_has_another():
    with Child(MODULE) as child:
        lost = seed_of(child)
        os.kill(lost, signal.SIGKILL)
        with pytest.raises(JobFailedError, match="SIGKILL"):
            child.request({"do": "sleep"})
        assert not child.alive
        assert wait_until_gone(child.pid)
    with Child(MODULE) as child:
        assert seed_of(child) not in {lost, os.getpid()}
        assert child.request({"do": "echo", "value": 1})["value"] == 1


def test_the_exit_status_of_a_job_is_told():
    with Child(MODULE) as child, pytest.raises(JobFailedError, match="exit status 7"):
        child.request({"do": "die", "status": 7})


def test_a_seed_that_cannot_fork_goes_on_and_the_job_starts_alone():
    with Child(MODULE) as child:
        limits = psutil.Process(seed_of(child))
        before = limits.rlimit(psutil.RLIMIT_NOFILE)
        limits.rlimit(psutil.RLIMIT_NOFILE, (limits.num_fds(), before[1]))
        with Child(MODULE) as alone:
            assert seed_of(alone) == os.getpid()
            assert alone.request({"do": "echo", "value": 1})["value"] == 1
        limits.rlimit(psutil.RLIMIT_NOFILE, before)
        assert child.request({"do": "echo", "value": 1})["value"] == 1
        with Child(MODULE) as forked:
            assert seed_of(forked) == limits.pid


def test_what_a_seed_cannot_be_asked_for_starts_alone(monkeypatch, tmp_path):
    monkeypatch.setenv("PYTHONPATH", str(Path.cwd()))  # where the job of these tests is found
    gone = tmp_path / "gone"
    gone.mkdir()
    monkeypatch.chdir(gone)
    gone.rmdir()
    with Child(MODULE) as child:
        assert child.request({"do": "echo", "value": 1})["value"] == 1
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OUTRIDER_TEST", "x" * (120 << 10))
    monkeypatch.setenv("OUTRIDER_TEST_2", "x" * (120 << 10))
    with Child(MODULE) as child:
        assert child.request({"do": "echo", "value": 1})["value"] == 1


def test_where_nothing_can_be_forked_a_job_starts_alone(monkeypatch):
    monkeypatch.setattr(forks, "AVAILABLE", False)
    with Child(MODULE) as child:
        assert seed_of(child) == os.getpid()
        assert child.request({"do": "echo", "value": 1})["value"] == 1
