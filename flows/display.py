"""What a run shows: bars in a terminal, plain lines in a log, and the same lines in Prefect's UI."""

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

from flows.run_log import OUR_LOGGERS
from tasks.progress import Progress as Done
from tasks.progress import live

LINE = logging.Formatter("%(asctime)s %(levelname).1s %(message)s", "%H:%M:%S")


@contextmanager
def shown_run(*, debug: bool) -> Iterator[None]:
    """Show the log of the block on stderr, with progress bars when that is a terminal."""
    console = Console(stderr=True)
    level = logging.DEBUG if debug else logging.INFO
    for name in OUR_LOGGERS:
        logging.getLogger(name).setLevel(level)
        logging.getLogger(name).propagate = False  # Prefect's console would print each line again
    if not debug:  # the cause is printed once, at the end; tracebacks are in Prefect's own records
        logging.getLogger("prefect").propagate = False
    if not console.is_terminal:
        with _handler(_stream_handler()):
            yield
        return
    bars = _make_bars(console)
    handler = _BarsHandler(bars)
    live.addHandler(handler)
    live.setLevel(logging.INFO)
    try:
        with bars, _handler(_ConsoleHandler(bars.console)):
            yield
    finally:
        live.removeHandler(handler)


class _BarsHandler(logging.Handler):
    """Turns progress records into bars, one for each stage."""

    def __init__(self, bars: Progress) -> None:
        super().__init__()
        self._bars = bars
        self._ids: dict[str, TaskID] = {}

    def emit(self, record: logging.LogRecord) -> None:
        done: Done = record.__dict__["progress"]
        if done.stage not in self._ids:
            self._ids[done.stage] = self._bars.add_task(
                done.stage, total=done.total, completed=int(done.done), speed=""
            )
        speed = f"{done.speed} {done.note}".strip()
        bar = self._ids[done.stage]
        self._bars.update(bar, completed=done.done, total=done.total, speed=speed)
        if done.done >= done.total:
            self._bars.remove_task(self._ids.pop(done.stage))


class _ConsoleHandler(logging.Handler):
    """Prints lines above the bars; progress lines are left to the bars."""

    def __init__(self, console: Console) -> None:
        super().__init__()
        self._console = console

    def emit(self, record: logging.LogRecord) -> None:
        if not hasattr(record, "progress"):
            self._console.print(LINE.format(record), markup=False, highlight=False)


def _make_bars(console: Console) -> Progress:
    return Progress(
        TextColumn("{task.description:>14}"),
        BarColumn(bar_width=30),
        TextColumn("{task.percentage:>3.0f} %"),
        TimeRemainingColumn(),
        TextColumn("{task.fields[speed]}"),
        console=console,
    )


def _stream_handler() -> logging.Handler:
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(LINE)
    return handler


@contextmanager
def _handler(handler: logging.Handler) -> Iterator[None]:
    for name in OUR_LOGGERS:
        logging.getLogger(name).addHandler(handler)
    try:
        yield
    finally:
        for name in OUR_LOGGERS:
            logging.getLogger(name).removeHandler(handler)
