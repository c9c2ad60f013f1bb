"""Stage train: states, vocabulary map and split -> the trained draft, by way of checkpoints."""

from typing import Any

from storage.artifacts import Identity
from storage.checkpoints import Checkpoints
from storage.layout import CHECKPOINTS
from storage.store import Store
from tasks.eagle3.draft_plan import DraftPlan
from tasks.eagle3.training_settings import TrainSettings
from tasks.gpus import REFUSE, GpuNeed, GpuPolicy
from tasks.hardware import training_precision
from tasks.load_verifier import Verifier
from tasks.stage import StageResult, build_parts, stage_task

VERSION = 2
MODULE = "tasks.jobs.train"


def check_budget(samples: StageResult, settings: TrainSettings) -> None:
    """Raise ValueError when the longest sample exceeds a batch: known before anything is captured."""
    longest = max(part.facts["longest_tokens"] for part in samples.parts)
    if min(longest, settings.max_tokens) > settings.batch_tokens:
        raise ValueError(
            f"train.tokens_per_batch {settings.batch_tokens} is less than the longest sample of {longest} "
            f"tokens; raise it, or lower train.max_tokens {settings.max_tokens} or tokenize.max_tokens"
        )


@stage_task
def train(
    store: Store,
    layer_ids: tuple[int, ...],
    *,
    states: StageResult,
    samples: StageResult,
    split: StageResult,
    vocab: StageResult,
    verifier: Verifier,
    draft: DraftPlan,
    settings: TrainSettings,
    initial: StageResult | None = None,
    gpu_policy: GpuPolicy = REFUSE,
) -> StageResult:
    """Train the draft in a child process; a killed training goes on at its last checkpoint.

    It starts from the tensors of `initial`, else from random ones.
    """
    precision = training_precision(settings.precision, settings.device)
    settings = settings.model_copy(update={"precision": precision})
    wanted = Identity(
        stage=CHECKPOINTS,
        version=VERSION,
        settings={
            "train": settings.identity(),
            "draft": draft.identity(),
            "layers": list(layer_ids),
        },
        inputs={
            "states": states.content,
            "samples": samples.content,
            "split": split.content,
            "vocab_map": vocab.content,
            "verifier": verifier.manifest.content,
            **({"initial": initial.content} if initial is not None else {}),
        },
    )
    request = {
        "states": [part.path for part in states.parts],
        "samples": [part.path for part in samples.parts],
        "quarantined": states.notes["quarantined"],
        "split": split.parts[0].path,
        "draft_parts": draft_parts(verifier, vocab, layer_ids, draft),
        "initial": initial.parts[0].path if initial is not None else None,
        "settings": settings.model_dump(mode="json"),
    }
    trained = build_parts(
        store,
        [wanted],
        MODULE,
        requests=[request],
        gpus=GpuNeed(settings.device, settings.gpus, gpu_policy),
    )
    Checkpoints(store, wanted).remove_all()  # a job killed at its very end leaves some
    return trained


def draft_parts(
    verifier: Verifier, vocab: StageResult, layer_ids: tuple[int, ...], draft: DraftPlan
) -> dict[str, Any]:
    """What a child process needs to build the draft, as a request's part."""
    return {
        "verifier": verifier.manifest.path,
        "directory": verifier.directory,
        "vocab_map": vocab.parts[0].path,
        "layer_ids": list(layer_ids),
        "draft": draft.model_dump(mode="json"),
    }
