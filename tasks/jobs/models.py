"""Models and tokenizers that a child process keeps loaded from one request to the next."""

import functools
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from tasks.eagle3.model_files import check_stamps
from tasks.eagle3.verifier import read_facts
from tasks.engines.loading import load_verifier_model
from tasks.engines.remote_code import admit
from tasks.hardware import STORED


def resolve_device(device: str) -> torch.device:
    """Return the device named, or for "auto" the GPU when there is one, else the CPU."""
    if device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    return torch.device(device)


@functools.cache
def load_tokenizer(directory: str, *, trust_remote_code: bool = False) -> PreTrainedTokenizerBase:
    """Return the tokenizer that lies beside the verifier's weights."""
    admit(Path(directory), trusted=trust_remote_code)
    return AutoTokenizer.from_pretrained(directory, trust_remote_code=trust_remote_code)


def pad_token_id(tokenizer: PreTrainedTokenizerBase) -> int:
    """Return a token to fill batches with; masked, so any will do where the tokenizer names none."""
    found = tokenizer.pad_token_id
    return int(found if found is not None else tokenizer.eos_token_id or 0)


@functools.cache
def load_model(
    directory: str, *, device: str, dtype: str, gpus: int = 1, trust_remote_code: bool = False
) -> PreTrainedModel:
    """Return the verifier in evaluation mode; `dtype` is float32, bfloat16 or "stored".

    On a GPU it is spread over `gpus` of those that this process sees; on a CPU that number means nothing.
    """
    if dtype == STORED:
        dtype = read_facts(Path(directory)).dtype or "bfloat16"
    found = resolve_device(device)
    model: PreTrainedModel = load_verifier_model(
        Path(directory),
        device="auto" if gpus > 1 and found.type == "cuda" else str(found),
        dtype=getattr(torch, dtype),
        trust_remote_code=trust_remote_code,
    )
    return model


def check_unchanged(request: dict[str, Any]) -> None:
    """Raise VerifierError when the model's files are not those that the run began with: ask before publishing."""
    check_stamps(Path(request["directory"]), request["files"])
