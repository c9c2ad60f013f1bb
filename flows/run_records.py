"""Read what earlier runs have written down: outrider status."""

import json
import os
import socket
from collections.abc import Sequence
from typing import Any

from storage import drafts
from storage.layout import (
    BATCH_SIZES,
    CAPTURE_PLAN,
    CHECKPOINTS,
    CONVERSATIONS,
    DECISION,
    EVALUATION,
    REFERENCE,
    REGENERATED,
    RUN_RECORDS,
    SAMPLES,
    SPECULATOR,
    SPLIT,
    STATES,
    VERIFIER,
    VOCAB_MAP,
    WARM_START,
)
from storage.store import Store
from tasks.promote import describe

Record = dict[str, Any]

PLACES = {
    "load_verifier": (VERIFIER,),
    "warm_start": (WARM_START,),
    "collect": (CONVERSATIONS,),
    "regenerate": (REGENERATED,),
    "tokenize_chats": (SAMPLES,),
    "split": (SPLIT,),
    "map_vocab": (VOCAB_MAP,),
    "fit_batch": (BATCH_SIZES,),
    "capture": (CAPTURE_PLAN, STATES),
    "train": (CHECKPOINTS,),
    "evaluate": (REFERENCE, EVALUATION),
    "export": (SPECULATOR,),
    "promote": (DECISION,),
}
"""Stages as they run, for JSON files keep their keys sorted by name; and where in a store each writes."""


def list_records(store_url: str) -> list[Record]:
    """Return the records of all runs of a store, oldest first; what is no record is left out."""
    store = Store(store_url)
    if not store.is_there():
        raise ValueError(f"there is no store at {store.url}; name one by --store or OUTRIDER_STORE")
    records = [_read(store, name) for name in store.files(RUN_RECORDS)]
    return sorted((r for r in records if r is not None), key=lambda record: str(record["run"]))


def read_all(store: Store) -> list[Record]:
    """Return the records of all runs, oldest first.

    Raises ValueError for one that cannot be read: what its run needs is unknown.
    """
    records = []
    for name in store.files(RUN_RECORDS):
        record = _read(store, name)
        if record is None and store.exists(f"{RUN_RECORDS}/{name}"):
            raise ValueError(
                f"the record {store.url}/{RUN_RECORDS}/{name} cannot be read, so what its run needs is unknown; "
                "mend it, or delete it to give the run up"
            )
        records += [record] if record is not None else []
    return sorted(records, key=lambda record: str(record["run"]))


def expected_artifacts(store: Store) -> dict[str, str]:
    """Return path -> who refers to it, of all that has to be in a store: for the newest run of each name that was
    completed, and for the drafts in service. Captured states that were pruned on purpose are left out.
    """
    newest = {r["name"]: r for r in list_records(store.url) if r["state"] == "completed"}
    expected = {
        path: f"run {record['run']}"
        for record in newest.values()
        for name, stage in record["stages"].items()
        if not (name == "capture" and record.get("states_pruned"))
        for path in stage["parts"]
    }
    for draft in drafts.names(store):
        promotion = drafts.current(store, draft)
        if promotion is not None:
            expected |= dict.fromkeys(promotion.artifacts, f"the draft {draft} in service")
    return expected


def is_live(record: Record) -> bool:
    """Tell whether a run is under way, as far as can be told from here."""
    return bool(record["state"] == "running")


def find_record(store_url: str, run_id: str) -> Record:
    """Return one run's record by its id, by the beginning of it, or by "latest".

    Raises ValueError when there is none, or more than one.
    """
    try:
        return find_in(list_records(store_url), run_id, store_url)
    except LookupError as error:
        raise ValueError(f"{error} (--store or OUTRIDER_STORE names another store)") from error


def record_of_flow_run(store_url: str, flow_run_id: str) -> Record | None:
    """Return the newest record of a Prefect flow run; a retry of it has one of its own."""
    found = [r for r in list_records(store_url) if r.get("flow_run") == flow_run_id]
    return found[-1] if found else None


def find_in(records: Sequence[Record], run_id: str, store_url: str) -> Record:
    """Return the one of a store's records with this id or beginning of an id, or the "latest"; else LookupError."""
    if run_id == "latest":
        found = list(records[-1:])
    else:
        found = [record for record in records if str(record["run"]).startswith(run_id)]
    if len(found) != 1:
        known = ", ".join(str(record["run"]) for record in records[-5:]) or "none"
        raise LookupError(
            f"{len(found)} runs of the store {store_url} match {run_id!r}; the last ones are: {known}"
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
        lines.append(f"in {record.get('at', 'the run')}: {record['error']}")
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
    if record.get("promotion"):
        lines.append(describe(record["promotion"], in_service=record["promotion"]["in service"]))
    return "\n".join(lines)


def _read(store: Store, name: str) -> Record | None:
    """Return a record, or None when it is none or has gone meanwhile."""
    try:
        return _in_order(store.read_json(f"{RUN_RECORDS}/{name}"))
    except (ValueError, KeyError, TypeError, RecursionError, FileNotFoundError):
        return None


def _in_order(record: Record) -> Record:
    order = list(PLACES)
    stages = sorted(record["stages"].items(), key=lambda item: order.index(item[0]))
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
