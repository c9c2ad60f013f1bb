"""What to do when the place where bytes live fails: try again where that helps, else say why and the way out."""

import errno
import logging
import os
import random
import time
from collections.abc import Callable
from typing import TypeVar

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

TRIES = 4
FIRST_PAUSE_SECONDS = 0.5
"""Pause after the first failed try.

It doubles each time, with jitter so that many workers do not return at once.
"""

_TRANSIENT_NAMES = frozenset(
    {
        "HTTPClientError",  # botocore: connection closed, response cut short
        "ConnectionError",  # botocore: endpoint not reachable
        "IncompleteReadError",  # botocore
        "ResponseParserError",  # botocore: a proxy's HTML in place of an answer
        "ClientConnectionError",  # aiohttp
        "ClientPayloadError",  # aiohttp: body cut short
        "ServiceRequestError",  # azure
        "ServiceResponseError",  # azure
    }
)
"""Errors of the clients that are no OSError; by name, because the clients are optional."""

_PERMANENT_TYPES = (
    FileNotFoundError,
    PermissionError,
    FileExistsError,
    IsADirectoryError,
    NotADirectoryError,
)
_PERMANENT_ERRNOS = frozenset(
    {errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EPERM, errno.ENOSYS, errno.ENAMETOOLONG}
)
FULL_WAY_OUT = "free some space (outrider prune) or choose another store, then run again to go on"


class StoreError(RuntimeError):
    """The store could not do what was asked.

    The message names the place, the cause and a way out.
    """


def call(
    function: Callable[[], Result],
    *,
    doing: str,
    tries: int = TRIES,
    missing: type[Exception] | None = None,
) -> Result:
    """Run `function`, again after transient errors.

    `doing` names action and place ("read s3://bucket/a"); `missing` passes through as it is.

    Raises:
        StoreError: it failed for good.
    """
    for attempt in range(1, tries + 1):
        try:
            return function()
        except Exception as error:
            if missing is not None and isinstance(error, missing):
                raise
            if attempt == tries or not _is_transient(error):
                tried = f" in {attempt} tries" if attempt > 1 else ""
                raise StoreError(
                    f"could not {doing}{tried}: {cause(error)}; {way_out(error)}"
                ) from error
            pause = FIRST_PAUSE_SECONDS * 2 ** (attempt - 1) * random.uniform(0.75, 1.25)
            logger.warning(
                "could not %s (try %d of %d), again in %.1f s: %s",
                doing, attempt, tries, pause, cause(error),
            )  # fmt: skip
            time.sleep(pause)
    raise AssertionError("unreachable: the last try returns or raises")


def _is_transient(error: Exception) -> bool:
    if isinstance(error, _PERMANENT_TYPES):
        return False
    if isinstance(error, OSError):
        return error.errno not in _PERMANENT_ERRNOS
    return any(base.__name__ in _TRANSIENT_NAMES for base in type(error).__mro__)


def is_full(error: Exception) -> bool:
    """Whether the disk or a quota is used up; some libraries say so in words only."""
    if isinstance(error, OSError) and error.errno in {errno.ENOSPC, errno.EDQUOT}:
        return True
    return any(os.strerror(code) in str(error) for code in (errno.ENOSPC, errno.EDQUOT))


def cause(error: Exception) -> str:
    """Kind and text of an error, in one line."""
    text = " ".join(str(error).split())
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def way_out(error: Exception) -> str:
    """What a person can do about it."""
    if isinstance(error, NotADirectoryError | FileExistsError | IsADirectoryError):
        a, b = (
            ("directory", "file") if isinstance(error, IsADirectoryError) else ("file", "directory")
        )
        return f"a {a} stands where a {b} is needed: remove it or choose another store"
    if isinstance(error, PermissionError) or (
        isinstance(error, OSError) and error.errno == errno.EROFS
    ):
        return (
            "give this user or these credentials the right to write there, or choose another store"
        )
    if isinstance(error, FileNotFoundError):
        return "create the bucket or directory, or correct the store's URL"
    if is_full(error):
        return FULL_WAY_OUT
    if "Credentials" in type(error).__name__:
        return (
            "set the credentials in the environment (AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY, ...)"
        )
    return (
        "check that it is reachable from this machine (network, AWS_ENDPOINT_URL), then run again"
    )
