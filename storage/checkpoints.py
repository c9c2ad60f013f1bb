"""Training checkpoints: all that a training needs to go on as if it had never stopped.

A checkpoint is complete or is none. Its tensors keep their dtype (weights, optimizer moments,
random states as bytes), its state is JSON, and both are digested again when they are read. What
many checkpoints have in common lies beside them and is written once: the best weights until then,
and the metrics of the past in segments of SEGMENT_ENTRIES.
"""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from threading import Event
from typing import TYPE_CHECKING, Any, Literal

from storage import artifacts
from storage.artifacts import ArtifactError, Identity, write
from storage.layout import (
    ENTRIES_FILE,
    MANIFEST_NAME,
    STATE_FILE,
    TENSORS_FILE,
    best_directory,
    bests_directory,
    checkpoint_directory,
    is_step,
    metrics_directory,
    parse_step,
    segments_directory,
    steps_directory,
)
from storage.manifest import Manifest, canonical_json, digest_file
from storage.store import Store, StoreError
from storage.tensor_files import AbandonedError

if TYPE_CHECKING:  # torch takes seconds to import and most readers of a store need none
    import torch

logger = logging.getLogger(__name__)

STAGE, BEST_STAGE, METRICS_STAGE = "checkpoint", "best_weights", "metrics"
VERSION = 2
SEGMENT_ENTRIES = 1000
"""Entries of the history that are stored together, once they are complete."""

OnBad = Literal["stop", "older"]


class CheckpointError(ValueError):
    """A checkpoint cannot be read; the message names it and the ways out. Another try gives the same."""


@dataclass(frozen=True)
class Checkpoint:
    """A training after optimizer step `step`."""

    step: int
    tensors: Mapping[str, "torch.Tensor"]
    """Any dtypes and devices; they must not change while they are saved."""
    state: Mapping[str, Any]
    """The rest, as plain JSON types."""
    history: Sequence[dict[str, Any]] = ()
    """One entry of plain JSON types for each event since the start; it only ever grows."""
    best_step: int | None = None
    """The step after which the weights were the best until now."""
    best: Mapping[str, "torch.Tensor"] = field(default_factory=dict)
    """These weights. May be left out when an earlier checkpoint with the same `best_step` was saved or loaded."""


