"""How far each stage of a run is, as progress artifacts in Prefect's UI."""

import contextvars
import logging
import time
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any
from uuid import UUID

from prefect import runtime
from prefect.artifacts import create_progress_artifact, update_progress_artifact
from prefect.settings import PREFECT_CLIENT_MAX_RETRIES, temporary_settings

from flows.run_log import of_a_run
from tasks.progress import Progress, live

logger = logging.getLogger(__name__)

SECONDS = 2.0
"""Time between two updates of one stage."""


def send_progress_to_prefect() -> None:
    """Show the progress of this process's runs in Prefect's UI from now on."""
    if not any(isinstance(handler, _ToPrefect) for handler in live.handlers):
        live.addHandler(_ToPrefect())
        live.setLevel(logging.INFO)


class _ToPrefect(logging.Handler):
    """Keeps an artifact for each stage of a run, in a thread of its own: a slow server holds up no work."""

    def __init__(self) -> None:
        super().__init__()
        self.addFilter(of_a_run)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="progress")
        self._shown: dict[tuple[str, str], UUID] = {}
        self._sent: dict[tuple[str, str], float] = {}
        self._last: Future[None] | None = None

    def emit(self, record: logging.LogRecord) -> None:
        """Send the progress on, unless it is too soon or the last one is still on its way."""
        progress: Progress = record.__dict__["progress"]
        stage = (str(runtime.flow_run.id), progress.stage)
        ended = progress.done >= progress.total
        busy = self._last is not None and not self._last.done()
        soon = time.monotonic() - self._sent.get(stage, 0.0) < SECONDS
        if (busy or soon) and not ended:
            return
        self._sent[stage] = time.monotonic()
        send = contextvars.copy_context().run
        self._last = self._thread.submit(send, self._send, stage, progress)

    def _send(self, stage: tuple[str, str], progress: Progress) -> None:
        share = min(100.0, 100 * progress.done / progress.total) if progress.total else 100.0
        told: dict[str, Any] = {"description": str(progress)}
        try:
            with temporary_settings(updates={PREFECT_CLIENT_MAX_RETRIES: 0}):
                if stage in self._shown:
                    update_progress_artifact(self._shown[stage], share, **told)
                else:
                    key = f"progress-{progress.stage.replace('_', '-').replace(' ', '-')}"
                    made: Any = create_progress_artifact(share, key=key, **told)
                    self._shown[stage] = made
        except Exception as error:
            logger.debug("the progress of %s was not shown: %s", progress.stage, error)
