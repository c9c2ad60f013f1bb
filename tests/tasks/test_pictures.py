"""A plot as an image in Markdown that loads nothing."""

import base64
import re
from xml.etree import ElementTree as ET

from tasks.pictures import picture
from tasks.plots import bar_plot, line_plot


def test_a_picture_is_a_whole_svg_in_a_data_url() -> None:
    plot = line_plot({"a < b": [(1, 2.0), (2, 1.0)]}, dashed={"later": [(2, 1.5)]})

    line, empty = picture(plot, "Loss & more")

    match = re.fullmatch(r"!\[Loss & more\]\(data:image/svg\+xml;base64,([\w+/=]+)\)", line)
    assert match is not None
    assert empty == ""
    svg = ET.fromstring(base64.b64decode(match[1]))
    texts = [e.text for e in svg.iter() if e.tag.endswith("text")]
    assert texts == ["2.00", "Loss & more", "step 1", "2", "a < b", "later"]
    assert plot is not None
    paths = [e.get("d") for e in svg.iter() if e.tag.endswith("path")]
    assert {shape.path for shape in plot.shapes} < set(paths)


def test_bars_are_filled_and_no_plot_is_no_picture() -> None:
    (line, _) = picture(bar_plot({"samples": [1, 3]}, left="0", right="2"), "Lengths")

    svg = base64.b64decode(line.split("base64,")[1].rstrip(")")).decode()
    assert svg.count('style="fill:#2266cc"') == 2  # the bars, and their entry in the legend
    assert picture(None, "Lengths") == []
