"""speculators' own training of the reference job, on the same samples and states."""

import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file


def write_data(
    directory: Path,
    texts: Sequence[Sequence[int]],
    masks: Sequence[Sequence[bool]],
    states: Sequence[tuple[torch.Tensor, torch.Tensor]],
    t2d: np.ndarray,
) -> None:
    """A dataset on disk with a file of states for each sample, as its scripts leave them.

    `states` holds for each sample aux [tokens, layers * hidden] and last [tokens, hidden].
    """
    from datasets import Dataset

    columns = {
        "input_ids": [list(text) for text in texts],
        "loss_mask": [list(mask) for mask in masks],
        "seq_len": [len(text) for text in texts],
    }
    dataset = Dataset.from_dict(columns)
    dataset.set_format("torch")
    dataset.save_to_disk(str(directory))
    (directory / "hidden_states").mkdir()
    for number, (text, (aux, last)) in enumerate(zip(texts, states, strict=True)):
        hidden = last.shape[-1]
        layers = torch.cat([aux.view(len(text), -1, hidden), last[:, None]], dim=1)
        tensors = {"hidden_states": layers.contiguous(), "token_ids": torch.tensor(text)}
        save_file(tensors, directory / "hidden_states" / f"hs_{number}.safetensors")
    kept = np.flatnonzero(t2d)
    np.save(directory / "t2d.npy", t2d.astype(bool))
    np.save(directory / "d2t.npy", kept - np.arange(len(kept)))


def run_job(
    directory: Path,
    verifier: Path,
    *,
    draft_layer: dict[str, Any],
    layer_ids: Sequence[int],
    settings: dict[str, Any],
    train_share: float,
) -> float:
    """Seconds from its start to its end, with a checkpoint an epoch."""
    (directory / "draft.json").write_text(json.dumps(draft_layer))
    options = {
        "--speculator-type": "eagle3",
        "--verifier-name-or-path": str(verifier),
        "--draft-config": str(directory / "draft.json"),
        "--data-path": str(directory),
        "--d2t-path": str(directory / "d2t.npy"),
        "--t2d-path": str(directory / "t2d.npy"),
        "--mask-token-id": "0",
        "--on-missing": "raise",
        "--train-data-ratio": str(train_share),
        # its fused loss does not compile with torch 2.11
        "--loss-implementation": "eager",
        "--save-path": str(directory / "checkpoints"),
        "--log-dir": str(directory / "logs"),
    } | {f"--{name.replace('_', '-')}": str(value) for name, value in settings.items()}
    command = [sys.executable, "-m", "speculators.train"]
    command += [word for option in options.items() for word in option]
    command += ["--target-layer-ids", *map(str, layer_ids)]
    command += ["--no-norm-before-residual", "--no-norm-before-fc", "--no-norm-output"]
    log = directory / "speculators.log"
    started = time.perf_counter()
    with log.open("w") as output:
        found = subprocess.run(command, stdout=output, stderr=subprocess.STDOUT, check=False)
    seconds = time.perf_counter() - started
    if found.returncode:
        raise SystemExit(
            f"speculators' training ended with {found.returncode}:\n{log.read_text()[-6000:]}"
        )
    return seconds
