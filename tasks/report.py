"""One self-contained HTML page about a run: settings, stages, data, loss, acceptance, samples in color."""

import html
import json
from pathlib import Path
from typing import Any

import jinja2

from storage import artifacts
from storage.artifacts import ArtifactError
from storage.layout import EVALUATION_TABLE, METRICS_TABLE
from storage.manifest import Manifest
from storage.store import Store
from storage.tables import read_table

WIDTH, HEIGHT, MARGIN = 640, 220, 36


def write_report(store_url: str, record: dict[str, Any], target: Path) -> None:
    """Write the page about the run of `record` to `target`; parts whose artifacts have gone are left out."""
    store = Store(store_url)
    parts = {
        name: [_peek(store, path) for path in entry["parts"]]
        for name, entry in record["stages"].items()
    }
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(Path(__file__).parent), autoescape=True
    )
    page = environment.get_template("report.html.j2").render(
        record=record,
        settings=json.dumps(record["settings"], indent=2),
        facts={name: [m.facts for m in found if m is not None] for name, found in parts.items()},
        shown=[text for m in parts.get("tokenize_chats", []) if m for text in m.facts["shown"]],
        loss=_loss_plot(store, parts.get("train", [])),
        acceptance=_acceptance_plot(record),
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


def _loss_plot(store: Store, trained: list[Manifest | None]) -> str:
    rows = _rows(store, trained[0] if trained else None, METRICS_TABLE)
    series = {
        "train loss": [(r["step"], r["loss"]) for r in rows if not r["validation"]],
        "validation loss": [(r["step"], r["loss"]) for r in rows if r["validation"]],
    }
    return line_plot({name: points for name, points in series.items() if points})


def line_plot(series: dict[str, list[tuple[float, float]]]) -> str:
    """Return an SVG of up to four lines; an empty text without points."""
    points = [point for line in series.values() for point in line]
    if not points:
        return ""
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    low, high = 0.0, max(y for _, y in points) or 1.0
    colors = ("#2266cc", "#cc5522", "#228844", "#884499")
    body = []
    for color, (name, line) in zip(colors, series.items(), strict=False):
        path = " ".join(
            f"{_scale(x, left, right, MARGIN, WIDTH - 8):.1f},{_scale(y, low, high, HEIGHT - MARGIN, 8):.1f}"
            for x, y in line
        )
        body.append(f'<polyline points="{path}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        place = 16 + 16 * len(body) // 2
        body.append(
            f'<text x="{WIDTH - 150}" y="{place}" fill="{color}">{html.escape(name)}</text>'
        )
    body.append(f'<text x="2" y="16">{high:.2f}</text><text x="2" y="{HEIGHT - MARGIN}">0</text>')
    body.append(f'<text x="{MARGIN}" y="{HEIGHT - 8}">step {left:.0f}</text>')
    body.append(f'<text x="{WIDTH - 80}" y="{HEIGHT - 8}">step {right:.0f}</text>')
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img">{"".join(body)}</svg>'


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


def _scale(value: float, low: float, high: float, start: float, stop: float) -> float:
    return start if high == low else start + (value - low) / (high - low) * (stop - start)
