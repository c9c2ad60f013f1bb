"""A run whose GPUs are held by others stops before it starts a process on them."""

import os
from pathlib import Path

import pytest

from tasks import hardware
from tasks.gpus import GpusBusyError
from tests.tasks.nvml_library import Device, install
from tests.tiny_runs import TinyRun, job_of, run_flow

GIB = 1 << 30


def test_busy_gpus_stop_a_run_before_it_captures(
    tiny: TinyRun, tmp_path: Path, prefect_api: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tiny.copy(tmp_path, without=("capture", "train", "evaluate", "export"))
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(hardware, "NVIDIA_DEVICE", driver)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    install(monkeypatch, [Device({1: 70 * GIB})])

    with pytest.raises(GpusBusyError, match=r"capture: .* GPU 0: process 1 .* holds 71,680 MB"):
        run_flow(run.values, prefect_api)

    assert not (run.store / "states").exists()
    assert job_of(os.getpid(), "tasks.jobs.capture") is None
