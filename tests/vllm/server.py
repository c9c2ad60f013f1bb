"""A vLLM server of a verifier and its speculator, on the CPU in fp32, for the length of a block."""

import json
import os
import signal
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parents[2]
START_SECONDS = 400
REQUEST_SECONDS = 900


def vllm_python() -> Path:
    """Python of the vLLM environment: OUTRIDER_VLLM_PYTHON, else .venv-vllm's."""
    return Path(os.environ.get("OUTRIDER_VLLM_PYTHON", REPOSITORY / ".venv-vllm/bin/python"))


@dataclass(frozen=True, slots=True)
class Served:
    """What the server gave: new tokens of each prompt, and its own counts of their decoding."""

    texts: list[list[int]]
    rounds: int
    accepted: list[int]
    """Accepted tokens at each place of the draft."""

    @property
    def acceptance_length(self) -> float:
        return 1 + sum(self.accepted) / self.rounds


class Server:
    """A running server; `serve` makes it."""

    def __init__(self, url: str, *, draft_tokens: int) -> None:
        self._url = url
        self._draft_tokens = draft_tokens

    def decode(self, prompts: Sequence[Sequence[int]], *, max_new_tokens: int) -> Served:
        """Decode greedily, all prompts in one request, and count what that added to the metrics."""
        before = self._settled_counts()
        body = {
            "model": "verifier",
            "prompt": [list(prompt) for prompt in prompts],
            "max_tokens": max_new_tokens,
            "temperature": 0.0,
            "return_token_ids": True,
        }
        request = urllib.request.Request(
            f"{self._url}/v1/completions",
            data=json.dumps(body).encode(),
            headers={"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=REQUEST_SECONDS) as response:
            choices: list[dict[str, Any]] = json.load(response)["choices"]
        after = self._settled_counts()
        choices.sort(key=lambda choice: choice["index"])
        rounds, *accepted = (now - then for then, now in zip(before, after, strict=True))
        return Served([choice["token_ids"] for choice in choices], rounds, accepted)

    def _settled_counts(self) -> list[int]:
        """Counts twice the same: the server counts a little after it has answered."""
        counts, last = self._counts(), None
        while counts != last:
            time.sleep(0.5)
            counts, last = self._counts(), counts
        return counts

    def _counts(self) -> list[int]:
        """Rounds so far, then tokens accepted so far at each place of the draft."""
        with urllib.request.urlopen(f"{self._url}/metrics", timeout=30) as response:
            lines = response.read().decode().splitlines()
        counts = [0] * (1 + self._draft_tokens)
        for line in lines:
            name, _, labels = line.partition("{")
            if name == "vllm:spec_decode_num_drafts_total":
                counts[0] += int(float(line.rsplit(" ", 1)[1]))
            elif name == "vllm:spec_decode_num_accepted_tokens_per_pos_total":
                place = int(labels.split('position="', 1)[1].split('"', 1)[0])
                counts[1 + place] += int(float(line.rsplit(" ", 1)[1]))
        return counts


@contextmanager
def serve(
    verifier: Path, speculator: Path, *, draft_tokens: int, max_model_len: int, log: Path
) -> Iterator[Server]:
    """Start `vllm serve`, wait until it answers, and end it with all its processes.

    Raises RuntimeError with the end of `log` when the server ends early or does not answer.
    """
    port = _free_port()
    speculation = {
        "model": str(speculator),
        "method": "eagle3",
        "num_speculative_tokens": draft_tokens,
    }
    command = [str(vllm_python()), "-m", "vllm.entrypoints.cli.main", "serve", str(verifier)]
    command += ["--speculative-config", json.dumps(speculation)]
    command += ["--served-model-name", "verifier", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--dtype", "float32", "--enforce-eager", "--max-model-len", str(max_model_len)]
    command += ["--max-num-seqs", "24"]
    settings = {
        "HF_HUB_OFFLINE": "1",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        # beside other work: few threads, free to move, asleep while they wait
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "2"),
        "GOMP_SPINCOUNT": "0",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    }
    with log.open("wb") as output:
        process = subprocess.Popen(
            command,
            stdout=output,
            stderr=subprocess.STDOUT,
            stdin=subprocess.DEVNULL,
            env=os.environ | settings,
            cwd=log.parent,
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait(process, url, log)
        yield Server(url, draft_tokens=draft_tokens)
    finally:
        _end(process)


def _wait(process: "subprocess.Popen[bytes]", url: str, log: Path) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RuntimeError(
                f"vllm serve ended with {process.returncode}:\n{log.read_text()[-4000:]}"
            )
        try:
            with urllib.request.urlopen(f"{url}/health", timeout=5):
                return
        except (urllib.error.URLError, OSError):
            time.sleep(0.5)
    raise RuntimeError(f"no answer after {START_SECONDS} s:\n{log.read_text()[-4000:]}")


def _end(process: "subprocess.Popen[bytes]") -> None:
    """Ask the server to end, then kill what is left of its session."""
    process.terminate()
    with suppress(subprocess.TimeoutExpired):
        process.wait(timeout=20)
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
