"""Plots of a state, step by step."""

import pandas as pd
import pytest
from matplotlib.text import Text

from cs336_systems.report.plots import states

FRAME = pd.DataFrame(
    {
        "tile": [1, 2, 3] * 2,
        "query": ["a"] * 3 + ["b"] * 3,
        "m": [0.0, 1, 1, 5, 5, 9],
        "error": [1, 0.1, 0, 1, 1, 0],
    }
)


def test_a_panel_for_each_quantity_with_its_own_axis():
    chart = states(
        FRAME, "tile", {"m": "maximum", "error": "error"}, "query", logarithmic=["error"], title="States"
    )
    left, right = chart.axes
    assert (left.get_title(loc="left"), right.get_title(loc="left")) == ("maximum", "error")
    assert (left.get_yscale(), right.get_yscale()) == ("linear", "log")
    assert left.get_ylim()[1] > 9 > right.get_ylim()[1]
    points = [line for line in right.get_lines() if line.get_marker() == "o"]
    assert [len(line.get_xdata()) for line in points] == [2, 2]  # an error of zero has no logarithm
    assert {"a", "b"} <= {text.get_text() for text in chart.findobj(Text)}


def test_empty_and_missing():
    assert states(FRAME[:0], "tile", {"m": "maximum"}).axes
    with pytest.raises(ValueError, match="maximum"):
        states(FRAME, "tile", {"maximum": "maximum"}, "query")
