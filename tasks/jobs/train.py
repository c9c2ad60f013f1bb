"""Job of train: open the captured states, train (or go on training), publish the trained tensors."""

import logging
import math
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch

from storage import artifacts
from storage.artifacts import Identity
from storage.checkpoints import Checkpoint, Checkpoints
from storage.layout import DRAFT_FILE, METRICS_TABLE
from storage.related_trainings import related_trainings
from storage.store import Store
from storage.tables import write_metrics
from tasks.child import ProgressCallback
from tasks.disk_space import check_training_space
from tasks.eagle3.optimizers import warmup_steps
from tasks.eagle3.ranks import Ranks
from tasks.eagle3.rehearsal import Rehearsal, rehearse
from tasks.eagle3.training import Training
from tasks.eagle3.training_settings import TrainSettings
from tasks.eagle3.training_state import Position, TrainingState
from tasks.eagle3.training_step import Precision
from tasks.jobs.drafts import CPU, make_config, make_draft, trained_weights
from tasks.jobs.models import resolve_device
from tasks.jobs.ranks import joined
from tasks.jobs.samples import open_samples
from tasks.jobs.training_watch import TrainingWatch
from tasks.jobs.verifiers import open_facts
from tasks.trackers import Tracking, tracker_directory

logger = logging.getLogger(__name__)

MODULE = "tasks.jobs.train"


def run(request: dict[str, Any], progress: ProgressCallback) -> dict[str, Any]:
    """Publish the trained draft of one training identity."""
    settings = TrainSettings.model_validate(request["settings"])
    with joined(request, MODULE, count=settings.gpus) as ranks:
        if ranks.rank:
            _help(request, _of_rank(settings, ranks), ranks)
        else:
            _lead(request, _of_rank(settings, ranks), ranks, progress)
    return {}


def _lead(
    request: dict[str, Any], settings: TrainSettings, ranks: Ranks, progress: ProgressCallback
) -> None:
    """Train, alone or with others, write the checkpoints and publish what came out."""
    store, wanted = Store(request["store"]), Identity(**request["identity"])
    checkpoints = Checkpoints(store, wanted)
    with ExitStack() as stack:
        training = _open_training(stack, request, settings, ranks, checkpoints)
        check_training_space(
            store,
            wanted.path,
            trainable=sum(value.numel() for value in training.parameters.values()),
            kept_checkpoints=settings.keep_checkpoints,
        )
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
        best = training.run(
            on_checkpoint=save, on_step=watch.on_step, on_finished=checkpoints.abandon
        )
        watch.look()
        seconds = time.monotonic() - started
    steps = training.position.step - first_step
    facts = _facts(training, settings)
    facts["seconds_per_step"] = round(seconds / steps, 4) if steps else None
    with artifacts.write(store, wanted) as writer:
        writer.add_tensors(DRAFT_FILE, {name: v.cpu().contiguous() for name, v in best.items()})
        with writer.file(METRICS_TABLE, in_content=False) as path:  # it holds times
            write_metrics(path, training.position.history)
        writer.publish(rows=training.position.step, facts=facts)
    checkpoints.remove_all()  # as the stage does: these are many bytes, and it may wait for others


def _help(request: dict[str, Any], settings: TrainSettings, ranks: Ranks) -> None:
    """Take part in a training that another process leads; what came out is the same here."""
    checkpoints = Checkpoints(Store(request["store"]), Identity(**request["identity"]))
    with ExitStack() as stack:
        training = _open_training(stack, request, settings, ranks, checkpoints)
        training.run(on_checkpoint=lambda _: None, on_step=lambda *_: None)


def _of_rank(settings: TrainSettings, ranks: Ranks) -> TrainSettings:
    """Return the settings of one process: its own GPU, and checkpoints by the first alone."""
    changes: dict[str, Any] = {}
    if ranks.count > 1 and resolve_device(settings.device).type == "cuda":
        changes["device"] = f"cuda:{ranks.rank}"
    if ranks.rank:
        changes |= {"checkpoint_seconds": math.inf, "epoch_checkpoints": False}
    return settings.model_copy(update=changes)


