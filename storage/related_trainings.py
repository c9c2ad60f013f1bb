"""Which other trainings in a store are nearly the same: why one that was changed starts anew."""

import re
from dataclasses import dataclass
from typing import Any

from storage import artifacts
from storage.artifacts import ArtifactError, Identity
from storage.layout import CHECKPOINTS, MANIFEST_NAME, checkpoint_directory, parse_step
from storage.store import Store

_CHECKPOINT = re.compile(rf"([^/]+)/steps/(step-\d{{9,}})/{re.escape(MANIFEST_NAME)}")


@dataclass(frozen=True)
class RelatedTraining:
    """A training with checkpoints that has the inputs of another one."""

    directory: str
    """Where it lies in the store."""
    step: int
    """Of its last checkpoint."""
    differences: dict[str, tuple[Any, Any]]
    """Setting -> its value there, and here; None where one has no such setting."""


def related_trainings(store: Store, training: Identity, *, group: str) -> list[RelatedTraining]:
    """Trainings with checkpoints that differ in settings of the group `group` and in nothing else.

    Nearest first: those with the fewest differences, of these the one that got furthest.
    """
    latest: dict[str, int] = {}
    for name in store.sizes(CHECKPOINTS):
        match = _CHECKPOINT.fullmatch(name)
        if match is not None and match[1] != training.key:
            latest[match[1]] = max(latest.get(match[1], 0), parse_step(match[2]))
    found = []
    for key, step in latest.items():
        try:
            facts = artifacts.peek(store, checkpoint_directory(key, step)).facts
        except ArtifactError:
            continue  # pruned meanwhile, or unreadable: whoever resumes it will be told
        there = facts.get("training")
        differences = None if there is None else _differences(there, training, group)
        if differences:
            found.append(RelatedTraining(f"{CHECKPOINTS}/{key}", step, differences))
    return sorted(found, key=lambda one: (len(one.differences), -one.step, one.directory))


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
