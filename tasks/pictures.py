"""A plot as a picture in Markdown: an SVG with its text inside, as a data URL, so that nothing is loaded for it."""

import base64
from html import escape

from tasks.plots import Plot, Shape

LEFT, TOP, LINE = 12, 26, 20
"""Margins around the plot and the height of a line of its legend, in SVG units."""
ENTRY_WIDTH = 210
ENTRIES_IN_LINE = 3
STYLE = "text{font:13px system-ui,sans-serif;fill:#222}path{fill:none;stroke-width:2;stroke-linecap:round}"


def picture(plot: Plot | None, about: str) -> list[str]:
    """Return a plot as lines of Markdown; none where there is none."""
    if plot is None:
        return []
    data = base64.b64encode(draw(plot, about).encode()).decode()
    return [f"![{about}](data:image/svg+xml;base64,{data})", ""]


def draw(plot: Plot, about: str) -> str:
    """Return a plot as the text of an SVG that stands by itself, on white."""
    bottom = TOP + plot.height
    lines = -(-len(plot.shapes) // ENTRIES_IN_LINE)
    width, height = plot.width + 2 * LEFT, bottom + LINE * (lines + 1) + 10
    right = width - LEFT
    legend = [
        _entry(shape, LEFT + ENTRY_WIDTH * (i % ENTRIES_IN_LINE), bottom + LINE * (i // 3 + 2))
        for i, shape in enumerate(plot.shapes)
    ]
    return "".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}">',
            f'<style>{STYLE}</style><rect width="{width}" height="{height}" fill="#fff"/>',
            f'<text x="{LEFT}" y="18">{plot.top}</text>',
            f'<text x="{right}" y="18" text-anchor="end" font-weight="600">{escape(about)}</text>',
            f'<text x="{LEFT}" y="{bottom + LINE - 4}">{escape(plot.left)}</text>',
            f'<text x="{right}" y="{bottom + LINE - 4}" text-anchor="end">{escape(plot.right)}</text>',
            f'<g transform="translate({LEFT},{TOP})"><path d="M0,0V{plot.height}H{plot.width}" stroke="#bbb"/>',
            *(f'<path d="{shape.path}" {_paint(shape)}/>' for shape in plot.shapes),
            "</g>",
            *legend,
            "</svg>",
        ]
    )


def _paint(shape: Shape) -> str:
    if shape.kind == "bars":
        return f'style="fill:{shape.color}"'
    dashes = ' stroke-dasharray="1 6"' if shape.kind == "dashed" else ""
    return f'stroke="{shape.color}"{dashes}'


def _entry(shape: Shape, x: int, y: int) -> str:
    sample = f"M{x},{y - 9}h18v9h-18Z" if shape.kind == "bars" else f"M{x},{y - 4}h18"
    return f'<path d="{sample}" {_paint(shape)}/><text x="{x + 24}" y="{y}">{escape(shape.name)}</text>'