class Checkpoints:
    """The checkpoints of one training in a store. For one thread at a time, besides `abandon`."""

    def __init__(self, store: Store, training: Identity) -> None:
        self._store, self._training, self._key = store, training, training.key
        self._abandoned = Event()
        self._best: Manifest | None = None
        self._sealed_entries = 0

    def save(self, checkpoint: Checkpoint) -> Manifest | None:
        """Store a checkpoint; a process killed on the way leaves none.

        None when it was abandoned, or another run, whose end removes the checkpoints, has completed the training.

        Raises:
            ValueError: state or history are no JSON, or the best weights were neither given nor stored before.
            StoreError: it could not be written.
        """
        state_json = canonical_json(dict(checkpoint.state), name="state")
        canonical_json(list(checkpoint.history[self._sealed_entries :]), name="history")
        try:
            return self._save(checkpoint, state_json)
        except AbandonedError:
            cause = "the training has come to its end"
        except (StoreError, OSError):
            if artifacts.find(self._store, self._training) is None:
                raise
            self.abandon()
            cause = "another run has completed this training"
        logger.info("the checkpoint of step %d is not needed any more: %s", checkpoint.step, cause)
        return None

    def abandon(self) -> None:
        """Give up a checkpoint that is being saved, in another thread, and every one after it."""
        self._abandoned.set()

    def _save(self, checkpoint: Checkpoint, state_json: str) -> Manifest:
        self._save_best(checkpoint)
        self._seal(checkpoint.history)
        tail = canonical_json(list(checkpoint.history[self._sealed_entries :]))
        identity = Identity(
            stage=STAGE,
            version=VERSION,
            settings={
                "train_key": self._key,
                "step": checkpoint.step,
                "best_step": checkpoint.best_step,
                "sealed_entries": self._sealed_entries,
            },
            inputs={"best": self._best.content} if self._best is not None else {},
            directory=checkpoint_directory(self._key, checkpoint.step),
        )
        training = {
            "version": self._training.version,
            "settings": self._training.settings,
            "inputs": self._training.inputs,
        }
        files = {STATE_FILE: f'{{"state":{state_json},"history":{tail}}}'.encode()}
        return self._write(identity, checkpoint.tensors, files, facts={"training": training})

    def steps(self) -> list[int]:
        """Steps that have a manifest, ascending; whether their files are whole is not looked at."""
        return self._with_manifest(steps_directory(self._key))

    def load_latest(self, *, on_bad: OnBad = "stop") -> Checkpoint | None:
        """The checkpoint of the highest step, every digest checked; None when there is none.

        Args:
            on_bad: what to do when it cannot be read: "stop", or set it aside and take the newest "older" one
                that can.

        Raises:
            CheckpointError: it, or with "older" every one, cannot be read. Nothing is set aside then, so that the
                next try does not start from the beginning in silence.
        """
        bad: dict[int, str] = {}
        for step in reversed(self.steps()):
            try:
                found = self._load(step)
            except (ArtifactError, KeyError, ValueError) as error:
                if step not in self.steps():  # another run pruned it meanwhile, having newer ones
                    return self.load_latest(on_bad=on_bad)
                bad[step] = str(error)
                if on_bad == "stop":
                    raise CheckpointError(self._way_out(step, bad[step])) from error
                continue
            for skipped, problem in bad.items():
                path = checkpoint_directory(self._key, skipped)
                artifacts.set_aside(self._store, path, problem=problem)
            return found
        if bad:
            problems = "; ".join(f"step {step}: {problem}" for step, problem in bad.items())
            raise CheckpointError(
                f"none of the checkpoints in {self._store.url}/{steps_directory(self._key)} can be read "
                f"({problems}); delete that directory to train from the start"
            )
        return None

    def prune(self, *, keep: int) -> list[int]:
        """Delete all but the `keep` highest steps and the best weights they name; returns the deleted steps.

        What killed saves left behind goes too, once it is old. A failure to delete is logged: space
        is not worth a run.

        Raises:
            ValueError: `keep` is less than 1.
        """
        if keep < 1:
            raise ValueError(
                f"keep must be 1 or more, not {keep}: a training needs a checkpoint to go on"
            )
        steps, store = self.steps(), self._store
        try:
            for step in steps[:-keep]:
                artifacts.remove(store, checkpoint_directory(self._key, step))
            self._prune_bests(steps[-keep:])
            for directory in (steps_directory(self._key), bests_directory(self._key)):
                for name in store.directories(directory):
                    artifacts.remove_garbage(store, f"{directory}/{name}")
        except (StoreError, ArtifactError) as error:
            logger.warning("old checkpoints of %s stay for now: %s", self._key, error)
        return steps[:-keep]

    def remove_all(self) -> None:
        """Delete them, when the training is completed and published. A failure to delete is logged."""
        try:
            for place in (steps_directory, segments_directory, bests_directory):
                artifacts.remove_all(self._store, place(self._key))
        except (StoreError, ArtifactError) as error:
            logger.warning("checkpoints of %s stay for now: %s", self._key, error)

    def _prune_bests(self, kept: Sequence[int]) -> None:
        manifests = [
            artifacts.peek(self._store, checkpoint_directory(self._key, step)) for step in kept
        ]
        wanted = {manifest.settings["best_step"] for manifest in manifests} - {None}
        for step in self._with_manifest(bests_directory(self._key)):
            # one that is newer may be of another run, whose checkpoint is still being written
            if step not in wanted and step < max(wanted, default=0):
                artifacts.remove(self._store, best_directory(self._key, step))

    def _save_best(self, checkpoint: Checkpoint) -> None:
        step = checkpoint.best_step
        if step is None:
            self._best = None
        elif self._best is None or self._best.settings["step"] != step:
            if not checkpoint.best:
                raise ValueError(
                    f"the best weights, of step {step}, were neither stored before nor given; hand them over"
                )
            identity = Identity(
                stage=BEST_STAGE,
                version=VERSION,
                settings={"train_key": self._key, "step": step},
                inputs={},
                directory=best_directory(self._key, step),
            )
            self._best = self._write(identity, checkpoint.best, {})

    def _seal(self, history: Sequence[dict[str, Any]]) -> None:
        """Store the segments of the history that have become complete."""
        while len(history) >= (stop := self._sealed_entries + SEGMENT_ENTRIES):
            start = self._sealed_entries
            identity = Identity(
                stage=METRICS_STAGE,
                version=VERSION,
                settings={"train_key": self._key, "start": start, "stop": stop},
                inputs={},
                directory=metrics_directory(self._key, start, stop),
            )
            entries = canonical_json(list(history[start:stop])).encode()
            self._write(identity, {}, {ENTRIES_FILE: entries}, rows=SEGMENT_ENTRIES)
            self._sealed_entries = stop

    def _write(
        self,
        identity: Identity,
        tensors: Mapping[str, "torch.Tensor"],
        files: Mapping[str, bytes],
        *,
        rows: int | None = None,
        facts: Mapping[str, Any] | None = None,
    ) -> Manifest:
        """Publish an artifact; the files of one that it replaces go at once: they may be large."""
        replaced = self._attempts(identity.path)
        with write(self._store, identity) as writer:
            if tensors:
                writer.add_tensors(TENSORS_FILE, _on_cpu(tensors), abandoned=self._abandoned.is_set)
            for name, content in files.items():
                writer.add_bytes(name, content)
            rows = len(tensors) if rows is None else rows
            manifest = writer.publish(rows=rows, facts=facts)
        for attempt in replaced:
            self._store.delete(f"{identity.path}/{attempt}")
        return manifest

    def _attempts(self, path: str) -> set[str]:
        """Where the files of the artifact at `path` lie, if there is one."""
        try:
            found = artifacts.peek(self._store, path)
        except ArtifactError:
            return set()
        return {entry.path.split("/", 1)[0] for entry in found.files.values()}

    def _load(self, step: int) -> Checkpoint:
        """Read a checkpoint and what it shares; any ValueError, KeyError, ... says why it cannot be."""
        store, path = self._store, checkpoint_directory(self._key, step)
        manifest = artifacts.peek(store, path)
        if (manifest.stage, manifest.version) != (STAGE, VERSION):
            raise ValueError(
                f"it is of format {manifest.version}, this version of Outrider reads {VERSION}"
            )
        best_step, sealed = manifest.settings["best_step"], manifest.settings["sealed_entries"]
        best, best_weights = None, {}
        if best_step is not None:
            best = artifacts.peek(store, best_directory(self._key, best_step))
            if best.content != manifest.inputs["best"]:
                raise ValueError(
                    f"{best.path} does not hold the best weights that it was saved with"
                )
            best_weights = _read_tensors(store, best)
        history: list[dict[str, Any]] = []
        for start in range(0, sealed, SEGMENT_ENTRIES):
            segment = metrics_directory(self._key, start, start + SEGMENT_ENTRIES)
            history += _read_json(store, artifacts.peek(store, segment), ENTRIES_FILE)
        content = _read_json(store, manifest, STATE_FILE)
        tensors = _read_tensors(store, manifest)
        self._best, self._sealed_entries = best, sealed
        history += content["history"]
        return Checkpoint(step, tensors, content["state"], history, best_step, best_weights)

    def _with_manifest(self, directory: str) -> list[int]:
        return sorted(
            parse_step(name)
            for name in self._store.directories(directory)
            if is_step(name) and self._store.size(f"{directory}/{name}/{MANIFEST_NAME}") is not None
        )

    def _way_out(self, step: int, problem: str) -> str:
        path = f"{self._store.url}/{checkpoint_directory(self._key, step)}"
        older = [found for found in reversed(self.steps()) if found < step]
        good = next((found for found in older if self._is_good(found)), None)
        if good is not None:
            instead = f"set train.on_bad_checkpoint to older to go on from step {good}"
        elif older:
            directory = f"{self._store.url}/{steps_directory(self._key)}"
            instead = f"no older one can be read either: delete {directory} to train from the start"
        else:
            instead = "there is no older one: delete it to train from the start"
        return f"the checkpoint {path} cannot be read ({problem}); {instead}"

    def _is_good(self, step: int) -> bool:
        try:
            Checkpoints(self._store, self._training)._load(step)
        except (ArtifactError, KeyError, ValueError):
            return False
        return True


