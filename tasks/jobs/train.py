"""Job of train: open the captured states, train (or go on training), publish the trained tensors."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack
from typing import Any

from safetensors.torch import save_file

from storage import artifacts
from storage.artifacts import Identity
from storage.checkpoints import Checkpoint, Checkpoints
from storage.layout import DRAFT_FILE, METRICS_TABLE
from storage.related_trainings import related_trainings
from storage.store import Store
from storage.tables import write_metrics
from tasks.child import ProgressCallback
from tasks.eagle3.optimizers import warmup_steps
from tasks.eagle3.training import Training
from tasks.eagle3.training_settings import TrainSettings
from tasks.eagle3.training_state import Position, TrainingState
from tasks.jobs.drafts import make_draft, trained_weights
from tasks.jobs.models import resolve_device
from tasks.jobs.samples import open_samples
from tasks.jobs.training_watch import TrainingWatch
from tasks.jobs.verifiers import open_facts
from tasks.trackers import Tracking, tracker_directory

logger = logging.getLogger(__name__)


def run(request: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
    """Publish the trained draft of one training identity."""
    store, wanted = Store(request["store"]), Identity(**request["identity"])
    settings = TrainSettings.model_validate(request["settings"])
    device = resolve_device(settings.device)
    initial = request["initial"]
    weights = None if initial is None else trained_weights(store, initial)
    draft = make_draft(
        store, request["draft_parts"], seed=settings.seed, device=device, weights=weights
    )
    verifier = artifacts.require(store, request["draft_parts"]["verifier"])
    checkpoints = Checkpoints(store, wanted)
    checkpoint = checkpoints.load_latest(on_bad=settings.on_bad_checkpoint)
    if checkpoint is None:
        _explain_new_start(store, wanted)
    with ExitStack() as stack:
        sides = open_samples(stack, store, request, max_tokens=settings.max_tokens)
        training = Training(
            draft,
            sides["train"],
            sides["val"],
            settings=settings,
            precision="bf16" if settings.precision == "bf16" else "fp32",
            train_lengths=sides["train"].lengths,
            val_lengths=sides["val"].lengths,
            transform=open_facts(store, verifier).transform,
        )
        if checkpoint is not None:
            training.resume(_to_state(checkpoint))
            del checkpoint  # its tensors are the training's now
        _summarize(training, sides, settings, warm=request["initial"] is not None)
        tracking = Tracking(
            settings.tracker,
            directory=tracker_directory(store, settings.tracker),
            key=wanted.key,
            settings=settings.identity(),
            history=training.position.history,
        )
        stack.callback(tracking.close)
        started, first_step = time.monotonic(), training.position.step
        watch = TrainingWatch(training, tracking, progress)

        save = checkpoint_saver(checkpoints, keep=settings.keep_checkpoints)
        best = training.run(on_checkpoint=save, on_step=watch.on_step)
        watch.look()
        seconds = time.monotonic() - started
    position = training.position
    unmoved = training.unmoved()
    if unmoved:
        logger.warning("training left these tensors exactly as they were: %s", ", ".join(unmoved))
    steps = position.step - first_step
    facts: dict[str, Any] = {
        "steps": position.step,
        "tokens": position.tokens,
        "parameters": sum(p.numel() for p in draft.parameters()),
        "trainable": sum(p.numel() for p in training.parameters.values()),
        "precision": settings.precision,
        "tokens_per_batch": settings.batch_tokens,
        "batch_fill": round(training.fill, 4),
        "best_epoch": position.best_epoch + 1,
        "best_validation_acceptance_length": position.best_score if len(sides["val"]) else None,
        "last_loss": position.history[-1]["loss"],
        "nonfinite_steps": position.nonfinite_steps,
        "unmoved": unmoved,
        "seconds_per_step": round(seconds / steps, 4) if steps else None,
        "seconds_waiting_for_data": round(training.waited_seconds, 3),
    }
    with artifacts.write(store, wanted) as writer:
        with writer.file(DRAFT_FILE) as path:
            save_file({name: value.cpu().contiguous() for name, value in best.items()}, path)
        with writer.file(METRICS_TABLE, in_content=False) as path:  # it holds times
            write_metrics(path, position.history)
        writer.publish(rows=position.step, facts=facts)
    checkpoints.prune(keep=1)
    return {}


def checkpoint_saver(checkpoints: Checkpoints, *, keep: int) -> Callable[[TrainingState], None]:
    """Return what stores a state of the training and then lets go of older ones."""

    def save(state: TrainingState) -> None:
        own, best = state.parts()
        checkpoints.save(
            Checkpoint(
                step=state.position.step,
                tensors=own,
                state={"position": state.facts()},
                history=state.position.history,
                best_step=state.position.best_step,
                best=best,
            )
        )
        checkpoints.prune(keep=keep)

    return save


def _to_state(checkpoint: Checkpoint) -> TrainingState:
    position = Position(**checkpoint.state["position"], history=list(checkpoint.history))
    return TrainingState.from_parts(position, checkpoint.tensors, checkpoint.best)


def _explain_new_start(store: Store, wanted: Identity) -> None:
    """Say so when there are checkpoints of a training that other settings of `train` alone set apart."""
    related = related_trainings(store, wanted, group="train")
    if related:
        nearest = related[0]
        changes = ", ".join(
            f"train.{name} {here} (there {there})"
            for name, (there, here) in nearest.differences.items()
        )
        logger.info(
            "training starts anew: it differs from the one in %s (step %d) in %s; the checkpoints there stay",
            nearest.directory,
            nearest.step,
            changes,
        )


def _summarize(
    training: Training, sides: dict[str, Any], settings: TrainSettings, *, warm: bool
) -> None:
    """Say what is going to be trained, before the first step."""
    trainable = sum(value.numel() for value in training.parameters.values())
    total = sum(value.numel() for value in training.draft.parameters())
    steps, done = training.total_steps, training.position.step
    logger.info(
        "%.2f M parameters, %.2f M of them trainable%s; %d samples of %s tokens to train on, %d to validate",
        total / 1e6,
        trainable / 1e6,
        ", from train.init" if warm else "",
        len(sides["train"]),
        f"{sum(sides['train'].lengths):,}",
        len(sides["val"]),
    )
    peaks = f"{settings.lr:g}"
    if settings.optimizer == "muon":
        peaks = f"{settings.peak_muon_lr:g} (matrices) and {settings.lr:g}"
    logger.info(
        "%d steps of %s tokens, %.1f %% of them used; %s at %s, reached after %d steps, then %s; %s%s",
        steps,
        f"{settings.batch_tokens:,}",
        100 * training.fill,
        settings.optimizer,
        peaks,
        warmup_steps(steps, settings),
        settings.schedule,
        settings.precision,
        f"; going on after step {done}" if done else "",
    )
