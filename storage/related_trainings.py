"""Which other trainings in a store are nearly the same: why one that was changed starts anew."""

import re
from dataclasses import dataclass
from typing import Any

from storage import artifacts
from storage.artifacts import ArtifactError, Identity
from storage.layout import CHECKPOINTS, MANIFEST_NAME
from storage.manifest import Manifest
from storage.store import Store

_MANIFEST = re.compile(rf"([^/]+)(?:/steps/step-\d{{9,}})?/{re.escape(MANIFEST_NAME)}")
"""Of a completed training, or of a checkpoint."""


@dataclass(frozen=True)
class RelatedTraining:
    """A training, completed or with checkpoints, that has the inputs of another one."""

    directory: str
    """Where it lies in the store."""
    step: int
    """How far it has come."""
    differences: dict[str, tuple[Any, Any]]
    """Setting -> its value there, and here; None where one has no such setting."""


def related_trainings(store: Store, training: Identity, *, group: str) -> list[RelatedTraining]:
    """Trainings, completed or with checkpoints, that differ in settings of the group `group` and in nothing else.

    Nearest first: those with the fewest differences, of these the one that got furthest.
    """
    paths = {}
    for name in sorted(store.sizes(CHECKPOINTS)):  # of a training's checkpoints the last one counts
        match = _MANIFEST.fullmatch(name)
        if match is not None and match[1] != training.key:
            paths[match[1]] = f"{CHECKPOINTS}/{name.removesuffix(f'/{MANIFEST_NAME}')}"
    found = []
    for key, path in paths.items():
        try:
            manifest = artifacts.peek(store, path)
        except ArtifactError:
            continue  # pruned meanwhile, or unreadable: whoever resumes it will be told
        completed = path == f"{CHECKPOINTS}/{key}"
        there = _identity(manifest) if completed else manifest.facts.get("training")
        step = manifest.rows if completed else manifest.settings["step"]
        differences = None if there is None else _differences(there, training, group)
        if differences:
            found.append(RelatedTraining(f"{CHECKPOINTS}/{key}", step, differences))
    return sorted(found, key=lambda one: (len(one.differences), -one.step, one.directory))


def _identity(completed: Manifest) -> dict[str, Any]:
    return {name: getattr(completed, name) for name in ("version", "settings", "inputs")}


def _differences(
    there: dict[str, Any], here: Identity, group: str
) -> dict[str, tuple[Any, Any]] | None:
    """Settings of the group that differ; None when anything else differs as well."""
    theirs, ours = dict(there["settings"]), dict(here.settings)
    their_group, our_group = theirs.pop(group, {}), ours.pop(group, {})
    if (there["version"], theirs, there["inputs"]) != (here.version, ours, here.inputs):
        return None
    return {
        name: (their_group.get(name), our_group.get(name))
        for name in sorted(their_group.keys() | our_group.keys())
        if their_group.get(name) != our_group.get(name)
    }
