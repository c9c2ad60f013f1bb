"""Line plots as data for the report's template: lines in SVG units, all text beside them in HTML.

Text inside of an SVG shrinks with it, on a phone to half its size. So an SVG holds lines only, is stretched to the
page's width, and its strokes keep their own.
"""

from collections.abc import Mapping
from dataclasses import dataclass

WIDTH, HEIGHT = 640, 220
COLORS = ("#2266cc", "#cc5522", "#228844", "#884499", "#997700", "#117788", "#aa3366", "#555555")


@dataclass(frozen=True)
class Line:
    """One line and its entry in the legend."""

    name: str
    color: str
    path: str
    """SVG path data; a lone point is a line of no length, which is drawn as a dot."""
    dashed: bool


@dataclass(frozen=True)
class Plot:
    """Lines and the values at the ends of their axes."""

    lines: tuple[Line, ...]
    top: float
    first_step: int
    last_step: int
    width: int = WIDTH
    height: int = HEIGHT


def line_plot(
    series: Mapping[str, list[tuple[float, float]]],
    *,
    dashed: Mapping[str, list[tuple[float, float]]] | None = None,
) -> Plot | None:
    """Return a plot of lines by name, from 0 to the highest value; None without points.

    `dashed` are lines in the same colors, one after the other.
    """
    kinds = [(series, False), (dashed or {}, True)]
    points = [p for lines, _ in kinds for line in lines.values() for p in line]
    if not points:
        return None
    left, right = min(x for x, _ in points), max(x for x, _ in points)
    high = max(y for _, y in points) or 1.0
    lines = [
        Line(name, COLORS[i % len(COLORS)], _path(line, left, right, high), is_dashed)
        for group, is_dashed in kinds
        for i, (name, line) in enumerate(group.items())
        if line
    ]
    return Plot(tuple(lines), high, int(left), int(right))


def _path(line: list[tuple[float, float]], left: float, right: float, high: float) -> str:
    span = (right - left) or 1.0
    at = [f"{(x - left) / span * WIDTH:.1f},{(1 - y / high) * HEIGHT:.1f}" for x, y in line]
    return f"M{at[0]}" + "".join(f"L{point}" for point in at[1:] or at[:1])
