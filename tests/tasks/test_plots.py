"""Plots: lines in SVG units of 640 by 220, from 0 to the highest value."""

from tasks.plots import COLORS, line_plot


def test_lines_span_the_plot_and_dashed_ones_have_the_same_colors() -> None:
    plot = line_plot({"train": [(1, 4.0), (3, 1.0), (5, 2.0)]}, dashed={"validation": [(3, 2.0)]})

    assert plot is not None
    assert (plot.top, plot.first_step, plot.last_step) == (4.0, 1, 5)
    train, validation = plot.lines
    assert train.path == "M0.0,0.0L320.0,165.0L640.0,110.0"
    assert validation.path == "M320.0,110.0L320.0,110.0"  # a dot
    assert train.color == validation.color == COLORS[0]
    assert (train.dashed, validation.dashed) == (False, True)


def test_all_zeros_lie_on_the_axis_and_no_points_are_no_plot() -> None:
    plot = line_plot({"accuracy": [(1, 0.0), (2, 0.0)]})
    assert plot is not None
    assert plot.lines[0].path == "M0.0,220.0L640.0,220.0"
    assert line_plot({"accuracy": []}) is None
