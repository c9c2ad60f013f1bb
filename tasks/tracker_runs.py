"""A training's run in TensorBoard, W&B, MLflow or trackio, by accelerate's one interface to all of them.

A training's history is a list of entries, one for each step and each validation, which a resumed training repeats
exactly. An entry's place in that list therefore tells what is new from what the tracker has of an earlier process.
"""

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from accelerate.state import PartialState
from accelerate.tracking import LOGGER_TYPE_TO_CLASS

PROJECT = "outrider"
TAG = "outrider.training"
"""MLflow chooses the ids of its runs: this tag of a run holds the training's key."""
REWIND = 100
"""Entries before a checkpoint that TensorBoard gets again: more than it can be behind one that was being written."""

Entry = Mapping[str, float | None]


class TrackerRun:
    """One run of a tracker, which gets every entry of a history once.

    Args:
        tracker: accelerate's, started.
        first: index of the first entry that the run does not have.
        place: file that keeps the number of entries sent, for trackers that cannot take any back.
        about: where it is seen, for a person.
    """

    def __init__(self, tracker: Any, *, first: int, place: Path | None, about: str) -> None:
        self.about = about
        self._tracker, self._first = tracker, first
        self._place = None if place is None else os.open(place, os.O_WRONLY | os.O_CREAT, 0o644)

    def log(self, index: int, entry: Entry) -> None:
        """Show the entry at `index` of the history, unless the run has it; what is no number is left out."""
        if index < self._first:
            return
        side = "validation" if entry["validation"] else "train"
        figures = {
            f"{side}/{name}": value
            for name, value in entry.items()
            if name not in {"step", "validation"} and value is not None
        }
        self._tracker.log(figures, step=int(entry["step"] or 0))
        if (
            self._place is not None
        ):  # in one call: a process killed at any moment leaves a whole number
            os.pwrite(self._place, b"%012d" % (index + 1), 0)

    def finish(self) -> None:
        """Send what is left and end the run."""
        self._tracker.finish()
        if self._place is not None:
            os.close(self._place)


def open_run(
    tracker: str,
    *,
    directory: Path,
    key: str,
    settings: Mapping[str, Any],
    history: Sequence[Entry],
) -> TrackerRun:
    """Open the run of the training `key`, the same as before when the training goes on.

    Args:
        tracker: tensorboard, wandb, mlflow or trackio.
        directory: where its files lie.
        key: name of the run.
        settings: shown beside the figures.
        history: the entries so far, when the training goes on.
    """
    directory.mkdir(parents=True, exist_ok=True)
    PartialState(cpu=True)  # accelerate's logging asks for it; no Accelerator, no device
    if tracker == "tensorboard":
        return _open_tensorboard(directory, key, settings, history)
    opened, goes_on, about = OPENERS[tracker](directory, key)
    opened.store_init_configuration(dict(settings))
    place = directory / f"{key}.sent"
    first = _read_place(place, otherwise=len(history) if goes_on else 0)
    return TrackerRun(opened, first=first, place=place, about=about)


def _open_tensorboard(
    directory: Path, key: str, settings: Mapping[str, Any], history: Sequence[Entry]
) -> TrackerRun:
    """Go on a little before the end of the history, and have all from there on purged that an earlier process sent."""
    first, step = 0, 0
    if history and any((directory / key).glob("events.out.*")):
        step = int(history[max(0, len(history) - REWIND)]["step"] or 0)
        first = next(i for i, entry in enumerate(history) if entry["step"] == step)
    opened = _start("tensorboard", key, directory, purge_step=step)
    if not first:  # as text: its own way makes a second run of them
        opened.log({"settings": f"```json\n{json.dumps(dict(settings), indent=2)}\n```"}, step=0)
    about = (
        f"TensorBoard events in {directory / key}; to see them: tensorboard --logdir {directory}"
    )
    return TrackerRun(opened, first=first, place=None, about=about)


def _open_wandb(directory: Path, key: str) -> tuple[Any, bool, str]:
    project = os.environ.get("WANDB_PROJECT", PROJECT)
    files = os.environ.get("WANDB_DIR", str(directory.parent))  # it adds a "wandb" of its own
    opened = _start("wandb", project, id=key, name=key[:12], resume="allow", dir=files)
    run = opened.tracker
    return opened, run.resumed, f"W&B run {key} of project {project}: {run.url or run.dir}"


def _open_mlflow(_: Path, key: str) -> tuple[Any, bool, str]:
    import mlflow  # noqa: PLC0415 - not a dependency: there when the setting asks for it

    experiment = os.environ.get("MLFLOW_EXPERIMENT_NAME", PROJECT)
    found = mlflow.search_runs(
        experiment_names=[experiment],
        filter_string=f"tags.`{TAG}` = '{key}'",
        max_results=1,
        output_format="list",
    )
    run_id = found[0].info.run_id if found else None
    opened = _start("mlflow", experiment, run_id=run_id, run_name=key[:12], tags={TAG: key})
    about = f"MLflow run {key[:12]} of experiment {experiment} at {mlflow.get_tracking_uri()}"
    return opened, bool(found), about


def _open_trackio(_: Path, key: str) -> tuple[Any, bool, str]:
    opened = _start("trackio", PROJECT, name=key, resume="allow")
    # whether there was such a run it does not say
    return opened, True, f"trackio run {key}; to see it: trackio show --project {PROJECT}"


OPENERS: dict[str, Callable[[Path, str], tuple[Any, bool, str]]] = {
    "wandb": _open_wandb,
    "mlflow": _open_mlflow,
    "trackio": _open_trackio,
}
"""Tracker -> what opens it and tells whether the run was there before, and where it is seen."""


def _start(tracker: str, *names: Any, **options: Any) -> Any:
    opened = LOGGER_TYPE_TO_CLASS[tracker](*names, **options)
    opened.start()
    return opened


def _read_place(place: Path, *, otherwise: int) -> int:
    """How many entries were sent from here; from another machine, at least those that the checkpoint knows."""
    try:
        return int(place.read_text())
    except (OSError, ValueError):
        return otherwise
