"""Pictures of scaling and of steps: dots and regions agree with the ratio, messages lie in their lane."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.colors import to_hex

from cs336_systems.report import region
from labbook.style import GREEN, VERMILLION


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
