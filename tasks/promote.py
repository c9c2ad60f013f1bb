"""Stage promote: a draft that is better than the one in service takes its place; of any other the run says why not."""

import json
import logging
import re
from collections.abc import Mapping
from dataclasses import asdict, replace
from typing import Any

from pydantic import Field

from storage import artifacts, drafts
from storage.artifacts import ArtifactError, Identity
from storage.drafts import Promotion
from storage.layout import DECISION, EVALUATION_TABLE
from storage.manifest import Manifest
from storage.store import Store
from storage.tables import read_table
from tasks.eagle3.gate import Limits, PromptRounds, Verdict, judge
from tasks.evaluate import DraftRecipe, Prompts, evaluate_drafts
from tasks.gpus import REFUSE, GpuPolicy
from tasks.stage import StageResult, stage_task
from tasks.stage_settings import StageSettings
from tasks.verifier_sources import VerifierSettings

logger = logging.getLogger(__name__)

VERSION = 1
CANDIDATE_FILE = "candidate.json"


class PromoteSettings(StageSettings):
    """When a draft is put in service: `drafts/<name>/current.json` of the store names the one that is."""

    enabled: bool = True
    """Whether runs put their draft in service at all; `outrider promote` does it by hand."""
    draft_name: str | None = Field(default=None, pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Under which name; null: the verifier's, by the last part of verifier.model (a hub id whole)."""
    min_acceptance_length: float = Field(default=1.0, ge=1.0)
    """Least acceptance length."""
    margin: float = Field(default=0.02, ge=-16, le=16)
    """Least gain in acceptance length over the draft in service, on the same prompts; below 0: the loss allowed."""
    confidence: float = Field(default=0.9, gt=0.0, lt=1.0)
    """Of the gain's interval over the prompts; its lower end must be no loss (none beyond a margin below 0)."""
    max_source_loss: float = Field(default=0.1, ge=0.0)
    """Largest loss of acceptance length on the prompts of any one source."""
    min_distinct_bigrams: float = Field(default=0.3, ge=0.0, le=1.0)
    """Least share of different pairs of tokens in the texts: those that repeat themselves are easy to draft."""

    def draft_of(self, verifier: VerifierSettings) -> str:
        """Name under which drafts of this verifier are put in service."""
        if self.draft_name is not None:
            return self.draft_name
        model = verifier.model.rstrip("/")
        is_hub_id = re.fullmatch(r"[^/:]+/[^/:]+", model) is not None and "." not in model[:1]
        name = model if is_hub_id else model.rsplit("/", 1)[-1]
        return name.removesuffix(".gguf")

    def limits(self) -> Limits:
        """The gate's."""
        return Limits(
            self.min_acceptance_length,
            self.margin,
            self.confidence,
            self.max_source_loss,
            self.min_distinct_bigrams,
        )


@stage_task
def promote(
    store: Store,
    draft: str,
    *,
    run: str,
    speculator: StageResult,
    evaluation: Manifest,
    recipe: DraftRecipe,
    prompts: Prompts,
    settings: PromoteSettings,
    gpu_policy: GpuPolicy = REFUSE,
) -> StageResult:
    """Hold a draft against the one in service under the name `draft`, and put it there if it is better.

    `evaluation` is the new draft's. The one in service is evaluated on the same prompts. What was decided once about
    two drafts on these prompts is not acted on again: a draft that was rolled back stays out.
    """
    now = drafts.current(store, draft)
    (exported,) = speculator.parts
    candidate = {
        "draft": draft,
        "run": run,
        "speculator": exported.path,
        "speculator_key": exported.key,
        "acceptance_length": evaluation.facts["acceptance_length"],
        "artifacts": [exported.path, *recipe.artifacts],
        "recipe": asdict(recipe),
    }
    inputs = {"speculator": exported.content, "evaluation": evaluation.content}
    if now is not None and now.speculator_key == exported.key:
        wanted = Identity(**now.decided)
        known = artifacts.find(store, wanted)
        made = known or _write_down(store, wanted, candidate, dict(now.decision))
        location = artifacts.location(store, exported)
        if now.location != location:  # it was lost, and exported anew
            drafts.promote(store, replace(now, location=location))
        return StageResult((made,), reused=known is not None, notes={"in service": True})
    before = None
    against = _why_not_at_all(prompts, settings)
    if now is not None and not against:
        before = _evaluate_again(store, now, prompts, gpu_policy)
    if before is not None:
        inputs["before"] = before.content
    wanted = _identity(draft, settings, inputs)
    found = artifacts.find(store, wanted)
    if found is not None:
        return StageResult((found,), reused=True, notes={"in service": False})
    verdict = judge(
        _rounds(store, evaluation),
        None if before is None else _rounds(store, before),
        distinct_bigrams=evaluation.facts["distinct_bigrams"],
        limits=settings.limits(),
    )
    decision = _decision(draft, verdict, now, against)
    decision["per_position"] = [
        one and one.facts["per_position"] for one in (evaluation, before)
    ]  # of the draft, and of the one before where there is one
    if decision["promoted"]:
        put_in_service(store, candidate, decision, decided=wanted, by="gate")
    made = _write_down(store, wanted, candidate, decision)
    return StageResult((made,), reused=False, notes={"in service": decision["promoted"]})


def promote_by_hand(store: Store, decision: Manifest, run: str) -> Promotion:
    """Put the draft of a finished run in service whatever the gate said; `decision` is that of its promote stage.

    ValueError when what it is made of has gone.
    """
    with artifacts.open_file(store, decision, CANDIDATE_FILE) as path:
        candidate = json.loads(path.read_text()) | {"run": run}
    for needed in candidate["artifacts"]:
        try:
            artifacts.peek(store, needed)
        except ArtifactError as error:
            raise ValueError(f"{error}; run its settings again first") from error
    said = dict(decision.facts)
    return put_in_service(
        store,
        candidate,
        said | {"promoted": True, "reasons": []},
        decided=Identity(decision.stage, decision.version, decision.settings, decision.inputs),
        by="hand",
    )


def put_in_service(
    store: Store,
    candidate: dict[str, Any],
    decision: dict[str, Any],
    *,
    decided: Identity,
    by: str,
) -> Promotion:
    """Make a draft the one in service under its name."""
    now = drafts.current(store, candidate["draft"])
    promotion = Promotion(
        **{**candidate, "artifacts": tuple(candidate["artifacts"])},
        location=artifacts.location(store, artifacts.peek(store, candidate["speculator"])),
        name=drafts.new_name(),
        promoted_at=drafts.time_now(),
        by=by,
        decision=decision,
        decided=asdict(decided),
        previous=None if now is None else now.name,
    )
    drafts.promote(store, promotion)
    return promotion


def describe(decision: Mapping[str, Any], *, in_service: bool) -> str:
    """The decision in one line."""
    draft = decision["draft"]
    if not decision["promoted"]:
        return f"not put in service as {draft}: {'; '.join(decision['reasons'])}"
    if not in_service:
        return (
            f"not in service as {draft}: it was, until another took its place or it was rolled back"
        )
    if decision["gain"] is None:
        return f"in service as {draft}"
    low, high = decision["interval"]
    return (
        f"in service as {draft}: {decision['gain']:+.3f} against the draft before, "
        f"{decision['confidence']:.0%} interval {low:+.3f} to {high:+.3f}"
    )


def _evaluate_again(
    store: Store, now: Promotion, prompts: Prompts, gpu_policy: GpuPolicy
) -> Manifest | None:
    """The evaluation of the draft in service on these prompts; None when what it is made of has gone."""
    recipe = DraftRecipe(**now.recipe)
    try:
        for path in recipe.artifacts:
            artifacts.peek(store, path)
    except ArtifactError as error:
        logger.warning(
            "the draft in service, of run %s, can no more be evaluated (%s): it is not compared with",
            now.run,
            error,
        )
        return None
    return evaluate_drafts(store, prompts, {"in service": recipe}, gpu_policy=gpu_policy).parts[-1]


def _identity(draft: str, settings: PromoteSettings, inputs: dict[str, str]) -> Identity:
    own = {"draft": draft, **settings.identity()}
    return Identity(stage=DECISION, version=VERSION, settings=own, inputs=inputs)


def _rounds(store: Store, evaluation: Manifest) -> list[PromptRounds]:
    with artifacts.open_file(store, evaluation, EVALUATION_TABLE) as path:
        rows = read_table(path, columns=["source", "accepted_per_round"]).to_pylist()
    return [
        PromptRounds(row["source"], len(row["accepted_per_round"]), sum(row["accepted_per_round"]))
        for row in rows
    ]


def _why_not_at_all(prompts: Prompts, settings: PromoteSettings) -> list[str]:
    """What keeps a draft out of service however good it is."""
    reasons = [] if settings.enabled else ["promote.enabled is false"]
    if prompts.settings.side == "train":
        reasons.append("it was evaluated on what it was trained on (evaluate.side is train)")
    return reasons


def _decision(
    draft: str, verdict: Verdict, now: Promotion | None, against: list[str]
) -> dict[str, Any]:
    reasons = [*against, *verdict.reasons]
    return {
        "draft": draft,
        "promoted": not reasons,
        "reasons": reasons,
        "acceptance_length": round(verdict.acceptance_length, 4),
        "before": verdict.before and round(verdict.before, 4),
        "gain": None if verdict.gain is None else round(verdict.gain, 4),
        "interval": verdict.interval and [round(end, 4) for end in verdict.interval],
        "confidence": verdict.confidence,
        "sources": {
            source: [None if value is None else round(value, 4) for value in pair]
            for source, pair in verdict.sources.items()
        },
        "in service before": None if now is None else now.run,
    }


def _write_down(
    store: Store, wanted: Identity, candidate: dict[str, Any], decision: dict[str, Any]
) -> Manifest:
    with artifacts.write(store, wanted) as writer:
        text = json.dumps(candidate, indent=2, sort_keys=True)
        with writer.file(CANDIDATE_FILE, in_content=False) as path:  # it names the run
            path.write_text(text)
        return writer.publish(rows=1, facts=decision)
