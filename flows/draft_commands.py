"""Which drafts are in service, by hand: outrider promote | rollback | drafts."""

from typing import Any

from flows.run_records import find_record
from storage import artifacts, drafts
from storage.drafts import Promotion
from storage.store import Store
from tasks.promote import promote_by_hand

Listed = dict[str, list[dict[str, Any]]]


def promote(store_url: str, run_id: str) -> str:
    """Put the draft of a run in service; returns what was done. ValueError when it has none, or lost it."""
    record = find_record(store_url, run_id)
    stage = record["stages"].get("promote")
    if stage is None:
        raise ValueError(f"run {record['run']} has no draft to promote: it is {record['state']}")
    store = Store(store_url)
    decision = artifacts.require(store, stage["parts"][0])
    return _in_service(promote_by_hand(store, decision, record["run"]))


def roll_back(store_url: str, draft: str | None) -> str:
    """Put the draft before in service again; `draft` is its name where there are several."""
    store = Store(store_url)
    names = [draft] if draft is not None else drafts.names(store)
    if len(names) > 1:
        raise ValueError(f"there are several drafts in {store.url}; name one: {', '.join(names)}")
    if not names:
        raise ValueError(f"no draft is in service in {store.url} (--store names another store)")
    return _in_service(drafts.roll_back(store, names[0]))


def list_drafts(store_url: str) -> Listed:
    """All promotions of all drafts, oldest first."""
    store = Store(store_url)
    listed: Listed = {}
    for name in drafts.names(store):
        now = drafts.current(store, name)
        listed[name] = [
            {
                "in_service": now is not None and promotion.name == now.name,
                "promoted_at": promotion.promoted_at,
                "run": promotion.run,
                "acceptance_length": promotion.acceptance_length,
                "by": promotion.by,
                "speculator": promotion.location,
            }
            for promotion in drafts.history(store, name)
        ]
    return listed


def render_drafts(listed: Listed) -> str:
    """Return one line for each promotion; an arrow marks those in service."""
    if not listed:
        return "no draft is in service yet"
    lines = [f"   {'draft':<28} {'since':<25} {'run':<22} {'acceptance':>10} {'by':<5} speculator"]
    for name, promotions in listed.items():
        lines += [
            f"{'->' if one['in_service'] else '  '} {name:<28} {one['promoted_at']:<25} {one['run']:<22} "
            f"{one['acceptance_length']:>10.3f} {one['by']:<5} {one['speculator']}"
            for one in promotions
        ]
    return "\n".join(lines)


def _in_service(promotion: Promotion) -> str:
    return (
        f"in service as {promotion.draft}: the draft of run {promotion.run}, acceptance length "
        f"{promotion.acceptance_length:.2f}, {promotion.location}"
    )
