"""Which draft of a verifier is in service, and which were before.

A promotion is written once and stays; a small file beside them, replaced in one step, names the one that counts.
"""

import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from storage.layout import DRAFTS, draft_pointer, promotion_file, promotions_directory
from storage.store import Store


class NoDraftError(LookupError):
    """There is no draft in service, or none before it."""


@dataclass(frozen=True)
class Promotion:
    """One draft that was put in service."""

    name: str
    """Its own, which sorts by time."""
    draft: str
    """Name of the draft: its verifier's, unless another was set."""
    run: str
    speculator: str
    """Path of its artifact in the store."""
    speculator_key: str
    location: str
    """Where a server finds the speculator."""
    acceptance_length: float
    promoted_at: str
    by: str
    """gate or hand."""
    artifacts: tuple[str, ...]
    """Paths of what it takes to evaluate and serve it."""
    recipe: Mapping[str, Any]
    """What it takes to build it again: see `tasks.evaluate.DraftRecipe`."""
    decision: Mapping[str, Any]
    """What the gate said."""
    decided: Mapping[str, Any]
    """Identity of the artifact that says so."""
    previous: str | None
    """Name of the promotion that counted before."""


def names(store: Store) -> list[str]:
    """Names of all drafts that were ever promoted."""
    return store.directories(DRAFTS)


def current(store: Store, draft: str) -> Promotion | None:
    """The promotion that counts now; ValueError when what is there cannot be read."""
    try:
        pointer = store.read_json(draft_pointer(draft))
    except FileNotFoundError:
        return None
    return _read(store, draft, str(pointer["promotion"]))


def history(store: Store, draft: str) -> list[Promotion]:
    """All promotions, oldest first."""
    files = store.files(promotions_directory(draft))
    return [_read(store, draft, file.removesuffix(".json")) for file in sorted(files)]


def promote(store: Store, promotion: Promotion) -> None:
    """Write a promotion down, then let it count."""
    values = {**vars(promotion), "artifacts": list(promotion.artifacts)}
    store.write_json(promotion_file(promotion.draft, promotion.name), values)
    _point(store, promotion)


def roll_back(store: Store, draft: str) -> Promotion:
    """Let the promotion before the current one count again; returns it. NoDraftError when there is none."""
    now = current(store, draft)
    if now is None:
        known = ", ".join(names(store)) or "none"
        raise NoDraftError(f"no draft {draft!r} is in service in {store.url}; there are: {known}")
    if now.previous is None:
        raise NoDraftError(
            f"the draft of {now.draft} from run {now.run} was the first: there is none to go back to"
        )
    before = _read(store, draft, now.previous)
    _point(store, before)
    return before


def new_name() -> str:
    """A name for a promotion of now."""
    return f"{datetime.now(UTC):%Y%m%dT%H%M%S%f}-{secrets.token_hex(3)}"


def time_now() -> str:
    """Now, as promotions note it."""
    return datetime.now(UTC).isoformat(timespec="seconds")


def _point(store: Store, promotion: Promotion) -> None:
    store.write_json(
        draft_pointer(promotion.draft),
        {
            "promotion": promotion.name,
            "speculator": promotion.location,
            "run": promotion.run,
            "acceptance_length": promotion.acceptance_length,
            "since": time_now(),
        },
    )


def _read(store: Store, draft: str, name: str) -> Promotion:
    path = promotion_file(draft, name)
    try:
        values = store.read_json(path)
        return Promotion(**{**values, "artifacts": tuple(values["artifacts"])})
    except (FileNotFoundError, KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"the promotion {store.url}/{path} cannot be read ({error}); promote another run, or delete "
            f"{store.url}/{draft_pointer(draft)} to begin anew"
        ) from error
