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


def usable_bytes(device: torch.device) -> int:
    """Memory of the GPU that this process may use for a training: what it has and what is free, less the margin."""
    free_bytes, _ = torch.cuda.mem_get_info(device)
    return int((free_bytes + torch.cuda.memory_reserved(device)) * (1 - MARGIN))


def fits_gpu(
    draft: Eagle3DraftModel,
    settings: TrainSettings,
    transform: HeadTransform,
    tokens: int,
    *,
    room_bytes: int,
) -> bool:
    """Tell whether training the draft with batches of `tokens` gets by with `room_bytes`; it changes the draft.

    Torch is held to that room, so that what libraries allocate beside it never fails.
    """
    device = draft.fc.weight.device
    total_bytes = torch.cuda.get_device_properties(device).total_memory
    torch.cuda.set_per_process_memory_fraction(room_bytes / total_bytes, device)
    try:
        try_steps(draft, settings, transform, tokens)
        fitting = True
    except torch.OutOfMemoryError:
        fitting = False
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, device)
    # Out of the handler: its traceback holds the tensors of the trial.
    gc.collect()
    torch.cuda.empty_cache()
    logger.info(
        "a batch of %s tokens %s into %.1f GB",
        f"{tokens:,}",
        "fits" if fitting else "does not fit",
        room_bytes / 1e9,
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
