"""Lanes of steps: what is drawn where, in which colour, and how thin."""

import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex

from cs336_systems.report.lane_plots import EXPOSED, HIDDEN, STAGES, lanes_timeline


@pytest.fixture
def steps() -> pd.DataFrame:
    """Naive: 2 ms of communication after backward. Overlapped: 1 ms inside it, 1 ms after it."""
    rows = [
        ("naive", "compute", "forward", 0, 4),
        ("naive", "compute", "backward", 4, 10),
        ("naive", "communication", "communication", 10, 12),
        ("naive", "compute", "communication", 12, 12.001),
        ("overlapped", "compute", "forward", 0, 4),
        ("overlapped", "compute", "backward", 4, 10),
        ("overlapped", "communication", "backward", 9, 11),
    ]
    return pd.DataFrame(rows, columns=["wrapper", "lane", "range", "start_ms", "end_ms"])


def spans(chart, color) -> list[tuple[float, float]]:
    """Start and end of every bar of one colour, in drawing order."""
    found = []
    for collection in chart.axes[0].findobj(PolyCollection):
        if len(collection.get_facecolor()) and to_hex(collection.get_facecolor()[0]) == color.lower():
            for path in collection.get_paths():
                box = path.get_extents()
                found.append((round(box.x0, 6), round(box.x1, 6)))
    return found


def labels(chart) -> list[str]:
    return [text.get_text() for legend in chart.legends for text in legend.get_texts()]


def test_a_lane_for_each_step_and_red_where_nothing_is_computed(steps):
    chart = lanes_timeline(steps, "wrapper", title="Steps")
    assert [label.get_text() for label in chart.axes[0].get_yticklabels()] == ["naive", "overlapped"]
    assert spans(chart, EXPOSED) == [(10, 12), (10, 11)]
    assert spans(chart, HIDDEN) == [(10, 12), (9, 11)]  # under the red
    assert spans(chart, STAGES["backward"]) == [(4, 10), (4, 10)]


def test_the_legend_names_what_can_be_seen(steps):
    names = ["forward", "backward", "communication, hidden", "communication, exposed"]
    assert labels(lanes_timeline(steps, "wrapper")) == names
    late = lanes_timeline(steps, "wrapper", between_ms=(9, 12))
    assert labels(late) == names[1:]
    assert late.axes[0].get_xlim() == (9, 12)


def test_the_same_rows_give_the_same_picture(steps):
    assert lanes_timeline(steps, "wrapper").png() == lanes_timeline(steps, "wrapper").png()


def test_without_rows_a_placeholder_and_without_a_column_a_sentence(steps):
    assert lanes_timeline(steps.iloc[:0], "wrapper", title="Empty").png()
    with pytest.raises(ValueError, match="lane"):
        lanes_timeline(steps.drop(columns="lane"), "wrapper")
