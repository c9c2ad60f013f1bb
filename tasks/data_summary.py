"""What a run learns from, for people to look at before and after: sources, lengths, decoded samples, coverage."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from storage import artifacts
from storage.arrays import read_arrays
from storage.layout import SPLIT_TABLE, VOCAB_FILE
from storage.manifest import Manifest
from storage.store import Store
from storage.tables import read_table
from tasks.length_histogram import add_up
from tasks.plots import Plot, bar_plot, line_plot

SIDES = ("train", "val", "test")
SHOWN_SAMPLES = 6
CURVE_POINTS = 100


@dataclass(frozen=True)
class DataSummary:
    """Figures, plots and samples; what no artifact tells is empty or None."""

    figures: dict[str, str]
    """What was read and what became of it, by name."""
    sources: dict[str, tuple[int, ...]]
    """Source -> conversations on each of SIDES."""
    lengths: Plot | None
    """Samples by their length."""
    coverage: dict[str, float]
    """Side -> share of its supervised tokens that the draft can propose."""
    coverage_by_size: Plot | None
    """Share of the train side's supervised tokens that its n most frequent ones are."""
    samples: tuple[str, ...]
    """Decoded, with their supervised spans between ⟦ and ⟧."""


def summarize_data(
    store: Store,
    *,
    conversations: Sequence[Manifest],
    samples: Sequence[Manifest],
    split: Manifest | None,
    vocab: Manifest | None,
) -> DataSummary:
    """Return what the parts of a run's first stages say of its data, as far as they are given.

    Raises ArtifactError for a file of theirs that has gone or is corrupt.
    """
    facts = {} if vocab is None else vocab.facts
    return DataSummary(
        figures=_figures(conversations, samples, facts),
        sources={} if split is None else _sources(store, split),
        lengths=_lengths(samples),
        coverage={side: facts[f"coverage {side}"] for side in SIDES if f"coverage {side}" in facts},
        coverage_by_size=None if vocab is None else _coverage_by_size(store, vocab),
        samples=tuple(text for part in samples for text in part.facts["shown"])[:SHOWN_SAMPLES],
    )


def _figures(
    conversations: Sequence[Manifest], samples: Sequence[Manifest], vocab: Mapping[str, Any]
) -> dict[str, str]:
    def total(name: str) -> int:
        return sum(part.facts[name] for part in samples)

    if not conversations:
        return {}
    tokens, supervised = total("tokens"), total("supervised_tokens")
    figures = {
        "conversations": f"{sum(part.rows for part in conversations):,} from {len(conversations):,} file(s)",
        "dropped when read": _dropped(conversations),
        "samples": f"{sum(part.rows for part in samples):,}, {total('truncated'):,} of them cut",
        "dropped when tokenized": _dropped(samples),
        "tokens": f"{tokens:,}",
        "supervised tokens": f"{supervised:,} ({supervised / tokens:.0%})" if tokens else "0",
        "longest sample": f"{max((p.facts['longest_tokens'] for p in samples), default=0):,} tokens",
    }
    if vocab:
        figures["draft vocabulary"] = (
            f"{vocab['draft size']:,} tokens; {vocab['distinct train tokens']:,} different ones are supervised"
        )
    return figures


def _dropped(parts: Sequence[Manifest]) -> str:
    counts: dict[str, int] = {}
    for part in parts:
        dropped = part.facts.get("dropped", {})
        if isinstance(dropped, int):  # of conversations that the verifier was to answer
            dropped = {"too long to be answered": dropped}
        for reason, count in dropped.items():
            counts[reason] = counts.get(reason, 0) + count
    return ", ".join(f"{count:,} {reason}" for reason, count in counts.items() if count) or "none"


def _sources(store: Store, split: Manifest) -> dict[str, tuple[int, ...]]:
    with artifacts.open_file(store, split, SPLIT_TABLE) as path:
        table = read_table(path, columns=["source", "side"])
    counted = table.group_by(["source", "side"]).aggregate([([], "count_all")]).to_pylist()
    found = {(row["source"], row["side"]): row["count_all"] for row in counted}
    names = sorted({source for source, _ in found})
    return {name: tuple(found.get((name, side), 0) for side in SIDES) for name in names}


def _lengths(samples: Sequence[Manifest]) -> Plot | None:
    histograms = [part.facts["lengths"] for part in samples if "lengths" in part.facts]
    if not histograms or len(histograms) < len(samples):  # made before lengths were counted
        return None
    histogram = add_up(histograms)
    counts, width = histogram["samples"], histogram["tokens_per_bin"]
    return bar_plot(
        {f"samples, by {width} tokens": counts}, left="0 tokens", right=f"{len(counts) * width:,}"
    )


def _coverage_by_size(store: Store, vocab: Manifest) -> Plot | None:
    with artifacts.open_file(store, vocab, VOCAB_FILE) as path:
        counts = read_arrays(path)["counts"]
    covered = np.cumsum(np.sort(counts[counts > 0])[::-1])  # [distinct tokens]
    sizes = np.unique(np.linspace(1, len(covered), CURVE_POINTS).astype(np.int64))
    points = [(float(size), float(covered[size - 1] / covered[-1])) for size in sizes]
    return line_plot({"share of the train side": points}, unit="tokens")
