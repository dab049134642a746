"""Pictures of scaling and of steps: dots and regions agree with the ratio, messages lie in their lane."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from cs336_systems.report import limit_lines, region, ring_timeline, tradeoff, waterfall
from labbook.style import BLUE, GREEN, VERMILLION


def ratios(devices, batches):
    """A batch of `devices` tokens is where both take equally long."""
    return pd.DataFrame([(n, b, b / n) for n in devices for b in batches], columns=["n", "b", "ratio"])


def test_the_border_is_where_the_ratio_is_one_and_dots_have_the_colour_of_their_side():
    grid, points = ratios(np.geomspace(1, 1e4, 30), np.geomspace(1, 1e6, 30)), ratios([10, 100], [30, 3000])
    (axes,) = region(grid, "n", "b", points=points, marks={"here": (10, 1000)}).axes
    _, border, dots = axes.collections
    corners = border.get_paths()[0].vertices
    assert np.log10(corners[:, 1]) == pytest.approx(np.log10(corners[:, 0]), abs=0.05)
    for (n, b), color in zip(dots.get_offsets(), dots.get_facecolors(), strict=True):
        assert to_hex(color) == (GREEN if b >= n else VERMILLION).lower()


def test_a_message_is_a_box_from_its_start_to_its_end_in_the_lane_of_its_sender():
    sends = [("whole", 0, 0.0, 1.0, 0, "a"), ("whole", 1, 0.0, 1.0, 1, "b"), ("parts", 1, 0.5, 1.0, 0, "c")]
    sends = pd.DataFrame(sends, columns=["algorithm", "device", "start", "end", "part", "text"])
    chart = ring_timeline(sends, "algorithm", "part")
    boxes = [box for axes in chart.axes for box in axes.patches]
    assert [len(axes.patches) for axes in chart.axes] == [2, 1]
    assert [(box.get_x(), box.get_width()) for box in boxes] == [(0, 1), (0, 1), (0.5, 0.5)]
    first, second, third = (to_hex(box.get_facecolor()) for box in boxes)
    assert first == third != second  # of one part


def test_a_limit_is_a_level_a_waterfall_has_its_changes_and_points_in_one_place_share_a_name():
    frame = pd.DataFrame({"n": [1, 2, 4], "memory_gb": [80.0, 40.0, 60.0]})
    (axes,) = limit_lines(frame, "n", "memory_gb", limit=("one GPU", 50.0)).axes
    assert [50.0, 50.0] in [list(line.get_ydata()) for line in axes.get_lines()]
    (axes,) = waterfall(frame, "n", "memory_gb").axes
    changes = [(bar.get_y(), bar.get_height(), to_hex(bar.get_facecolor())) for bar in axes.patches]
    blue, green, red = (color.lower() for color in (BLUE, GREEN, VERMILLION))
    assert changes == [(0, 80, blue), (80, -40, green), (40, 20, red), (0, 60, blue)]
    rows = {"gib": [38.0, 38.01, 102.0, None], "ms": [1.8, 1.8, 1.7, 1.0], "which": list("abcd")}
    (axes,) = tradeoff(pd.DataFrame(rows), "gib", "ms", "which").axes
    assert [text.get_text() for text in axes.texts] == ["a, b", "c"]