def _open_training(
    stack: ExitStack,
    request: dict[str, Any],
    settings: TrainSettings,
    ranks: Ranks,
    checkpoints: Checkpoints,
) -> Training:
    """Return the training where its newest checkpoint left it, or at its start."""
    store = Store(request["store"])
    initial, parts = request["initial"], request["draft_parts"]
    device = _taken(settings.device)
    transform = open_facts(store, artifacts.require(store, parts["verifier"])).transform
    precision: Precision = "bf16" if settings.precision == "bf16" else "fp32"
    step = partial(
        rehearse,
        make_config(store, parts),
        settings,
        precision=precision,
        transform=transform,
        device=device,
    )
    rehearsal = Rehearsal(step, device)
    draft = make_draft(
        store,
        parts,
        seed=settings.seed,
        device=device,
        tables=CPU,  # a step reads some rows of the embedding, and the heads in its own precision
        weights=None if initial is None else trained_weights(store, initial),
    )
    checkpoint = checkpoints.load_latest(on_bad=settings.on_bad_checkpoint)
    if checkpoint is None and not ranks.rank:
        _explain_new_start(store, Identity(**request["identity"]))
    sides = open_samples(stack, store, request, max_tokens=settings.max_tokens)
    rehearsal.wait()
    training = Training(
        draft,
        sides["train"],
        sides["val"],
        settings=settings,
        precision=precision,
        train_lengths=sides["train"].lengths,
        val_lengths=sides["val"].lengths,
        transform=transform,
        ranks=ranks,
    )
    if checkpoint is not None:
        training.resume(_to_state(checkpoint))
    ranks.check_same(training.position.step)
    if not ranks.rank:
        _summarize(training, sides, settings, warm=initial is not None)
    return training


def _taken(name: str) -> torch.device:
    """Return the device of that name, current from now on: kernels start on the current one."""
    device = resolve_device(name)
    if device.type == "cuda" and device.index is not None:
        if device.index >= torch.cuda.device_count():
            raise ValueError(
                f"there is no GPU {name}: this machine has {torch.cuda.device_count()}; "
                "lower train.gpus or change train.device"
            )
        torch.cuda.set_device(device)
    return device


def _facts(training: Training, settings: TrainSettings) -> dict[str, Any]:
    position = training.position
    unmoved = training.unmoved()
    if unmoved:
        logger.warning("training left these tensors exactly as they were: %s", ", ".join(unmoved))
    return {
        "steps": position.step,
        "tokens": position.tokens,
        "parameters": sum(p.numel() for p in training.draft.parameters()),
        "trainable": sum(p.numel() for p in training.parameters.values()),
        "precision": settings.precision,
        "gpus": settings.gpus,
        "tokens_per_batch": settings.batch_tokens,
        "batch_fill": round(training.fill, 4),
        "best_epoch": position.best_epoch + 1,
        "best_validation_acceptance_length": position.best_score if training.validates else None,
        "last_loss": position.history[-1]["loss"],
        "nonfinite_steps": position.nonfinite_steps,
        "unmoved": unmoved,
        "seconds_waiting_for_data": round(training.waited_seconds, 3),
    }


def checkpoint_saver(checkpoints: Checkpoints, *, keep: int) -> Callable[[TrainingState], None]:
    """Return what stores a state of the training and then lets go of older ones."""

    def save(state: TrainingState) -> None:
        own, best = state.parts()
        saved = checkpoints.save(
            Checkpoint(
                step=state.position.step,
                tensors=own,
                state={"position": state.facts()},
                history=state.position.history,
                best_step=state.position.best_step,
                best=best,
            )
        )
        if saved is not None:
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
            "training starts anew: it differs from the one in %s (step %d) in %s; that one stays",
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
        "%d steps of %s%s tokens, %.1f %% of them used; %s at %s, reached after %d steps, then %s; %s%s",
        steps,
        f"{settings.gpus} x " if settings.gpus > 1 else "",
        f"{settings.batch_tokens:,}",
        100 * training.fill,
        settings.optimizer,
        peaks,
        warmup_steps(steps, settings),
        settings.schedule,
        settings.precision,
        f"; going on after step {done}" if done else "",
    )
