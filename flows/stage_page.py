"""What a stage made, as the Markdown page that Prefect's UI shows of it."""

from collections.abc import Sequence
from typing import Any

from storage.store import Store
from tasks.promote import describe
from tasks.stage import StageResult
from tasks.training_history import Epoch, epochs_of, read_history

SHOWN_PARTS = 20
SHOWN_EPOCHS = 20


def describe_stage(store: Store, name: str, entry: dict[str, Any], result: StageResult) -> str:
    """Return what a stage made, as Markdown."""
    lines = [f"## {name}: {entry['state']}", "", f"{result.rows:,} rows, key `{result.key}`", ""]
    if name == "train":
        lines += epoch_table(epochs_of(read_history(store, result.parts[0])))
    if name == "evaluate":
        _, before, after = (part.facts for part in result.parts)
        lines += acceptance_table(before, after)
    if name == "promote":
        lines += [describe(result.facts, in_service=result.notes["in service"]), ""]
    for part in result.parts[:SHOWN_PARTS]:
        facts = {k: v for k, v in part.facts.items() if k != "shown"}
        lines += [f"`{part.path}`", "", "| | |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in facts.items()] + [""]
        lines += [f"```text\n{text}\n```\n" for text in part.facts.get("shown", [])]
    if len(result.parts) > SHOWN_PARTS:
        lines.append(f"... and {len(result.parts) - SHOWN_PARTS} more parts")
    return "\n".join(lines)


def epoch_table(epochs: Sequence[Epoch]) -> list[str]:
    """Return the epochs as lines of a Markdown table; of many epochs the last ones."""
    if not epochs:
        return []
    header = ["epoch", "steps", "lr", "tokens/s", "side", "loss", "acceptance length"]
    header += [f"token {i + 1}" for i in range(len(epochs[0].train.accuracies))]
    lines = _rows([header, ["---"] * len(header)])
    for epoch in epochs[-SHOWN_EPOCHS:]:
        place = [str(epoch.number), f"{epoch.last_step:,}", _number(epoch.lr, ".2e")]
        place.append(_number(epoch.tokens_per_second, ",.0f"))
        for side, quality in (("train", epoch.train), ("validation", epoch.validation)):
            if quality is not None:
                figures = [quality.loss, quality.acceptance_length, *quality.accuracies]
                lines += _rows([[*place, side, *(_number(value, ".3f") for value in figures)]])
                place = [""] * len(place)
    left_out = len(epochs) - SHOWN_EPOCHS
    note = f"The first {left_out} epochs are left out. " if left_out > 0 else ""
    return [
        *lines,
        "",
        f"{note}Token k: share of positions at which the first k drafted tokens are right.",
        "",
    ]


def acceptance_table(before: dict[str, Any], after: dict[str, Any]) -> list[str]:
    """Return the acceptance by position before and after training as lines of a Markdown table."""
    pairs = zip(before["per_position"], after["per_position"], strict=True)
    rows = [[str(i + 1), f"{b:.3f}", f"{a:.3f}"] for i, (b, a) in enumerate(pairs)]
    lengths = [f"{facts['acceptance_length']:.2f}" for facts in (before, after)]
    header = ["draft token", "accepted before training", "after"]
    return [*_rows([header, ["---"] * 3, *rows, ["acceptance length", *lengths]]), ""]


def _rows(rows: Sequence[Sequence[str]]) -> list[str]:
    return [f"| {' | '.join(row)} |" for row in rows]


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
