"""How large a batch may be: real training steps on made-up samples, larger and larger, until one does not fit.

T = tokens of a batch, n = tokens of a sample, A = captured layers, H = hidden size.
"""

import gc
import logging
from collections.abc import Callable

import torch

from tasks.eagle3.batch_feed import AHEAD
from tasks.eagle3.batches import TrainingSample
from tasks.eagle3.draft import Eagle3DraftModel
from tasks.eagle3.head_transform import HeadTransform
from tasks.eagle3.training import Training
from tasks.eagle3.training_settings import TrainSettings

logger = logging.getLogger(__name__)

LARGEST_TOKENS = 65_536
"""Beyond it a step's products are long since as fast as they get, and an epoch has fewer steps to learn in."""
MARGIN = 0.1
"""Share of the memory that is left free: real samples lie in it in other pieces than made-up ones."""
STEPS = AHEAD + 2
"""Steps of a trial: until as many batches are on the device as there ever are."""


def largest_fitting(fits: Callable[[int], bool], *, smallest: int, largest: int) -> int:
    """Return a size that fits: doubled from `smallest` while it fits, then once more by half; at most `largest`.

    So it is at least two thirds of what is possible. Raises ValueError when not even `smallest` fits.
    """
    if not fits(smallest):
        raise ValueError(
            f"train.tokens_per_batch auto: not even {smallest} tokens, one sample of the longest allowed, fit the "
            "GPU's memory; lower train.max_tokens or train.ttt_steps"
        )
    size = smallest
    while 2 * size <= largest and fits(2 * size):
        size *= 2
    half_more = size + size // 2
    return half_more if half_more <= largest and fits(half_more) else size


def fits_gpu(
    draft: Eagle3DraftModel, settings: TrainSettings, transform: HeadTransform, tokens: int
) -> bool:
    """Tell whether training with batches of `tokens` leaves the margin of the draft's GPU free; trains the draft."""
    device = draft.fc.weight.device
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    free_bytes = torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    limit_bytes = int(free_bytes * (1 - MARGIN))
    try:
        try_steps(draft, settings, transform, tokens)
        peak_bytes = torch.cuda.max_memory_reserved(device)
    except torch.OutOfMemoryError:
        peak_bytes = free_bytes
    # Out of the handler: its traceback holds the tensors of the trial.
    gc.collect()
    torch.cuda.empty_cache()
    fitting = peak_bytes <= limit_bytes
    logger.info(
        "a batch of %s tokens %s: %.1f of %.1f GB",
        f"{tokens:,}",
        "fits" if fitting else "does not fit",
        peak_bytes / 1e9,
        limit_bytes / 1e9,
    )
    return fitting


def try_steps(
    draft: Eagle3DraftModel, settings: TrainSettings, transform: HeadTransform, tokens: int
) -> Training:
    """Train on full batches of `tokens` whose every token is supervised: nothing real takes more memory."""
    samples = made_up_samples(draft, tokens=tokens, longest=settings.max_tokens)
    trial = {
        "tokens_per_batch": tokens,
        "epochs": 1,
        "checkpoint_seconds": 1e9,
        "epoch_checkpoints": False,
        "max_nonfinite_steps": STEPS,
    }
    training = Training(
        draft,
        samples,
        [],
        settings=settings.model_copy(update=trial),
        precision="bf16" if settings.precision == "bf16" else "fp32",
        train_lengths=[len(sample.input_ids) for sample in samples],
        val_lengths=[],
        transform=transform,
    )
    training.run(on_checkpoint=lambda *_: None, on_step=lambda *_: None)
    return training


def made_up_samples(draft: Eagle3DraftModel, *, tokens: int, longest: int) -> list[TrainingSample]:
    """Samples for STEPS batches of `tokens`, as long as `longest` allows; all views of one."""
    hidden = draft.fc.weight.shape[0]
    generator = torch.Generator().manual_seed(0)
    n = min(longest, tokens)
    whole = TrainingSample(
        input_ids=torch.randint(len(draft.embed_tokens.weight), (n,), generator=generator),
        aux=torch.randn(n, draft.fc.weight.shape[1], generator=generator).bfloat16(),
        last=torch.randn(n, hidden, generator=generator).bfloat16(),
        loss_mask=torch.ones(n, dtype=torch.bool),
    )
    lengths = [n] * (tokens // n) + ([tokens % n] if tokens % n >= 2 else [])
    return [
        TrainingSample(**{name: value[:length] for name, value in vars(whole).items()})
        for length in lengths * STEPS
    ]
