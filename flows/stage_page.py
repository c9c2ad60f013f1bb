"""What a stage made, and what a run learns from, as the Markdown pages that Prefect's UI shows."""

import re
from collections.abc import Sequence
from typing import Any

from storage.store import Store
from tasks.data_summary import SIDES, DataSummary
from tasks.pictures import picture
from tasks.promote import describe
from tasks.stage import StageResult
from tasks.training_history import Epoch, epochs_of, read_history
from tasks.training_plots import acceptance_plot, accuracy_plot, loss_plot

SHOWN_PARTS = 20
SHOWN_EPOCHS = 20
SHOWN_SOURCES = 20
NOT_FACTS = {"shown", "lengths"}
"""What a manifest keeps for other pages."""


def describe_stage(store: Store, name: str, entry: dict[str, Any], result: StageResult) -> str:
    """Return what a stage made, as Markdown."""
    lines = [f"## {name}: {entry['state']}", "", f"{result.rows:,} rows, key `{result.key}`", ""]
    if name == "train":
        history = read_history(store, result.parts[0])
        lines += picture(loss_plot(history), "Loss")
        lines += picture(accuracy_plot(history), "Accuracy by drafted token")
        lines += epoch_table(epochs_of(history))
    if name == "evaluate":
        _, before, after = (part.facts for part in result.parts)
        both = {"before training": before, "after": after}
        shares = {name: facts["per_position"] for name, facts in both.items()}
        lines += picture(acceptance_plot(shares), "Acceptance by position")
        lines += acceptance_table(before, after)
    if name == "promote":
        lines += comparison(result.facts, in_service=result.notes["in service"])
    for part in result.parts[:SHOWN_PARTS]:
        facts = {k: v for k, v in part.facts.items() if k not in NOT_FACTS}
        lines += [f"`{part.path}`", "", "| | |", "|---|---|"]
        lines += [f"| {key} | {value} |" for key, value in facts.items()] + [""]
        lines += [_code(text) for text in part.facts.get("shown", [])]
    if len(result.parts) > SHOWN_PARTS:
        lines.append(f"... and {len(result.parts) - SHOWN_PARTS} more parts")
    return "\n".join(lines)


def describe_data(data: DataSummary) -> str:
    """Return the data report: counts, sources, lengths, vocabulary coverage, decoded samples."""
    lines = ["## Data", "", *_rows([["", ""], ["---"] * 2, *map(list, data.figures.items())]), ""]
    if data.sources:
        shown = list(data.sources.items())[:SHOWN_SOURCES]
        rows = [[name, *(f"{count:,}" for count in counts)] for name, counts in shown]
        lines += [*_rows([["source", *SIDES], ["---"] * 4, *rows]), ""]
        if len(data.sources) > len(shown):
            lines += [f"... and {len(data.sources) - len(shown)} more sources", ""]
    lines += picture(data.lengths, "Length of the samples")
    lines += ["### Vocabulary coverage", ""]
    lines += ["Share of the supervised tokens that the draft can propose.", ""]
    shares = [[side, f"{share:.2%}"] for side, share in data.coverage.items()]
    lines += [*_rows([["side", "coverage"], ["---"] * 2, *shares]), ""]
    lines += picture(data.coverage_by_size, "Coverage by the most frequent tokens")
    lines += ["### Samples", "", "What is between ⟦ and ⟧ is supervised.", ""]
    return "\n".join([*lines, *map(_code, data.samples)])


def comparison(decision: dict[str, Any], *, in_service: bool) -> list[str]:
    """Return a draft beside the one in service before, as lines of Markdown."""
    lines = [describe(decision, in_service=in_service), ""]
    new, old = decision.get("per_position") or (None, None)  # drafts judged earlier lack it
    if new is not None and old is not None:
        lines += picture(
            acceptance_plot({"draft in service before": old, "this draft": new}),
            "Acceptance by position",
        )
    pairs = {"all prompts": (decision["acceptance_length"], decision["before"])}
    rows = [
        [name, _number(now, ".3f"), _number(before, ".3f")]
        for name, (now, before) in (pairs | decision["sources"]).items()
    ]
    header = ["acceptance length", "this draft", "draft in service before"]
    return [*lines, *_rows([header, ["---"] * 3, *rows]), ""]


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
    return [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in rows]


def _code(text: str) -> str:
    """A block of text as it is, whatever marks of Markdown it holds."""
    longest = max(map(len, re.findall("`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}text\n{text}\n{fence}\n"


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else format(value, form)
