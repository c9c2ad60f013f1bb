"""Stage evaluate: held-out prompts, verifier and draft -> acceptance length by real greedy speculative decoding."""

import logging
from collections.abc import Mapping
from dataclasses import dataclass
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

VERSION = 2
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
    dtype: Literal["auto", "float32", "bfloat16"] = "auto"
    """What the verifier computes in; auto: float32 on a CPU, else as its weights are stored."""
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")
    """auto (a GPU where there is one), cpu, cuda, or one of several GPUs, such as cuda:1."""
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


@dataclass(frozen=True)
class DraftRecipe:
    """What it takes to build a draft again, as plain JSON types, and what its evaluation is known by."""

    parts: Mapping[str, Any]
    """Of a child's request: see `tasks.jobs.drafts.make_draft`."""
    settings: Mapping[str, Any]
    inputs: Mapping[str, str]

    @property
    def artifacts(self) -> tuple[str, ...]:
        """Paths of what is read to build it."""
        paths = [self.parts[name] for name in ("verifier", "vocab_map", "weights")]
        return tuple(path for path in paths if path is not None)


def draft_recipe(
    verifier: Verifier,
    vocab: StageResult,
    layer_ids: tuple[int, ...],
    draft: DraftPlan,
    *,
    seed: int,
    weights: StageResult | None,
) -> DraftRecipe:
    """Recipe of a draft with the tensors of `weights`, else with random ones drawn from `seed`."""
    path = None if weights is None else weights.parts[0].path
    return DraftRecipe(
        parts=draft_parts(verifier, vocab, layer_ids, draft) | {"seed": seed, "weights": path},
        settings={"draft": draft.identity(), "layers": list(layer_ids), "seed": seed},
        inputs={
            "vocab_map": vocab.content,
            "draft": "untrained" if weights is None else weights.content,
        },
    )


@dataclass(frozen=True)
class Prompts:
    """What drafts are evaluated on, and by whom."""

    conversations: StageResult
    split: StageResult
    verifier: Verifier
    settings: EvaluateSettings


@stage_task
def evaluate(
    store: Store,
    prompts: Prompts,
    *,
    before: DraftRecipe,
    after: DraftRecipe,
    gpu_policy: GpuPolicy = REFUSE,
) -> StageResult:
    """Decode held-out prompts by the verifier alone, with the draft before training, and with the trained one.

    The parts of the result are these three: reference, before, after. The texts have to be equal.
    """
    drafts = {"before": before, "after": after}
    result = evaluate_drafts(store, prompts, drafts, gpu_policy=gpu_policy)
    _check_equal(result)
    return result


def evaluate_drafts(
    store: Store,
    prompts: Prompts,
    drafts: Mapping[str, DraftRecipe],
    *,
    gpu_policy: GpuPolicy = REFUSE,
) -> StageResult:
    """Decode the prompts by the verifier alone and with each draft; the parts are in that order."""
    verifier = prompts.verifier
    dtype = decoding_dtype(prompts.settings.dtype, prompts.settings.device)
    settings = prompts.settings.model_copy(update={"dtype": dtype})
    inputs = {
        "conversations": prompts.conversations.content,
        "split": prompts.split.content,
        "verifier": verifier.identity,
    }
    reference = Identity(
        stage=REFERENCE,
        version=VERSION,
        settings={**settings.identity(), "draft_tokens": None},
        inputs=inputs,
    )
    common: dict[str, Any] = {
        "conversations": [part.path for part in prompts.conversations.parts],
        "split": prompts.split.parts[0].path,
        **verifier.place,
        "eos_token_ids": list(verifier.facts.eos_token_ids),
        "max_positions": verifier.facts.max_position_embeddings,
        "settings": settings.model_dump(mode="json"),
    }
    wanted, requests = [reference], [{**common, "name": "reference", "draft": None}]
    for name, recipe in drafts.items():
        wanted.append(
            Identity(
                stage=EVALUATION,
                version=VERSION,
                settings={**settings.identity(), **recipe.settings},
                inputs={**inputs, **recipe.inputs},
            )
        )
        requests.append(
            {**common, "name": name, "draft": dict(recipe.parts), "reference": reference.path}
        )
    return build_parts(
        store,
        wanted,
        MODULE,
        requests=requests,
        gpus=GpuNeed(prompts.settings.device, policy=gpu_policy),
    )


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
