"""A training's history as people read it: one row for each epoch, curves of a few hundred points."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby

from storage import artifacts
from storage.artifacts import ArtifactError
from storage.layout import METRICS_TABLE
from storage.manifest import Manifest
from storage.store import Store, StoreError
from storage.tables import read_table

Entry = Mapping[str, float | None]
Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Quality:
    """How good the draft was on one side; None where nothing finite was measured."""

    loss: float | None
    acceptance_length: float | None
    """Expected tokens of a round, when drafting as many as the training looks ahead."""
    accuracies: tuple[float | None, ...]
    """Share of positions at which all drafted tokens up to the first, second, ... are right."""


@dataclass(frozen=True)
class Epoch:
    """One pass over the train side: means over its steps, and the validation at its end."""

    number: int
    """From 1."""
    last_step: int
    lr: float | None
    """At the last step."""
    tokens_per_second: float | None
    """Of the steps that were timed."""
    train: Quality
    validation: Quality | None


def read_history(store: Store, trained: Manifest) -> list[dict[str, float | None]]:
    """Return the history that a trained draft's artifact holds, empty when it has gone."""
    try:
        with artifacts.open_file(store, trained, METRICS_TABLE) as path:
            rows: list[dict[str, float | None]] = read_table(path).to_pylist()
            return rows
    except (ArtifactError, StoreError):
        return []


def epochs_of(history: Sequence[Entry]) -> list[Epoch]:
    """Return the epochs of a history, in order."""
    return [
        _epoch(int(number or 0), list(entries))
        for number, entries in groupby(history, key=lambda entry: entry["epoch"])
    ]


def _epoch(number: int, entries: list[Entry]) -> Epoch:
    steps = [entry for entry in entries if not entry["validation"]]
    validations = [entry for entry in entries if entry["validation"]]
    timed = [entry for entry in steps if entry.get("seconds")]
    seconds = sum(entry["seconds"] or 0.0 for entry in timed)
    return Epoch(
        number=number + 1,
        last_step=int(entries[-1]["step"] or 0),
        lr=steps[-1]["lr"] if steps else None,
        tokens_per_second=sum(e["tokens"] or 0.0 for e in timed) / seconds if seconds else None,
        train=_quality(steps),
        validation=_quality(validations) if validations else None,
    )


def _quality(entries: list[Entry]) -> Quality:
    return Quality(
        loss=_mean(entries, "loss"),
        acceptance_length=_mean(entries, "acceptance_length"),
        accuracies=tuple(_mean(entries, name) for name in accuracy_names(entries)),
    )


def _mean(entries: Sequence[Entry], name: str) -> float | None:
    values = [value for entry in entries if (value := entry.get(name)) is not None]
    return sum(values) / len(values) if values else None


def accuracy_names(history: Sequence[Entry]) -> list[str]:
    """Return the names of the accuracies in a history, those of the first position first."""
    found = {name for entry in history for name in entry if name.startswith("full_acc_")}
    return sorted(found, key=lambda name: int(name.removeprefix("full_acc_")))


def curve(history: Sequence[Entry], name: str, *, validation: bool, points: int = 200) -> Points:
    """Return (step, value) of one side; a longer curve is thinned to means over equal numbers of steps."""
    found = [
        (float(entry["step"] or 0), value)
        for entry in history
        if bool(entry["validation"]) is validation and (value := entry.get(name)) is not None
    ]
    size = -(-len(found) // points) or 1
    groups = [found[start : start + size] for start in range(0, len(found), size)]
    return [(group[-1][0], sum(value for _, value in group) / len(group)) for group in groups]
