"""What is seen of a training while it runs: every step timed, sent to the tracker and reported as progress."""

import time

from tasks.child import ProgressCallback
from tasks.eagle3.training import Training
from tasks.trackers import Tracking


class TrainingWatch:
    """Looks at the history of a training after each of its steps."""

    def __init__(self, training: Training, tracking: Tracking, progress: ProgressCallback) -> None:
        position = training.position
        self._training, self._tracking, self._progress = training, tracking, progress
        self._read = len(position.history)
        validations = [entry for entry in position.history if entry["validation"]]
        self._validation = validations[-1] if validations else None
        self._seconds: dict[int, float] = {}
        self._epoch, self._last = position.epoch, time.monotonic()
        self._report(position.step, training.total_steps, "")

    def on_step(self, step: int, total: int, note: str) -> None:
        """Time the step that is done: what went by since the last one, unless a validation lay between."""
        now, epoch = time.monotonic(), self._training.position.epoch
        if epoch == self._epoch:
            self._seconds[step] = now - self._last
        self._epoch, self._last = epoch, now
        self.look()
        self._report(step, total, note)

    def look(self) -> None:
        """Add times to the history's new entries, and send them to the tracker."""
        history = self._training.position.history
        for index in range(self._read, len(history)):
            entry = history[index]
            seconds = self._seconds.pop(int(entry["step"] or 0), None)
            if entry["validation"]:
                self._validation = entry
            elif seconds:
                # another dictionary, not this one changed: a checkpoint may be in the writing
                pace: dict[str, float | None] = {
                    "seconds": seconds,
                    "tokens_per_second": (entry["tokens"] or 0) / seconds,
                }
                history[index] = entry | pace
        self._read = len(history)
        self._tracking.send(history)

    def _report(self, step: int, total: int, note: str) -> None:
        if self._validation is not None:
            loss, length = self._validation["loss"], self._validation["acceptance_length"]
            shown = "not finite" if loss is None else f"{loss:.3f}"
            note = ", ".join(filter(None, [note, f"validation loss {shown}"]))
            note += "" if length is None else f", acceptance length {length:.2f}"
        self._progress(
            {"stage": "train", "done": step, "total": total, "unit": "steps", "note": note}
        )
