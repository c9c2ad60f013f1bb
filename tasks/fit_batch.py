"""Stage fit_batch: train.tokens_per_batch auto -> a number, once for a kind of training and then remembered.

The number changes what a training learns, so it is part of its identity. A run that goes on, here or on another
machine, finds it in the store; whoever wants another names it in the settings.
"""

import logging

from storage.artifacts import Identity
from storage.layout import BATCH_SIZES
from storage.store import Store
from tasks.eagle3.draft_plan import DraftPlan
from tasks.eagle3.training_settings import TrainSettings
from tasks.gpus import REFUSE, GpuNeed, GpuPolicy
from tasks.hardware import training_precision, uses_gpu
from tasks.load_verifier import Verifier
from tasks.stage import StageResult, build_parts, stage_task
from tasks.train import draft_parts

logger = logging.getLogger(__name__)

VERSION = 1
MODULE = "tasks.jobs.fit_batch"
CPU_TOKENS = 4096
"""A CPU is as fast with small batches as with large ones."""


def needs_fitting(settings: TrainSettings) -> bool:
    """Tell whether the batch is to be as large as this machine's GPU holds."""
    return settings.tokens_per_batch == "auto" and uses_gpu(settings.device)


def settle_batch(settings: TrainSettings, fitted: StageResult | None) -> TrainSettings:
    """Return the settings with a number of tokens per batch: what fits, or on a CPU the default."""
    if settings.tokens_per_batch != "auto":
        return settings
    tokens = CPU_TOKENS if fitted is None else fitted.rows
    logger.info("train.tokens_per_batch auto: %s", f"{tokens:,}")
    return settings.model_copy(update={"tokens_per_batch": tokens})


def batch_identity(
    layer_ids: tuple[int, ...],
    *,
    draft_size: int,
    verifier: Verifier,
    draft: DraftPlan,
    settings: TrainSettings,
) -> Identity:
    """What the memory of a training depends on; not the GPU, so that it keeps its number wherever it goes on."""
    sizes = {"max_tokens", "ttt_steps", "loss", "precision", "optimizer"}
    return Identity(
        stage=BATCH_SIZES,
        version=VERSION,
        settings={
            "train": settings.model_dump(mode="json", include=sizes),
            "noise": settings.noise > 0,
            "draft": draft.identity(),
            "draft_size": draft_size,
            "layers": list(layer_ids),
        },
        inputs={"verifier": verifier.manifest.content},
    )


@stage_task
def fit_batch(
    store: Store,
    layer_ids: tuple[int, ...],
    *,
    vocab: StageResult,
    verifier: Verifier,
    draft: DraftPlan,
    settings: TrainSettings,
    gpu_policy: GpuPolicy = REFUSE,
) -> StageResult:
    """Find the largest batch that training this draft can have on this machine's GPU."""
    precision = training_precision(settings.precision, settings.device)
    settings = settings.model_copy(update={"precision": precision})
    wanted = batch_identity(
        layer_ids, draft_size=vocab.rows, verifier=verifier, draft=draft, settings=settings
    )
    request = {
        "draft_parts": draft_parts(verifier, vocab, layer_ids, draft),
        "settings": settings.model_dump(mode="json"),
    }
    return build_parts(
        store,
        [wanted],
        MODULE,
        requests=[request],
        gpus=GpuNeed(settings.device, policy=gpu_policy),
    )
