"""A verifier's greedy answers by transformers' own `generate`, in child processes, never in the flow's.

B = batch, S = longest prompt of the batch.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

ProgressCallback = Callable[[int], None]


def greedy_generate(
    model: Any,
    prompts: Sequence[Sequence[int]],
    *,
    max_new_tokens: int,
    eos_token_ids: Sequence[int],
    pad_token_id: int,
    batch_size: int = 16,
    progress: ProgressCallback | None = None,
) -> list[list[int]]:
    """Return each prompt's greedy continuation by transformers' own `generate`, in the order given.

    A continuation ends with the first of `eos_token_ids`, which is part of it, or after
    `max_new_tokens`. Nothing of the model's own generation settings applies (some change the logits).
    `progress` gets the tokens decoded so far, those behind an end token counted; at the end
    `max_new_tokens` for every prompt.
    """
    from transformers import (  # noqa: PLC0415 - seconds to import
        GenerationConfig,
        StoppingCriteria,
        StoppingCriteriaList,
    )

    if min((len(prompt) for prompt in prompts), default=1) < 1:
        raise ValueError("an empty prompt has no continuation; drop it")
    make_config: Any = GenerationConfig
    plain = make_config(
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=list(eos_token_ids) or None,
        pad_token_id=pad_token_id,
    )
    report = progress or (lambda _: None)

    class Ticker(StoppingCriteria):
        """Is asked after every token and never stops."""

        def __init__(self, before: int, width: int) -> None:
            self._before, self._width = before, width

        def __call__(self, ids: Tensor, _: Tensor, **__: Any) -> Any:
            report(self._before + len(ids) * (ids.shape[1] - self._width))
            return torch.zeros(len(ids), dtype=torch.bool, device=ids.device)

    order = sorted(range(len(prompts)), key=lambda i: len(prompts[i]))
    answers: dict[int, list[int]] = {}
    own, model.generation_config = model.generation_config, plain
    try:
        for start in range(0, len(order), batch_size):
            batch = order[start : start + batch_size]
            ticker = Ticker(start * max_new_tokens, len(prompts[batch[-1]]))
            rows = _generate_batch(
                model,
                [prompts[i] for i in batch],
                pad_token_id=pad_token_id,
                criteria=StoppingCriteriaList([ticker]),
            )
            report((start + len(batch)) * max_new_tokens)
            for i, row in zip(batch, rows, strict=True):
                answers[i] = cut_after_eos(row, eos_token_ids)
    finally:
        model.generation_config = own
    return [answers[i] for i in range(len(prompts))]


def cut_after_eos(token_ids: Sequence[int], eos_token_ids: Sequence[int]) -> list[int]:
    """Return the ids up to and with the first end token."""
    for place, token_id in enumerate(token_ids):
        if token_id in eos_token_ids:
            return list(token_ids[: place + 1])
    return list(token_ids)


@torch.inference_mode()
def _generate_batch(
    model: Any, prompts: list[Sequence[int]], *, pad_token_id: int, criteria: Any
) -> list[list[int]]:
    longest = max(len(prompt) for prompt in prompts)
    ids = torch.full((len(prompts), longest), pad_token_id)  # [B, S], padded on the left
    mask = torch.zeros_like(ids)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.as_tensor(prompt, dtype=torch.long)
        mask[row, longest - len(prompt) :] = 1
    device = next(model.parameters()).device
    written = model.generate(
        input_ids=ids.to(device), attention_mask=mask.to(device), stopping_criteria=criteria
    )
    new: list[list[int]] = written[:, longest:].tolist()
    return new