@contextmanager
def _checked_file(store: Store, manifest: Manifest, name: str) -> Iterator[Path]:
    """A local path with a file of an artifact; ValueError when its bytes are not those that were published."""
    entry = manifest.files[name]
    place = f"{manifest.path}/{entry.path}"
    with ExitStack() as stack:
        try:
            path = stack.enter_context(store.reading(place))
        except FileNotFoundError as error:
            raise ValueError(f"{place} is missing") from error
        size = path.stat().st_size
        if size != entry.bytes:
            raise ValueError(f"{place} has {size} bytes, its manifest says {entry.bytes}")
        digest = digest_file(path)
        if digest != entry.xxh3:
            raise ValueError(f"{place} has the digest {digest}, its manifest says {entry.xxh3}")
        yield path


def _read_tensors(store: Store, manifest: Manifest) -> dict[str, "torch.Tensor"]:
    from safetensors.torch import load_file  # noqa: PLC0415 - see above

    if TENSORS_FILE not in manifest.files:
        return {}
    with _checked_file(store, manifest, TENSORS_FILE) as path:
        tensors: dict[str, torch.Tensor] = load_file(path)  # mapped privately: writing is safe
    return tensors


def _read_json(store: Store, manifest: Manifest, name: str) -> Any:
    with _checked_file(store, manifest, name) as path:
        return json.loads(path.read_bytes())


def _on_cpu(tensors: Mapping[str, "torch.Tensor"]) -> dict[str, "torch.Tensor"]:
    return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}
