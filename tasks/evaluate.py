"""Stage evaluate: held-out prompts, verifier and draft -> acceptance length by real greedy speculative decoding."""

import logging
from typing import Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from storage.artifacts import Identity
from storage.layout import EVALUATION, REFERENCE
from storage.store import Store
from tasks.eagle3.draft_plan import DraftPlan
from tasks.gpus import REFUSE, GpuNeed, GpuPolicy
from tasks.hardware import decoding_dtype
from tasks.load_verifier import Verifier
from tasks.stage import StageResult, build_parts, stage_task
from tasks.stage_settings import StageSettings
from tasks.train import draft_parts

logger = logging.getLogger(__name__)

VERSION = 1
MODULE = "tasks.jobs.evaluate"


class EvaluateSettings(StageSettings):
    """How the draft is judged."""

    resources: ClassVar[frozenset[str]] = frozenset({"device", "batch_size"})

    prompts: PositiveInt = 24
    """Prompts that are decoded."""
    side: Literal["held_out", "train"] = "held_out"
    """Where they come from; train is for a proof that a draft can learn one sample by heart."""
    max_new_tokens: PositiveInt = 128
    """Longest answer, in tokens."""
    draft_tokens: PositiveInt = Field(default=3, le=16)
    """Tokens the draft proposes in each round."""
    dtype: str = Field(default="auto", pattern=r"^(auto|float32|bfloat16)$")
    """What the verifier computes in; auto: float32 on a CPU, else as its weights are stored."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto, cpu or cuda."""
    batch_size: PositiveInt = 24
    """Prompts that are decoded at once."""


class OutputDiffersError(ValueError):
    """Speculative decoding did not give the verifier's own text."""


def check_prompts(split: StageResult, verifier: Verifier, settings: EvaluateSettings) -> None:
    """Raise ValueError when nothing is there to be decoded: known before anything is captured."""
    positions = verifier.facts.max_position_embeddings
    if settings.max_new_tokens >= positions:
        raise ValueError(
            f"evaluate.max_new_tokens {settings.max_new_tokens} leaves no room for a prompt within the verifier's "
            f"{positions} positions; lower it"
        )
    if settings.side == "train":
        return
    held_out = split.facts.get("test", 0) or split.facts.get("val", 0)
    if not held_out:
        raise ValueError(
            "evaluate: no conversation is held out from training; raise split.val_ratio, add data or name a "
            "source in split.holdout_sources"
        )
    if held_out < settings.prompts:
        logger.warning(
            "evaluate: %d conversations are held out, fewer than the %d prompts asked for: the acceptance length "
            "will be less sure",
            held_out,
            settings.prompts,
        )


@stage_task
def evaluate(
    store: Store,
    layer_ids: tuple[int, ...],
    *,
    conversations: StageResult,
    split: StageResult,
    vocab: StageResult,
    verifier: Verifier,
    trained: StageResult,
    draft: DraftPlan,
    seed: int,
    settings: EvaluateSettings,
    initial: StageResult | None = None,
    gpu_policy: GpuPolicy = REFUSE,
) -> StageResult:
    """Decode held-out prompts by the verifier alone, with the draft before training, and with the trained one.

    Before training it has the tensors of `initial`, else random ones.

    The parts of the result are these three: reference, before, after. The texts have to be equal.
    """
    dtype = decoding_dtype(settings.dtype, settings.device)
    settings = settings.model_copy(update={"dtype": dtype})
    drafts = {"before": initial, "after": trained}
    prompts = {"conversations": conversations.content, "split": split.content}
    reference = Identity(
        stage=REFERENCE,
        version=VERSION,
        settings={**settings.identity(), "draft_tokens": None},
        inputs={**prompts, "verifier": verifier.identity},
    )
    common: dict[str, Any] = {
        "conversations": [part.path for part in conversations.parts],
        "split": split.parts[0].path,
        **verifier.place,
        "eos_token_ids": list(verifier.facts.eos_token_ids),
        "max_positions": verifier.facts.max_position_embeddings,
        "settings": settings.model_dump(mode="json"),
    }
    wanted, requests = [reference], [{**common, "name": "reference", "draft": None}]
    for name, weights in drafts.items():
        path = weights.parts[0].path if weights is not None else None
        wanted.append(
            Identity(
                stage=EVALUATION,
                version=VERSION,
                settings={
                    **settings.identity(),
                    "draft": draft.identity(),
                    "layers": list(layer_ids),
                    "seed": seed,
                },
                inputs={
                    **prompts,
                    "verifier": verifier.identity,
                    "vocab_map": vocab.content,
                    "draft": weights.content if weights is not None else "untrained",
                },
            )
        )
        requests.append(
            {
                **common,
                "name": name,
                "draft": draft_parts(verifier, vocab, layer_ids, draft)
                | {"seed": seed, "weights": path},
                "reference": reference.path,
            }
        )
    result = build_parts(
        store, wanted, MODULE, requests=requests, gpus=GpuNeed(settings.device, policy=gpu_policy)
    )
    _check_equal(result)
    return result


def _check_equal(result: StageResult) -> None:
    """The run fails when a draft changed what the verifier says."""
    for part in result.parts[1:]:
        differing = part.facts["differing"]
        if differing:
            raise OutputDiffersError(
                f"evaluate: speculative decoding changed the text of {len(differing)} of {part.rows} prompts "
                f"(first at prompt {differing[0]['prompt']}, token {differing[0]['token']}): the draft or the "
                f"decoding is wrong; the evaluation lies at {part.path}"
            )
