"""GPUs are looked at before a stage computes on them; the C functions of the driver's library are stood in for."""

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tasks import gpus, hardware
from tasks.gpus import (
    GpuNeed,
    GpuPolicy,
    GpusBusyError,
    claim_gpus,
    visible_gpus,
    warn_of_leftovers,
)
from tests.tasks.nvml_library import Device, NvmlLibrary, install

Machine = Callable[..., NvmlLibrary]
GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Machine:
    """Make this a machine with such GPUs: machine(Device(), Device())."""
    device_file = tmp_path / "nvidiactl"
    device_file.touch()
    monkeypatch.setattr(hardware, "NVIDIA_DEVICE", device_file)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(gpus, "POLL_SECONDS", 0.02)
    monkeypatch.setattr(gpus, "LEAVING_SECONDS", 0.3)

    def make(*devices: Device) -> NvmlLibrary:
        return install(monkeypatch, list(devices))

    return make


@pytest.fixture
def stranger() -> Iterator[int]:
    """A process that is none of ours."""
    process = subprocess.Popen(
        [sys.executable, "-c", "import time; time.sleep(60)", "serve-a-model"]
    )
    until = time.monotonic() + 10
    while b"serve-a-model" not in Path(f"/proc/{process.pid}/cmdline").read_bytes():
        assert time.monotonic() < until
    yield process.pid
    process.kill()
    process.wait()


def test_free_gpus_are_claimed_and_a_cpu_needs_none(machine: Machine) -> None:
    machine(Device(), Device())
    assert claim_gpus(GpuNeed("auto", 2), stage="capture") == 2
    assert claim_gpus(GpuNeed("cuda", 1), stage="capture") == 1
    assert claim_gpus(GpuNeed("cpu", 8), stage="capture") == 0


def test_a_busy_gpu_is_refused_with_what_holds_it(machine: Machine, stranger: int) -> None:
    machine(Device(), Device({stranger: 40 * GIB}))
    with pytest.raises(GpusBusyError) as error:
        claim_gpus(GpuNeed("auto", 2), stage="capture")
    said = str(error.value)
    assert said.startswith(f"capture: 1 of its GPUs are busy: GPU 1: process {stranger} (")
    assert "serve-a-model) holds 40,960 MB; " in said
    assert "capture.busy_gpus" in said
    assert claim_gpus(GpuNeed("auto", 1), stage="capture") == 1  # the other one is free
    assert claim_gpus(GpuNeed("auto", 2, GpuPolicy("ignore")), stage="capture") == 2


def test_memory_that_no_process_of_this_container_holds_makes_a_gpu_busy(machine: Machine) -> None:
    machine(Device(unnamed_bytes=2 * GIB))
    with pytest.raises(GpusBusyError, match="GPU 0: 2,669 MB are in use"):
        claim_gpus(GpuNeed("auto"), stage="train")


def test_the_memory_of_this_very_process_does_not_count(machine: Machine) -> None:
    machine(Device({os.getpid(): 100 << 20}))
    assert claim_gpus(GpuNeed("auto"), stage="train") == 1


def test_a_run_that_waits_goes_on_when_the_gpu_is_free(
    machine: Machine, stranger: int, caplog: pytest.LogCaptureFixture
) -> None:
    library = machine(Device({stranger: 5 * GIB}))
    threading.Timer(0.2, library.devices[0].processes.clear).start()
    with caplog.at_level(logging.INFO, "tasks.gpus"):
        assert claim_gpus(GpuNeed("auto", 1, GpuPolicy("wait", 1.0)), stage="train") == 1
    (line,) = [record.getMessage() for record in caplog.records]  # said once, not at every look
    assert line.startswith(f"train: waiting for its GPUs: GPU 0: process {stranger} (")


def test_waiting_has_an_end(machine: Machine, stranger: int) -> None:
    machine(Device({stranger: 5 * GIB}))
    with pytest.raises(GpusBusyError, match=r"still busy after 0\.001 minutes: .*wait_minutes"):
        claim_gpus(GpuNeed("auto", 1, GpuPolicy("wait", 0.001)), stage="train")


def test_a_stopped_run_does_not_go_on_waiting(
    machine: Machine, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(Device({stranger: 5 * GIB}))
    monkeypatch.setattr(gpus, "_stopped", threading.Event())
    threading.Timer(0.1, gpus.stop_waiting).start()
    with pytest.raises(GpusBusyError, match="the run was stopped"):
        claim_gpus(GpuNeed("auto", 1, GpuPolicy("wait", 60)), stage="train")


def test_gpus_that_are_not_there_are_refused_by_name_and_done_without_by_auto(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    machine(Device(), Device(), Device())
    with pytest.raises(ValueError, match=r"asks for 4 GPUs by device cuda, and 3 are there; lower"):
        claim_gpus(GpuNeed("cuda", 4), stage="capture")
    assert claim_gpus(GpuNeed("auto", 4), stage="capture") == 3
    assert "3 of the 4 GPUs asked for are there" in caplog.text
    assert claim_gpus(GpuNeed("auto", 4), stage="capture", group=2) == 2  # whole groups
    with pytest.raises(ValueError, match=r"gpus_per_process is 4 and 3 GPUs are there"):
        claim_gpus(GpuNeed("auto", 4), stage="capture", group=4)
    with pytest.raises(ValueError, match=r"1 GPUs by device cuda:3, and 0 are there"):
        claim_gpus(GpuNeed("cuda:3"), stage="train")


def test_only_the_gpus_that_are_left_visible_count(
    machine: Machine, stranger: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine(Device({stranger: 5 * GIB}), Device(), Device())
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,1")
    assert [gpu.index for gpu in visible_gpus()] == [2, 1]
    assert claim_gpus(GpuNeed("auto", 2), stage="capture") == 2
    monkeypatch.setenv(
        "CUDA_VISIBLE_DEVICES", "GPU-00000001,7,2"
    )  # CUDA stops at what is not there
    assert [gpu.index for gpu in visible_gpus()] == [1]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert visible_gpus() == []


def test_memory_of_an_ended_process_is_waited_for_and_else_named(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    library = machine(Device({4_000_001: 3 * GIB, 4_000_002: GIB}), Device())
    assert warn_of_leftovers({4_000_003}) == []
    assert caplog.text == ""
    (left,) = warn_of_leftovers({4_000_001})
    assert left.used_bytes == 3 * GIB
    assert "process 4000001 (not of this container) holds 3,072 MB" in caplog.text
    threading.Timer(0.1, library.devices[0].processes.clear).start()
    assert warn_of_leftovers({4_000_001, 4_000_002}) == []


@pytest.mark.skipif(hardware.NVIDIA_DEVICE.exists(), reason="this machine has a driver")
def test_a_machine_without_a_driver_has_none() -> None:
    assert visible_gpus() == []
    assert claim_gpus(GpuNeed("auto"), stage="train") == 0
    with pytest.raises(ValueError, match="asks for 1 GPUs by device cuda, and 0 are there"):
        claim_gpus(GpuNeed("cuda"), stage="train")
