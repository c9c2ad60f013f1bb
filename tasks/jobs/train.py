"""Job of train: open the captured states, train (or go on training), publish the trained tensors."""

import logging
import time
from contextlib import ExitStack
from typing import Any

from safetensors.torch import save_file
from torch import Tensor

from storage import artifacts
from storage.artifacts import Identity
from storage.checkpoints import (
    latest_checkpoint,
    load_checkpoint,
    prune_checkpoints,
    save_checkpoint,
)
from storage.layout import DRAFT_FILE, METRICS_TABLE
from storage.store import Store
from storage.tables import write_metrics
from tasks.child import ProgressCallback
from tasks.eagle3.training import Position, Training
from tasks.eagle3.training_settings import TrainSettings
from tasks.jobs.drafts import make_draft
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
    draft = make_draft(store, request["draft_parts"], seed=settings.seed, device=device)
    verifier = artifacts.require(store, request["draft_parts"]["verifier"])
    checkpoint = latest_checkpoint(store, wanted.key)
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
            tensors, state = load_checkpoint(store, checkpoint[1])
            training.resume(state["position"], tensors)
        _summarize(training, sides, resumed=checkpoint is not None, precision=settings.precision)
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

        def save(position: Position, tensors: dict[str, Tensor]) -> None:
            state = {"position": vars(position)}
            save_checkpoint(store, wanted.key, step=position.step, tensors=tensors, state=state)
            prune_checkpoints(store, wanted.key, keep=settings.keep_checkpoints)

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
        "best_epoch": position.best_epoch + 1,
        "best_validation_acceptance_length": position.best_score if len(sides["val"]) else None,
        "last_loss": position.history[-1]["loss"],
        "nonfinite_steps": position.nonfinite_steps,
        "unmoved": unmoved,
        "seconds_per_step": round(seconds / steps, 4) if steps else None,
    }
    with artifacts.write(store, wanted) as writer:
        with writer.file(DRAFT_FILE) as path:
            save_file({name: value.cpu().contiguous() for name, value in best.items()}, path)
        with writer.file(METRICS_TABLE, in_content=False) as path:  # it holds times
            write_metrics(path, position.history)
        writer.publish(rows=position.step, facts=facts)
    prune_checkpoints(store, wanted.key, keep=1)
    return {}


def _summarize(training: Training, sides: dict[str, Any], *, resumed: bool, precision: str) -> None:
    trainable = sum(value.numel() for value in training.parameters.values())
    total = sum(value.numel() for value in training.draft.parameters())
    logger.info(
        "%.2f M parameters, %.2f M of them trainable; %d samples of %s tokens to train on, %d to validate; "
        "%d steps in %s%s",
        total / 1e6,
        trainable / 1e6,
        len(sides["train"]),
        f"{sum(sides['train'].lengths):,}",
        len(sides["val"]),
        training.total_steps,
        precision,
        f"; going on after step {training.position.step}" if resumed else "",
    )
