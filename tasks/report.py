"""One self-contained HTML page about a run: settings, stages, data, loss, acceptance, samples in color."""

import json
from pathlib import Path
from typing import Any

import jinja2

from storage import artifacts
from storage.artifacts import ArtifactError
from storage.layout import EVALUATION_TABLE
from storage.manifest import Manifest
from storage.store import Store
from storage.tables import read_table
from tasks.plots import Plot, line_plot
from tasks.promote import describe
from tasks.training_history import accuracy_names, curve, epochs_of, read_history

SHOWN_EPOCHS = 50
"""Of longer trainings the last ones; the curves show all."""


def write_report(store_url: str, record: dict[str, Any], target: Path) -> None:
    """Write the page about the run of `record` to `target`; parts whose artifacts have gone are left out."""
    store = Store(store_url)
    parts = {
        name: [_peek(store, path) for path in entry["parts"]]
        for name, entry in record["stages"].items()
    }
    trained = next(iter(parts.get("train", [])), None)
    history = [] if trained is None else read_history(store, trained)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True
    )
    page = environment.get_template("report.html.j2").render(
        record=record,
        settings=json.dumps(record["settings"], indent=2),
        made={name: [m for m in found if m is not None] for name, found in parts.items()},
        shown=[text for m in parts.get("tokenize_chats", []) if m for text in m.facts["shown"]],
        loss=line_plot(
            {
                "train loss": curve(history, "loss", validation=False),
                "validation loss": curve(history, "loss", validation=True),
            }
        ),
        accuracy=_accuracy_plot(history),
        epochs=epochs_of(history)[-SHOWN_EPOCHS:],
        acceptance=_acceptance_plot(record),
        promotion=_promotion(record),
        texts=_colored_texts(store, parts.get("evaluate", [])),
    )
    try:
        target.write_text(page, encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"the page cannot be written to {target} ({error.strerror}); name another file by --output"
        ) from error


def _peek(store: Store, path: str) -> Manifest | None:
    try:
        return artifacts.peek(store, path)
    except ArtifactError:
        return None


def _rows(store: Store, manifest: Manifest | None, name: str) -> list[dict[str, Any]]:
    if manifest is None:
        return []
    try:
        with artifacts.open_file(store, manifest, name) as path:
            rows: list[dict[str, Any]] = read_table(path).to_pylist()
            return rows
    except ArtifactError:
        return []


def _accuracy_plot(history: list[dict[str, float | None]]) -> Plot | None:
    names = accuracy_names(history)
    return line_plot(
        {
            f"token {i + 1}, train": curve(history, name, validation=False)
            for i, name in enumerate(names)
        },
        dashed={
            f"token {i + 1}, validation": curve(history, name, validation=True)
            for i, name in enumerate(names)
        },
    )


def _promotion(record: dict[str, Any]) -> str | None:
    found = record.get("promotion")
    return None if found is None else describe(found, in_service=found["in service"])


def _acceptance_plot(record: dict[str, Any]) -> list[dict[str, Any]]:
    acceptance = record.get("acceptance")
    if not acceptance:
        return []
    pairs = zip(
        acceptance["before"]["per_position"], acceptance["after"]["per_position"], strict=True
    )
    return [{"position": i + 1, "before": b, "after": a} for i, (b, a) in enumerate(pairs)]


def _colored_texts(store: Store, evaluation: list[Manifest | None]) -> list[list[dict[str, Any]]]:
    """Return the first texts as pieces of {text, accepted}: what the draft proposed rightly, and the verifier's own."""
    after = evaluation[-1] if evaluation else None
    rows = _rows(store, after, EVALUATION_TABLE)[:6]
    return [
        [
            {"text": piece, "accepted": accepted}
            for piece, accepted in zip(
                row["pieces"],
                accepted_tokens(row["accepted_per_round"], len(row["pieces"])),
                strict=True,
            )
        ]
        for row in rows
    ]


def accepted_tokens(accepted_per_round: list[int], tokens: int) -> list[bool]:
    """Return for each new token whether the draft proposed it: the first is the verifier's, and each round's last."""
    marks = [False]
    for accepted in accepted_per_round:
        marks += [True] * accepted + [False]
    return (marks + [False] * tokens)[:tokens]
