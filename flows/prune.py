"""What a store can do without: artifacts that no kept run refers to, and the runs that are given up.

A run keeps what its record names: the parts of the stages it has finished, and of an unfinished one what it was making.
A live run keeps besides everything in the stages that it has yet to finish, for it may be about to use it. The drafts
in service, and those before them, stay.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from flows.run_records import PLACES, Record, find_in, is_live, read_all
from storage import artifacts, drafts
from storage.artifacts import Identity
from storage.layout import CHECKPOINT_PLACES, CHECKPOINTS, MANIFEST_NAME, STATES, run_record
from storage.store import Store
from tasks.byte_sizes import show_bytes

_AGE = re.compile(r"(\d+(?:\.\d+)?)([hdw])")
_HOURS = {"h": 1, "d": 24, "w": 24 * 7}

Survey = Mapping[str, Mapping[str, int]]
"""Path of each unit (an artifact, or what a killed run left of one) -> bytes by the first name below it."""


@dataclass(frozen=True)
class Choice:
    """Which runs are given up, and what of them."""

    runs: tuple[str, ...] = ()
    """Ids of runs, or beginnings of them."""
    older_than: timedelta | None = None
    """Runs that began longer ago."""
    keep_bytes: int | None = None
    """The oldest runs, until what is left takes no more than this; the newest run stays."""
    states_only: bool = False
    """Of completed runs only the captured states; of all of them where none of the above is given."""


@dataclass(frozen=True)
class Removal:
    """One directory that goes."""

    path: str
    bytes: int
    reason: str

    @property
    def place(self) -> str:
        """The stage's directory in the store."""
        return self.path.split("/", 1)[0]


@dataclass(frozen=True)
class Plan:
    """What goes, and how much is left."""

    removals: tuple[Removal, ...]
    runs: tuple[Record, ...]
    """Runs whose records go."""
    stripped: tuple[Record, ...]
    """Runs that stay, without their captured states."""
    left_bytes: int
    seen: frozenset[str]
    """Ids of all runs when the plan was made."""


def parse_age(text: str) -> timedelta:
    """Return the time that a text such as "30d" means (h, d, w); ValueError for any other text."""
    match = _AGE.fullmatch(text.strip())
    if match is None:
        raise ValueError(f"{text!r} is no age; write it as 12h, 30d or 8w")
    return timedelta(hours=float(match[1]) * _HOURS[match[2]])


def plan_prune(store: Store, choice: Choice, *, now: datetime | None = None) -> Plan:
    """Decide what goes.

    LookupError when a run is unknown, ValueError when it is live, there is no store, or a record cannot be read.
    """
    if not store.is_there():
        raise ValueError(f"there is no store at {store.url}; correct the settings' store")
    records = read_all(store)
    survey = _survey(store)
    sizes = {path: sum(below.values()) for path, below in survey.items()}
    owners = _owners(survey, records)
    in_use = _places_of_live_runs(records)
    served = _served(store)
    open_paths = [
        path
        for path in survey
        if path.split("/", 1)[0] not in in_use
        and path not in served
        and (not choice.states_only or path.startswith(f"{STATES}/"))
    ]

    def going(given_up: set[str]) -> list[str]:
        return [path for path in open_paths if owners[path] <= given_up]

    given_up = _given_up(records, choice, store.url, now or datetime.now(UTC))
    total = sum(sizes.values())
    if choice.keep_bytes is not None:
        for record in _candidates(records, choice)[:-1]:
            if total - sum(sizes[path] for path in going(given_up)) <= choice.keep_bytes:
                break
            given_up.add(record["run"])
    removals = [Removal(p, sizes[p], _reason(owners[p], choice)) for p in going(given_up)]
    kept = set(open_paths) - {removal.path for removal in removals}
    removals += _abandoned(store, {path: survey[path] for path in sorted(kept)})
    removals += _outlived(survey, sorted((kept | served) & survey.keys()))
    given_up_records = tuple(r for r in records if r["run"] in given_up)
    return Plan(
        removals=tuple(removals),
        runs=() if choice.states_only else given_up_records,
        stripped=given_up_records if choice.states_only else (),
        left_bytes=total - sum(removal.bytes for removal in removals),
        seen=frozenset(record["run"] for record in records),
    )


def carry_out(store: Store, plan: Plan) -> None:
    """Remove what the plan names, the runs' records last: what was interrupted can be repeated.

    ValueError, and nothing removed, when a run has begun since the plan was made.
    """
    new = {record["run"] for record in read_all(store)} - plan.seen
    if new:
        raise ValueError(f"the run {min(new)} has begun meanwhile; prune again")
    for record in plan.stripped:
        store.write_json(run_record(record["run"]), {**record, "states_pruned": True})
    for removal in plan.removals:
        artifacts.remove_all(store, removal.path)
    for parent in {removal.path.rsplit("/", 1)[0] for removal in plan.removals}:
        if not store.exists(parent):
            store.delete(parent)  # the empty directory of a local store
    for record in plan.runs:
        store.delete(run_record(record["run"]))


