"""Prefect's API as tests ask it."""

import time
from typing import Any

import httpx

SECONDS = 60.0


def ask(method: str, url: str, body: dict[str, Any] | None = None) -> Any:
    """What the server answers; asked again while its SQLite database is locked, which it says by the status 503."""
    until = time.monotonic() + SECONDS
    while True:
        answer = httpx.request(method, url, json=body, timeout=SECONDS)
        if answer.status_code != httpx.codes.SERVICE_UNAVAILABLE or time.monotonic() > until:
            answer.raise_for_status()
            return answer.json() if answer.content else None
        time.sleep(0.5)
