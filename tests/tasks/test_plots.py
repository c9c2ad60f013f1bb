"""Plots: lines and bars in SVG units of 640 by 220, from 0 to the highest value."""

from tasks.plots import COLORS, bar_plot, line_plot


def test_lines_span_the_plot_and_dashed_ones_have_the_same_colors() -> None:
    plot = line_plot({"train": [(1, 4.0), (3, 1.0), (5, 2.0)]}, dashed={"validation": [(3, 2.0)]})

    assert plot is not None
    assert (plot.top, plot.left, plot.right) == ("4.00", "step 1", "5")
    train, validation = plot.shapes
    assert train.path == "M0.0,0.0L320.0,165.0L640.0,110.0"
    assert validation.path == "M320.0,110.0L320.0,110.0"  # a dot
    assert train.color == validation.color == COLORS[0]
    assert (train.kind, validation.kind) == ("line", "dashed")


def test_all_zeros_lie_on_the_axis_and_no_points_are_no_plot() -> None:
    plot = line_plot({"accuracy": [(1, 0.0), (2, 0.0)]})
    assert plot is not None
    assert plot.shapes[0].path == "M0.0,220.0L640.0,220.0"
    assert line_plot({"accuracy": []}) is None


def test_bars_of_two_series_stand_side_by_side() -> None:
    plot = bar_plot({"before": [0.0, 0.5], "after": [1.0, 0.25]}, left="1", right="2", top=1.0)

    assert plot is not None
    before, after = plot.shapes
    # a place of 320 for each position: 24 free, then two bars of 136, then 24
    assert before.path == "M24.0,220V220.0H160.0V220ZM344.0,220V110.0H480.0V220Z"
    assert after.path == "M160.0,220V0.0H296.0V220ZM480.0,220V165.0H616.0V220Z"
    assert bar_plot({"none": []}, left="", right="") is None
