"""Which log lines belong to a run: those of our packages, at INFO, on their way into Prefect's logs of the run."""

import logging

OUR_LOGGERS = ("flows", "tasks", "storage")

ENVIRONMENT = {"PREFECT_LOGGING_EXTRA_LOGGERS": ",".join(OUR_LOGGERS)}
"""Makes Prefect send the records of these loggers to its API; read when Prefect is imported."""


def show_info_lines() -> None:
    """Let INFO records of our packages pass, unless another level was chosen before.

    Prefect gives the loggers its handler, but no level: Python's WARNING would hold.
    """
    for name in OUR_LOGGERS:
        logger = logging.getLogger(name)
        if logger.level == logging.NOTSET:
            logger.setLevel(logging.INFO)
