"""Tracking of a training: its figures go to a tracker behind its back, and nothing there can stop it."""

import logging
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from storage.store import Store
from tasks.tracker_runs import Entry, TrackerRun, open_run
from tasks.verifier_sources import cache_directory

logger = logging.getLogger(__name__)

FINISH_SECONDS = 120.0
"""How long the end of a training waits for a slow server."""


def tracker_directory(store: Store, tracker: str) -> Path:
    """Return where a tracker's files lie: beside the artifacts of a local store, else in this machine's cache."""
    return (store.local_path("") or cache_directory()) / tracker


class Tracking:
    """Sends the history of one training to its tracker, from a thread of its own; a failure there is a warning.

    Args:
        tracker: tensorboard, wandb, mlflow, trackio or none.
        directory: where the tracker's files lie.
        key: the training's, and the name of its run in the tracker.
        settings: what the tracker shows beside the figures.
        history: the entries so far, when the training goes on.
    """

    def __init__(
        self,
        tracker: str,
        *,
        directory: Path,
        key: str,
        settings: Mapping[str, Any],
        history: Sequence[Entry],
    ) -> None:
        self._name = tracker
        self._run: TrackerRun | None = None
        self._queued = 0
        self._calls: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._work, name="tracking", daemon=True)
        if tracker != "none":
            options = {"directory": directory, "key": key, "settings": settings}
            self._calls.put(partial(self._open, history=list(history), **options))
        self._thread.start()

    def send(self, history: Sequence[Entry]) -> None:
        """Send the entries that are new since the last call, without waiting for it."""
        for index in range(self._queued, len(history)):
            self._calls.put(partial(self._log, index, history[index]))
        self._queued = len(history)

    def close(self) -> None:
        """Send the rest and end the tracker's run; a server that takes too long is left behind."""
        self._calls.put(self._finish)
        self._calls.put(None)
        self._thread.join(FINISH_SECONDS)
        if self._thread.is_alive():
            self._give_up(f"not everything was sent within {FINISH_SECONDS:.0f} s")

    def _work(self) -> None:
        for call in iter(self._calls.get, None):
            try:
                call()
            except Exception as error:
                self._give_up(" ".join(f"{type(error).__name__}: {error}".split()))

    def _give_up(self, cause: str) -> None:
        self._run = None
        logger.warning(
            "train.tracker %s is given up: %s (the training goes on; its figures are kept with its result)",
            self._name,
            cause,
        )

    def _open(self, **options: Any) -> None:
        self._run = open_run(self._name, **options)
        logger.info("%s", self._run.about)

    def _log(self, index: int, entry: Entry) -> None:
        if self._run is not None:
            self._run.log(index, entry)

    def _finish(self) -> None:
        if self._run is not None:
            self._run.finish()
