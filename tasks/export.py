"""Stage export: the trained draft -> a speculators checkpoint, loaded back and compared."""

from typing import Literal

from storage import artifacts
from storage.artifacts import Identity
from storage.layout import SPECULATOR
from storage.store import Store
from tasks.eagle3.draft_plan import DraftPlan
from tasks.load_verifier import Verifier
from tasks.stage import StageResult, build_parts, stage_task
from tasks.stage_settings import StageSettings
from tasks.train import draft_parts

VERSION = 1
MODULE = "tasks.jobs.export"


class ExportSettings(StageSettings):
    """The speculators checkpoint."""

    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    """What the weights are stored as."""
    verifier_path: str | None = None
    """Where the verifier lies on the machine that serves; default: where it lies here."""


@stage_task
def export(
    store: Store,
    layer_ids: tuple[int, ...],
    *,
    trained: StageResult,
    vocab: StageResult,
    verifier: Verifier,
    draft: DraftPlan,
    draft_tokens: int,
    settings: ExportSettings,
) -> StageResult:
    """Write the speculator, let speculators load it, and compare every tensor with the trained one."""
    verifier_path = settings.verifier_path or verifier.directory
    wanted = Identity(
        stage=SPECULATOR,
        version=VERSION,
        settings={
            "dtype": settings.dtype,
            "verifier_path": verifier_path,
            "draft_tokens": draft_tokens,
            "draft": draft.identity(),
            "layers": list(layer_ids),
        },
        inputs={
            "draft": trained.content,
            "vocab_map": vocab.content,
            "verifier": verifier.manifest.content,
        },
    )
    request = {
        "draft": draft_parts(verifier, vocab, layer_ids, draft)
        | {"seed": 0, "weights": trained.parts[0].path},
        "dtype": settings.dtype,
        "verifier_path": verifier_path,
        "draft_tokens": draft_tokens,
        "trust_remote_code": verifier.trust_remote_code,
    }
    result = build_parts(store, [wanted], MODULE, requests=[request])
    artifacts.check_digests(store, result.parts[0])  # no later stage reads what is served
    return result
