"""Progress of long work as log records: one channel for the terminal, plain logs and the Prefect UI.

Every 10 seconds and at the end a line is logged. A terminal that draws bars listens to `live` instead, which gets a
record about once a second with the `Progress` in its `progress` attribute, and is silent when nobody listens.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

logger = logging.getLogger(__name__)
live = logging.getLogger("outrider.live")
live.propagate = False

BAR_SECONDS = 1.0
LOG_SECONDS = 10.0


@dataclass(frozen=True)
class Progress:
    """How far one stage is: `done` of `total` units; `note` is shown behind it."""

    stage: str
    done: float
    total: float
    unit: str
    per_second: float
    note: str = ""

    @property
    def eta_seconds(self) -> float | None:
        """Seconds to go at the mean speed so far, None before there is a speed."""
        return (self.total - self.done) / self.per_second if self.per_second > 0 else None

    @property
    def speed(self) -> str:
        """The mean speed as text, slow work with a decimal; empty before there is one."""
        if self.per_second <= 0:
            return ""
        digits = 0 if self.per_second >= 20 else 1
        return f"{self.per_second:,.{digits}f} {self.unit}/s"

    def __str__(self) -> str:
        """One line for a log."""
        share = 100 * self.done / self.total if self.total else 100
        eta = self.eta_seconds
        pace = "" if eta is None else f", {self.speed}, {eta:.0f} s to go"
        note = f" ({self.note})" if self.note else ""
        return (
            f"{self.stage}: {self.done:,.0f} of {self.total:,.0f} {self.unit} "
            f"({share:.0f} %){pace}{note}"
        )


class ProgressMeter:
    """Counts the units of one stage and logs its progress; safe to call from any thread, as often as work is done.

    `done` units were there before it began: they count as done, and not for the speed.
    """

    def __init__(self, stage: str, total: float, unit: str, *, done: float = 0.0) -> None:
        self._stage, self._total, self._unit = stage, total, unit
        self._before = self._done = done
        self._finished = False
        self._lock = threading.Lock()
        self._started = self._last_bar = self._last_log = time.monotonic()

    @property
    def percent(self) -> float:
        """Share of the total that is done, at most 100."""
        return min(100.0, 100 * self._done / self._total) if self._total else 100.0

    def advance(self, units: float, note: str = "") -> None:
        """Add `units` of finished work."""
        with self._lock:
            self._set(self._done + units, note)

    @contextmanager
    def share(self) -> Iterator["Share"]:
        """A part of the work that may fail and be done again: what a failed try has counted is taken back."""
        share = Share(self)
        try:
            yield share
        except BaseException:
            share.advance(-share.done)
            raise

    def set(self, done: float, note: str = "") -> None:
        """State that `done` units are finished in all."""
        with self._lock:
            self._set(done, note)

    def _set(self, done: float, note: str) -> None:
        self._done = done
        now = time.monotonic()
        finished = done >= self._total
        if finished and self._finished:
            return  # said once
        self._finished = finished
        if not finished and now - self._last_bar < BAR_SECONDS:
            return
        self._last_bar = now
        progress = Progress(
            stage=self._stage,
            done=done,
            total=self._total,
            unit=self._unit,
            per_second=(done - self._before) / max(now - self._started, 1e-9),
            note=note,
        )
        live.info("%s", progress, extra={"progress": progress})
        if finished or now - self._last_log >= LOG_SECONDS:
            self._last_log = now
            logger.info("%s", progress, extra={"progress": progress})


def count_bytes(stage: str, total_bytes: int) -> Callable[[int], None]:
    """Return what pieces of so many bytes are reported to, from any thread; it is shown in MB."""
    meter = ProgressMeter(stage, total_bytes / 1e6, "MB")
    lock = threading.Lock()
    done = 0

    def advance(count: int) -> None:
        nonlocal done
        with lock:  # whole numbers add up to the total, shares of a MB do not
            done += count
            meter.set(done / 1e6)

    return advance


class Share:
    """The units that one try of a part of the work has added to a meter."""

    def __init__(self, meter: ProgressMeter) -> None:
        self._meter = meter
        self.done = 0.0

    def advance(self, units: float) -> None:
        """Add `units` of finished work."""
        self.done += units
        self._meter.advance(units)
