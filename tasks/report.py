"""One self-contained HTML page about a run: acceptance, costs, loss, samples in color, data, settings."""

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jinja2

from storage import artifacts
from storage.artifacts import ArtifactError
from storage.layout import EVALUATION_TABLE
from storage.manifest import Manifest
from storage.store import Store, StoreError
from storage.tables import read_table
from tasks.byte_sizes import show_bytes
from tasks.data_summary import SIDES, DataSummary, summarize_data
from tasks.promote import describe
from tasks.training_history import epochs_of, read_history
from tasks.training_plots import acceptance_plot, accuracy_plot, loss_plot

SHOWN_TEXTS = 6
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
    acceptance = _acceptance(record)
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True
    )
    page = environment.get_template("report.html.j2").render(
        record=record,
        settings=json.dumps(record["settings"], indent=2),
        made={name: [m for m in found if m is not None] for name, found in parts.items()},
        costs=_costs(record, parts),
        data=_data(store, parts),
        sides=SIDES,
        spans=spans,
        loss=loss_plot(history),
        accuracy=accuracy_plot(history),
        epochs=epochs_of(history)[-SHOWN_EPOCHS:],
        acceptance=acceptance,
        acceptance_by_position=acceptance_plot(acceptance),
        promotion=_promotion(record),
        texts=_colored_texts(record, store, parts.get("evaluate", [])),
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


def _data(store: Store, parts: dict[str, list[Manifest | None]]) -> DataSummary:
    def there(*names: str) -> list[Manifest]:
        found = next((parts[name] for name in names if name in parts), [])
        return [part for part in found if part is not None]

    conversations, samples = there("regenerate", "collect"), there("tokenize_chats")
    split, vocab = (next(iter(there(name)), None) for name in ("split", "map_vocab"))
    try:
        return summarize_data(
            store, conversations=conversations, samples=samples, split=split, vocab=vocab
        )
    except (ArtifactError, StoreError):
        return summarize_data(
            store, conversations=conversations, samples=samples, split=None, vocab=None
        )


def _promotion(record: dict[str, Any]) -> str | None:
    found = record.get("promotion")
    return None if found is None else describe(found, in_service=found["in service"])


def _acceptance(record: dict[str, Any]) -> dict[str, list[float]]:
    """Name of a draft -> how often its first, second, ... token is accepted."""
    if not record.get("acceptance"):
        return {}
    shares = {
        "before training": record["acceptance"]["before"]["per_position"],
        "after": record["acceptance"]["after"]["per_position"],
    }
    _, before = (record.get("promotion") or {}).get("per_position") or (None, None)
    return shares if before is None else {**shares, "draft in service before": before}


def _costs(record: dict[str, Any], parts: dict[str, list[Manifest | None]]) -> list[dict[str, Any]]:
    """What each stage took: seconds in this run and, whenever that was, for what it handed out; bytes in the store."""
    costs = []
    for name, entry in record["stages"].items():
        there = [part for part in parts[name] if part is not None]
        whole = len(there) == len(parts[name])
        stored = sum(file.bytes for part in there for file in part.files.values())
        costs.append(
            {
                "stage": name,
                "state": entry["state"],
                "rows": entry["rows"],
                "seconds": entry["seconds"],
                "computed": sum(part.seconds for part in there) if whole else None,
                "bytes": show_bytes(stored) if whole else "gone",
            }
        )
    return costs


def _colored_texts(
    record: dict[str, Any], store: Store, evaluation: list[Manifest | None]
) -> list[list[dict[str, str]]]:
    """Return the first texts, each as its tokens {text, kind}; the kinds are those of `token_kinds`."""
    after = evaluation[-1] if evaluation else None
    draft_tokens = record["settings"]["evaluate"]["draft_tokens"]
    texts = []
    for row in _rows(store, after, EVALUATION_TABLE)[:SHOWN_TEXTS]:
        kinds = token_kinds(row["accepted_per_round"], len(row["pieces"]), draft_tokens)
        texts.append(
            [{"text": text, "kind": kind} for text, kind in zip(row["pieces"], kinds, strict=True)]
        )
    return texts


def token_kinds(accepted_per_round: Sequence[int], tokens: int, draft_tokens: int) -> list[str]:
    """Return for each new token how it came about.

    `accepted`: the draft proposed it. `corrected`: the verifier wrote it where it refused the draft's proposal. `own`:
    the verifier wrote it and the draft had none: the first, and the one behind a round whose tokens were all accepted.
    """
    kinds = ["own"]
    for accepted in accepted_per_round:
        kinds += ["accepted"] * accepted + ["own" if accepted == draft_tokens else "corrected"]
    return (kinds + ["own"] * tokens)[:tokens]


def spans(text: str) -> list[tuple[str, bool]]:
    """Return a decoded sample as pieces, and whether each is supervised: what stands between ⟦ and ⟧."""
    pieces = [(piece, i % 2 == 1) for i, piece in enumerate(re.split("[⟦⟧]", text))]
    return [(piece, supervised) for piece, supervised in pieces if piece]
