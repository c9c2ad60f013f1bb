import os

import psutil
import pytest

from tasks.engine_advice import advise
from tasks.hardware import Machine, this_machine

GB = 10**9
LAPTOP = Machine(ram_bytes=16 * GB, gpu_bytes=(), native_bf16=False)
ONE_GPU = Machine(ram_bytes=128 * GB, gpu_bytes=(141 * GB,), native_bf16=True)
EIGHT_GPUS = Machine(ram_bytes=2000 * GB, gpu_bytes=(141 * GB,) * 8, native_bf16=True)

SMOLLM2 = {"weight_bytes": 538_000_000, "parameters": 134_500_000, "quantized": False}
LLAMA_8B = {"weight_bytes": 16 * GB, "parameters": 8 * GB, "quantized": False}
LLAMA_70B = {"weight_bytes": 141 * GB, "parameters": 70 * GB, "quantized": False}
KIMI = {"weight_bytes": 594 * GB, "parameters": 170 * GB, "quantized": True}
DEEPSEEK_BF16 = {"weight_bytes": 1342 * GB, "parameters": 671 * GB, "quantized": False}


@pytest.mark.parametrize(
    ("model", "machine", "engine", "where"),
    [
        (SMOLLM2, LAPTOP, "transformers", "this machine's CPU"),
        # 8e9 x 4 bytes x 1.2 = 38 GB in fp32
        (LLAMA_8B, LAPTOP, "transformers", "one GPU (this machine has none)"),
        (LLAMA_8B, ONE_GPU, "transformers", "one GPU of this machine's"),
        # 141 GB x 1.2 = 169 GB: two of 141
        (LLAMA_70B, EIGHT_GPUS, "transformers", "2 GPUs of this machine's: capture.gpus_per_process 2"),
        (LLAMA_70B, ONE_GPU, "vllm", "2 GPUs of 141.0 GB (this machine has 1)"),
        # 594 GB x 1.2 = 713 GB: six of 141, split over eight; nine of 80, split over sixteen
        (KIMI, EIGHT_GPUS, "vllm", "8 GPUs of 141.0 GB of this machine's"),
        (KIMI, LAPTOP, "vllm", "16 GPUs of 80.0 GB (this machine has none)"),
        (DEEPSEEK_BF16, EIGHT_GPUS, "vllm", "16 GPUs of 141.0 GB (this machine has 8)"),
    ],
)  # fmt: skip
def test_the_simplest_engine_that_holds_the_model_is_advised(model, machine, engine, where):
    advice = advise(**model, machine=machine)

    assert (advice.engine, advice.where) == (engine, where)


def test_the_reason_is_the_memory_it_takes():
    assert advise(**KIMI, machine=EIGHT_GPUS).reason == (
        "it is quantized, and its weights and what computing takes are 712.8 GB, more than one GPU has"
    )
    assert "38.4 GB" not in advise(**LLAMA_8B, machine=ONE_GPU).reason
    assert advise(**SMOLLM2, machine=LAPTOP).reason == (
        "it takes 0.6 GB in fp32 of 16.0 GB RAM, and there is no GPU"
    )


def test_this_machine_is_known_by_its_ram_and_by_what_nvidia_smi_says(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    for script, gpus in (
        ("echo 143771; echo 97871", (143771 << 20, 97871 << 20)),
        ("echo no driver; exit 9", ()),
    ):
        tool.write_text(f"#!/bin/sh\n{script}\n")
        tool.chmod(0o755)

        assert this_machine().gpu_bytes == gpus
    assert this_machine().ram_bytes == psutil.virtual_memory().total
