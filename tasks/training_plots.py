"""The plots of a training and of what its draft is worth."""

from collections.abc import Mapping, Sequence

from tasks.plots import Plot, bar_plot, line_plot
from tasks.training_history import Entry, accuracy_names, curve


def loss_plot(history: Sequence[Entry]) -> Plot | None:
    """Return the loss by step on both sides."""
    return line_plot(
        {
            "train loss": curve(history, "loss", validation=False),
            "validation loss": curve(history, "loss", validation=True),
        }
    )


def accuracy_plot(history: Sequence[Entry]) -> Plot | None:
    """Return by step how often all drafted tokens up to the first, second, ... are right."""
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


def acceptance_plot(shares: Mapping[str, Sequence[float]]) -> Plot | None:
    """Return how often the first, second, ... drafted token is accepted, for drafts by their names."""
    count = max(map(len, shares.values()), default=0)
    return bar_plot(shares, left="draft token 1", right=f"{count}", top=1.0)
