"""Pictures of scaling: dots and regions agree with the ratio, messages lie in their device's lane."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex, to_rgb

from cs336_systems.report import limit_lines, region, ring_timeline
from labbook.style import GREEN, VERMILLION


def ratios(devices, batches):
    """A batch of `devices` tokens is where both take equally long."""
    return pd.DataFrame([(n, b, b / n) for n in devices for b in batches], columns=["n", "b", "ratio"])


def test_the_border_is_where_the_ratio_is_one_and_dots_have_the_colour_of_their_side():
    grid, points = ratios(np.geomspace(1, 1e4, 30), np.geomspace(1, 1e6, 30)), ratios([10, 100], [30, 3000])
    chart = region(grid, "n", "b", points=points, marks={"here": (10, 1000)}, title="Region")
    (axes,) = chart.axes
    _, border, dots = axes.collections
    corners = border.get_paths()[0].vertices
    assert np.log10(corners[:, 1]) == pytest.approx(np.log10(corners[:, 0]), abs=0.05)
    places = [tuple(place) for place in dots.get_offsets()]
    colors = dict(zip(places, map(to_hex, dots.get_facecolors()), strict=True))
    sides = {place: place[1] >= place[0] for place in colors}
    assert colors == {place: (GREEN if inside else VERMILLION).lower() for place, inside in sides.items()}
    assert "here" in [text.get_text() for text in axes.texts]


def test_a_message_is_a_box_from_its_start_to_its_end_in_the_lane_of_its_sender():
    sends = pd.DataFrame(
        [("whole", 0, 0.0, 1.0, 0), ("whole", 1, 0.0, 1.0, 1), ("parts", 1, 0.5, 1.0, 0)],
        columns=["algorithm", "device", "start", "end", "part"],
    ).assign(text=["a", "b", "c"])
    chart = ring_timeline(sends, "algorithm", "part", title="Ring")
    assert [len(axes.patches) for axes in chart.axes] == [2, 1]
    boxes = [box for axes in chart.axes for box in axes.patches]
    for box, row in zip(boxes, sends.itertuples(), strict=True):
        assert (box.get_x(), box.get_x() + box.get_width()) == (row.start, row.end)
    first, second, third = (to_rgb(box.get_facecolor()[:3]) for box in boxes)
    assert first == third != second  # of one part


def test_a_limit_is_a_level_across_the_panel_and_marks_are_named():
    frame = pd.DataFrame({"n": [1, 2, 4], "memory_gb": [80.0, 40.0, 20.0]})
    marks = {"two are enough": (2, 40.0)}
    chart = limit_lines(frame, "n", "memory_gb", limit=("one GPU", 50.0), marks=marks, title="Limit")
    (axes,) = chart.axes
    assert [50.0, 50.0] in [list(line.get_ydata()) for line in axes.get_lines()]
    assert {"one GPU", "two are enough"} <= {text.get_text() for text in axes.texts}
