"""The job of train over several processes: one leads, the others go with it."""

import os
import shutil
import signal
import threading
from pathlib import Path

import psutil
import pytest

from tasks.child import Child, JobFailedError, JobRefusedError
from tests.tasks.test_train_job import (
    Request,
    directory,
    published,
    request_of,  # noqa: F401 - a fixture
    steps,
)
from tests.tiny_runs import wait_for

MODULE = "tasks.jobs.train"


def helpers_of(pid: int) -> list[int]:
    """Processes that train with `pid`, which started them."""
    started = psutil.Process(pid).children(recursive=True)
    return [process.pid for process in started if MODULE in process.cmdline()]


def train_in_child(request: Request) -> None:
    with Child(MODULE) as child:
        child.request(request)


@pytest.mark.slow
def test_a_training_of_two_processes_that_loses_one_goes_on_to_the_same_bits(request_of) -> None:  # noqa: F811
    request = request_of(epochs=12, gpus=2)
    with Child(MODULE) as leader:
        errors: list[Exception] = []

        def ask() -> None:
            try:
                leader.request(request)
            except Exception as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        wait_for(lambda: errors or len(steps(request)) > 1, every=0.002)
        (helper,) = helpers_of(leader.pid)
        os.kill(helper, signal.SIGKILL)
        asking.join(timeout=120)
        assert not leader.alive
    (error,) = errors
    assert isinstance(error, JobFailedError)  # so that the stage is tried again
    assert "process 1 of 2 ended" in str(error)
    assert not Path(f"/proc/{helper}").exists()
    assert steps(request)
    train_in_child(request)

    resumed = published(request)
    shutil.rmtree(directory(request))
    train_in_child(request)
    assert published(request) == resumed


def test_what_all_refuse_is_refused_in_the_first_ones_words(request_of) -> None:  # noqa: F811
    with (
        Child(MODULE) as leader,
        pytest.raises(JobRefusedError, match="more than tokens_per_batch 5"),
    ):
        leader.request(request_of(gpus=2, tokens_per_batch=5))
