"""Plots as data: lines and bars in SVG units, all text beside them.

Text inside of an SVG shrinks with it, on a phone to half its size. In the report an SVG therefore holds shapes only, is
stretched to the page's width, and its strokes keep their own; `tasks.pictures` draws a whole picture where an image is
all that can be shown.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 220
COLORS = ("#2266cc", "#cc5522", "#228844", "#884499", "#997700", "#117788", "#aa3366", "#555555")
GAP = 0.15
"""Share of a bar's place that is left free."""

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Shape:
    """One line, or the bars of one kind, and its entry in the legend."""

    name: str
    color: str
    path: str
    """SVG path data; a lone point is a line of no length, which is drawn as a dot."""
    kind: str = "line"
    """line, dashed or bars."""


@dataclass(frozen=True)
class Plot:
    """Shapes, and the values at the ends of their axes as text."""

    shapes: tuple[Shape, ...]
    top: str
    left: str
    right: str
    width: int = WIDTH
    height: int = HEIGHT


def line_plot(
    series: Mapping[str, Points],
    *,
    dashed: Mapping[str, Points] | None = None,
    unit: str = "step",
) -> Plot | None:
    """Return a plot of lines by name, from 0 to the highest value; None without points.

    `dashed` are lines in the same colors, one after the other; `unit` is what the points go by.
    """
    kinds = [(series, "line"), (dashed or {}, "dashed")]
    points = [p for lines, _ in kinds for line in lines.values() for p in line]
    if not points:
        return None
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    high = max(y for _, y in points) or 1.0
    shapes = [
        Shape(name, COLORS[i % len(COLORS)], _path(line, left, right, high), kind)
        for group, kind in kinds
        for i, (name, line) in enumerate(group.items())
        if line
    ]
    return Plot(tuple(shapes), f"{high:.2f}", f"{unit} {left:,.0f}", f"{right:,.0f}")


def bar_plot(
    series: Mapping[str, Sequence[float]], *, left: str, right: str, top: float | None = None
) -> Plot | None:
    """Return a plot of bars from 0 to `top` (by default the highest), one series beside the other; None if empty."""
    places = max((len(bars) for bars in series.values()), default=0)
    if not places:
        return None
    high = top or max(value for bars in series.values() for value in bars) or 1.0
    place = WIDTH / places
    width = place * (1 - GAP) / len(series)
    shapes = []
    for i, (name, bars) in enumerate(series.items()):
        starts = [place * (k + GAP / 2) + width * i for k in range(len(bars))]
        tops = [(1 - min(value / high, 1)) * HEIGHT for value in bars]
        path = "".join(
            f"M{x:.1f},{HEIGHT}V{y:.1f}H{x + width:.1f}V{HEIGHT}Z"
            for x, y in zip(starts, tops, strict=True)
        )
        shapes.append(Shape(name, COLORS[i % len(COLORS)], path, "bars"))
    return Plot(tuple(shapes), f"{high:,.2f}" if high < 10 else f"{high:,.0f}", left, right)


def _path(line: Points, left: float, right: float, high: float) -> str:
    span = (right - left) or 1.0
    at = [f"{(x - left) / span * WIDTH:.1f},{(1 - y / high) * HEIGHT:.1f}" for x, y in line]
    return f"M{at[0]}" + "".join(f"L{point}" for point in at[1:] or at[:1])
