"""Read what earlier runs have written down: outrider status."""

import json
import os
import socket
from typing import Any

from storage.layout import RUN_RECORDS
from storage.store import Store

Record = dict[str, Any]

ORDER = (
    "load_verifier",
    "collect",
    "regenerate",
    "tokenize_chats",
    "split",
    "map_vocab",
    "capture",
    "train",
    "evaluate",
    "export",
)
"""Stages as they run; JSON files keep their keys sorted by name."""


def list_records(store_url: str) -> list[Record]:
    """Return the records of all runs of a store, oldest first."""
    store = Store(store_url)
    if not store.is_there():
        raise ValueError(f"there is no store at {store.url}; name one by --store or OUTRIDER_STORE")
    records = []
    for name in store.files(RUN_RECORDS):
        try:
            records.append(_in_order(store.read_json(f"{RUN_RECORDS}/{name}")))
        except (ValueError, KeyError, TypeError, RecursionError, FileNotFoundError):
            continue  # not a record, or gone meanwhile
    return sorted(records, key=lambda record: str(record.get("run")))


def find_record(store_url: str, run_id: str) -> Record:
    """Return one run's record by its id, by the beginning of it, or by "latest".

    Raises ValueError when there is none, or more than one.
    """
    records = list_records(store_url)
    if run_id == "latest":
        found = records[-1:]
    else:
        found = [record for record in records if str(record["run"]).startswith(run_id)]
    if len(found) != 1:
        known = ", ".join(str(record["run"]) for record in records[-5:]) or "none"
        raise ValueError(
            f"{len(found)} runs of the store {store_url} match {run_id!r}; the last ones are: {known} "
            "(--store or OUTRIDER_STORE names another store)"
        )
    return found[0]


def render_list(records: list[Record]) -> str:
    """Return one line for each run."""
    if not records:
        return "no runs yet"
    lines = [
        f"{'run':<24} {'name':<16} {'state':<10} {'acceptance':>10} {'seconds':>8}  "
        "at, and what differs from the run before of that name"
    ]
    before: dict[str, dict[str, Any]] = {}
    for record in records:
        length, name = record.get("acceptance_length"), record["name"]
        settings = _flat(record["settings"])
        notes = [record.get("at"), *_changes(before.get(name, settings), settings)]
        before[name] = settings
        lines.append(
            f"{record['run']:<24} {name:<16} {record['state']:<10} "
            f"{'-' if length is None else format(length, '.2f'):>10} "
            f"{record.get('seconds', '-'):>8}  {' '.join(note for note in notes if note)}".rstrip()
        )
    return "\n".join(lines)


def _flat(settings: dict[str, Any], group: str = "") -> dict[str, Any]:
    """Return settings by their dotted keys."""
    flat: dict[str, Any] = {}
    for key, value in settings.items():
        flat |= (
            _flat(value, f"{group}{key}.") if isinstance(value, dict) else {f"{group}{key}": value}
        )
    return flat


def _changes(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    return [
        f"{key}={json.dumps(after.get(key))}"
        for key in {**before, **after}
        if before.get(key) != after.get(key)
    ]


def render_record(record: Record) -> str:
    """Return the stages of one run as a table."""
    lines = [f"{record['run']}  {record['name']}  {record['state']}  from {record['started_at']}"]
    if record.get("error"):
        lines.append(f"error: {record['error']}")
    lines.append(f"{'stage':<16} {'state':<9} {'rows':>9} {'seconds':>8}  key")
    for name, entry in record["stages"].items():
        lines.append(
            f"{name:<16} {entry['state']:<9} {entry['rows']:>9,} {entry['seconds']:>8.1f}  {entry['key']}"
        )
    if record["state"] == "killed":
        lines.append(f"killed in {record['at']}: run it again to go on there")
    if record["state"] == "running":
        process = record["process"]
        lines.append(f"at: {record['at']}, process {process['pid']} on {process['host']}")
    if record.get("speculator"):
        lines.append(f"acceptance length {record['acceptance_length']:.2f}, {record['speculator']}")
    return "\n".join(lines)


def _in_order(record: Record) -> Record:
    stages = sorted(record["stages"].items(), key=lambda item: ORDER.index(item[0]))
    record = {**record, "stages": dict(stages)}
    if record["state"] == "running" and _has_gone(record["process"]):
        record["state"] = "killed"
    return record


def _has_gone(process: Record) -> bool:
    """Whether the run's process is no more, as far as can be told from here: only on its own machine."""
    if process["host"] != socket.gethostname():
        return False
    try:
        os.kill(process["pid"], 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        return False
    return False
