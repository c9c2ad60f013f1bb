"""Which log lines belong to a run: those of our packages, at INFO; they go into Prefect's logs of the run."""

import logging

from prefect.context import FlowRunContext, TaskRunContext
from prefect.logging.handlers import APILogHandler

OUR_LOGGERS = ("flows", "tasks", "storage")


def send_log_to_prefect() -> None:
    """Send the INFO records of our packages to Prefect's API, unless another level was chosen before.

    PREFECT_LOGGING_EXTRA_LOGGERS would do half of it: it has to be set before Prefect is imported, and it gives
    a logger Prefect's handler but no level, so that Python's WARNING holds.
    """
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
        if not any(isinstance(handler, APILogHandler) for handler in logger.handlers):
            handler = APILogHandler()
            handler.addFilter(of_a_run)
            logger.addHandler(handler)


def of_a_run(_: logging.LogRecord) -> bool:
    """Tell whether a record is logged in a run: Prefect's handler warns of every other one."""
    return TaskRunContext.get() is not None or FlowRunContext.get() is not None