def render_plan(plan: Plan) -> str:
    """Return the plan as a table: stage, artifacts, bytes, reason."""
    left = f"{show_bytes(plan.left_bytes)} are left"
    if not plan.removals and not plan.runs:
        return f"nothing to prune: every artifact is of a run that is kept; {left}"
    groups: dict[tuple[str, str], list[Removal]] = defaultdict(list)
    for removal in plan.removals:
        groups[removal.place, removal.reason].append(removal)
    rows = [(place, found, reason) for (place, reason), found in sorted(groups.items())]
    rows.append(("total", list(plan.removals), left))
    lines = [f"{'stage':<14} {'artifacts':>9} {'bytes':>10}  reason"]
    for place, found, reason in rows:
        size = show_bytes(sum(removal.bytes for removal in found))
        lines.append(f"{place:<14} {len(found):>9,} {size:>10}  {reason}")
    lines += [f"run {record['run']} ({record['name']}, {record['state']})" for record in plan.runs]
    return "\n".join(lines)


def _given_up(records: Sequence[Record], choice: Choice, store_url: str, now: datetime) -> set[str]:
    """Ids of the runs that are named, or old, or with neither all whose states go."""
    candidates = {record["run"]: record for record in _candidates(records, choice)}
    chosen = {_named(records, candidates, run_id, store_url) for run_id in choice.runs}
    if choice.older_than is not None:
        chosen |= {
            run
            for run, record in candidates.items()
            if datetime.fromisoformat(record["started_at"]) < now - choice.older_than
        }
    elif choice.states_only and not choice.runs and choice.keep_bytes is None:
        chosen = set(candidates)
    return chosen


def _named(
    records: Sequence[Record], candidates: Iterable[str], run_id: str, store_url: str
) -> str:
    record = find_in(records, run_id, store_url)
    run = str(record["run"])
    if is_live(record):
        process = record["process"]
        raise ValueError(
            f"the run {run} is live: process {process['pid']} on {process['host']}, in {record['at']}; stop it "
            f"first (or, if that machine is gone, delete {run_record(run)})"
        )
    if run not in candidates:
        raise ValueError(
            f"the run {run} is {record['state']}, and goes on from its states; leave out --states to give it up"
        )
    return run


def _candidates(records: Iterable[Record], choice: Choice) -> list[Record]:
    """Runs that can be given up, oldest first."""
    return [
        record
        for record in records
        if not is_live(record) and (record["state"] == "completed" or not choice.states_only)
    ]


def _survey(store: Store) -> Survey:
    """All units of the store, those without a complete artifact too; one listing for each place."""
    found: dict[str, dict[str, int]] = {}
    for place in sorted(place for places in PLACES.values() for place in places):
        depth = 2 if place == STATES else 1
        if store.is_local:  # a killed writer leaves directories without a file that can be seen
            found |= {path: {} for path in _directories(store, place, depth)}
        for name, size in store.sizes(place).items():
            parts = name.split("/")
            if len(parts) > depth:
                below = found.setdefault("/".join([place, *parts[:depth]]), {})
                below[parts[depth]] = below.get(parts[depth], 0) + size
    return found


def _directories(store: Store, path: str, depth: int) -> list[str]:
    paths = [f"{path}/{name}" for name in store.directories(path)]
    return (
        paths if depth == 1 else [p for one in paths for p in _directories(store, one, depth - 1)]
    )


def _owners(paths: Iterable[str], records: Sequence[Record]) -> dict[str, set[str]]:
    """Which runs refer to each path, by itself or by the directory above it."""
    referring: dict[str, set[str]] = defaultdict(set)
    for record in records:
        parts = [path for stage in record["stages"].values() for path in stage["parts"]]
        for path in [*parts, *record.get("making", [])]:
            referring[path].add(record["run"])
    none: set[str] = set()
    return {
        path: referring.get(path, none) | referring.get(path.rsplit("/", 1)[0], none)
        for path in paths
    }


def _served(store: Store) -> set[str]:
    """What it takes to serve and evaluate the drafts in service, and those that a rollback would put there."""
    paths: set[str] = set()
    for name in drafts.names(store):
        promotions = {promotion.name: promotion for promotion in drafts.history(store, name)}
        now = drafts.current(store, name)
        for promotion in (now, promotions.get((now and now.previous) or "")):
            if promotion is not None:
                paths |= {*promotion.artifacts, Identity(**promotion.decided).path}
    return paths


def _places_of_live_runs(records: Sequence[Record]) -> set[str]:
    """Directories of all stages that some live run has yet to finish."""
    order = list(PLACES)
    firsts = [
        order.index(record["at"]) if record["at"] in PLACES else 0
        for record in records
        if is_live(record)
    ]
    return {place for name in order[min(firsts, default=len(order)) :] for place in PLACES[name]}


def _abandoned(store: Store, kept: Survey) -> list[Removal]:
    """What killed attempts have left beside artifacts that stay."""
    return [
        Removal(f"{path}/{attempt}", below.get(attempt, 0), "left by a killed run, or set aside")
        for path, below in kept.items()
        if store.is_local or len(below) > 2  # else there are a manifest and its attempt
        for attempt in artifacts.abandoned(store, path, age=timedelta(0))
    ]


def _outlived(survey: Survey, kept: Iterable[str]) -> list[Removal]:
    """Checkpoints beside a trained draft, where the training's job was killed before it removed them."""
    return [
        Removal(f"{path}/{below}", size, "checkpoints of a completed training")
        for path in kept
        if path.startswith(f"{CHECKPOINTS}/") and MANIFEST_NAME in survey[path]
        for below, size in survey[path].items()
        if below in CHECKPOINT_PLACES
    ]


def _reason(owners: set[str], choice: Choice) -> str:
    if not owners:
        return "no run refers to it"
    more = f" and {len(owners) - 1} more" if len(owners) > 1 else ""
    whose = f"run {min(owners)}{more}"
    return f"states of completed {whose}" if choice.states_only else f"only of {whose}"
