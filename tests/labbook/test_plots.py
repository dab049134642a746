"""What is drawn of rows: values, colours, and why there is none."""

from collections import defaultdict
from unittest.mock import Mock

import matplotlib as mpl
import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from labbook import bars, lines, spans, stacked_bars
from labbook.style import BLUE, GREEN, VERMILLION

BY_CONTEXT = {"x": "context_length", "hue": "implementation"}
PLAIN = BLUE.lower()
COMPILED = VERMILLION.lower()


@pytest.fixture
def shares():
    """Kernel rows of two contexts: three classes in two ranges, and the time doubles."""
    ranges = pd.DataFrame({"range": ["measure/forward", "measure/backward"]})
    classes = [("matmul", 40.0), ("softmax", 8.0), ("other", 8.0)]
    parts = pd.DataFrame(classes, columns=["class", "total_ms"])
    short = ranges.merge(parts, how="cross").assign(model_size="small", context_length=128)
    long = short.assign(context_length=256, total_ms=2 * short["total_ms"])
    return pd.concat([short, long])


def texts(chart):
    return {text.get_text() for text in chart.findobj(Text)}


def drawn(chart):
    """By colour the points of each line that has several."""
    points = {}
    for axes in chart.axes:
        for line in axes.get_lines():
            if len(line.get_xdata()) > 1:
                points[to_hex(line.get_color())] = np.asarray(line.get_xydata(), float).tolist()
    return points


def heights(chart):
    """By colour the heights of the bars."""
    heights = defaultdict(list)
    for axes in chart.axes:
        for group in axes.containers:
            for bar in group:
                heights[to_hex(bar.get_facecolor())].append(bar.get_height())
    return heights


def test_a_cell_shows_a_small_picture_once(shares, monkeypatch):
    display = Mock()
    monkeypatch.setattr("IPython.display.display", display)
    chart = stacked_bars(shares, "context_length", title="Shares", share=True, facet="range")
    chart._ipython_display_()
    png = chart.png
    assert len(png) < 150_000
    display.assert_called_once()
    (bundle,) = display.call_args.args
    assert bundle == {"image/png": png, "text/plain": "<figure>"}
    options = display.call_args.kwargs
    assert options["raw"]
    assert options["metadata"]["image/png"]["alt"] == "Shares"


def test_lines_are_of_their_colour_and_values(rows):
    points = drawn(lines(rows[::-1], **BY_CONTEXT))
    assert points.keys() == {PLAIN, COMPILED}
    assert points[PLAIN] == [[256, 1.0], [512, 4.0]]


def test_a_band_has_the_edges_of_the_spread(rows):
    bands = lines(rows, **BY_CONTEXT).axes[0].collections
    (plain,) = [band for band in bands if to_hex(band.get_facecolor()[0]) == PLAIN]
    (outline,) = plain.get_paths()
    edges = np.round(outline.vertices[:, 1], 6)
    assert set(edges) == {0.9, 1.2, 3.6, 4.8}


def test_words_stand_at_equal_distances_and_numbers_are_plain():
    sizes = pd.DataFrame({"model_size": ["xl", "small"], "p50_ms": [3.0, 1.0]})
    (points,) = drawn(lines(sizes, "model_size")).values()
    assert points == [[0, 1.0], [1, 3.0]]
    numbers = pd.DataFrame({"n": [1, 1000], "p50_ms": [1, 1e6]})
    axes = lines(numbers, "n").axes[0]
    assert axes.get_xticklabels()[1].get_text() == "1,000"


def test_why_there_is_no_number_is_written(rows):
    failed = rows[rows["status"] == "oom"]
    assert "OOM" in texts(lines(failed, **BY_CONTEXT))
    marks = lines(rows, **BY_CONTEXT).axes[0].texts
    (word,) = [mark for mark in marks if mark.get_text() == "OOM"]
    assert to_hex(word.get_color()) == PLAIN
    assert word.get_position()[0] == 1024
    assert "–" in texts(bars(rows.drop(columns="status"), **BY_CONTEXT))
    empty = lines(rows[:0], **BY_CONTEXT)
    assert any("cs336_systems run" in text for text in texts(empty))


def test_rows_in_one_place_are_refused(rows):
    others = rows.assign(batch_size=4)
    both = pd.concat([rows, others])
    for draw in (lines, bars):
        with pytest.raises(ValueError, match=r"differ in .*batch_size"):
            draw(both, **BY_CONTEXT)
        with pytest.raises(ValueError, match="no implementation"):
            draw(rows[:1].assign(implementation=None), **BY_CONTEXT)


def test_bars_have_their_values(rows):
    chart = bars(rows, **BY_CONTEXT)
    assert np.nan_to_num(heights(chart)[PLAIN]).tolist() == [1.0, 4.0, 0.0]
    assert heights(chart)[COMPILED] == [0.5, 1.0, 8.0]
    assert heights(bars(rows[:1], "context_length"))[PLAIN] == [1.0]
    assert {"4.00", "8.00", "OOM"} <= texts(chart)


def test_stacks_add_up_ranges_to_their_whole(shares):
    chart = stacked_bars(shares, "context_length")
    assert heights(chart)[PLAIN] == [80, 160]
    assert {"112 ms", "224 ms"} <= texts(chart)
    chart = stacked_bars(shares, "context_length", share=True)
    parts = list(heights(chart).values())
    assert np.sum(parts, axis=0).tolist() == pytest.approx([100, 100])


def boxes(chart, color):
    """Left, right, lower and upper end of each box of one colour."""
    boxes = []
    for patches in chart.axes[0].findobj(PolyCollection):
        if to_hex(patches.get_facecolor()[0]) == color.lower():
            boxes += [path.get_extents() for path in patches.get_paths()]
    return [np.round([box.x0, box.x1, box.y0, box.y1], 6).tolist() for box in boxes]


def lanes(chart):
    labels = chart.axes[0].get_yticklabels()
    return [label.get_text() for label in labels]


def test_spans_are_boxes_on_their_lanes_with_names_where_they_fit():
    rows = [
        ("host", "host range", "forward", 0, 10),
        ("host", "host range", "no room", 10, 10.01),
        ("stream 7", "attention", "", 2, 5),
    ]
    columns = ["lane", "class", "name", "start_ms", "end_ms"]
    frame = pd.DataFrame(rows, columns=columns)
    chart = spans(frame, "lane", "class", text="name")
    assert lanes(chart) == ["host", "stream 7"]
    assert "forward" in texts(chart)
    assert "no room" not in texts(chart)
    assert boxes(chart, GREEN) == [[2, 5, 0.6, 1.4]]
    late = spans(frame, "lane", "class", text="name", between=(6, 9))
    assert lanes(late) == ["host"]


def test_what_is_exposed_lies_over_what_was_hidden_and_what_cannot_be_seen_is_not_in_the_legend():
    rows = [
        ("a", "communication, exposed", 5, 8),
        ("a", "communication, hidden", 0, 10),
        ("a", "copies", 8, 8.001),
    ]
    frame = pd.DataFrame(rows, columns=["step", "doing", "start_ms", "end_ms"])
    chart = spans(frame, "step", "doing")
    drawn = [to_hex(each.get_facecolor()[0]) for each in chart.axes[0].collections]
    assert drawn.index(VERMILLION.lower()) > drawn.index(GREEN.lower())
    assert "copies" not in texts(chart)


def test_a_picture_does_not_follow_the_users_style(rows):
    plain = lines(rows, **BY_CONTEXT)
    with mpl.style.context(["dark_background", {"font.family": "serif"}]):
        again = lines(rows, **BY_CONTEXT)
        assert again.png == plain.png


def test_zeros_are_in_the_picture():
    points = [(0.0, 9.0), (1.0, 0.0)]
    rows = pd.DataFrame(points, columns=["bucket_size_mb", "p50_ms"])
    axes = lines(rows, "bucket_size_mb").axes[0]
    for point in points:
        assert axes.viewLim.contains(*point)


@pytest.mark.parametrize(
    ("plain", "fit"),
    [
        ([1, 2, 4], True),
        ([1, 8, 1.02], False),  # both names in one place
        ([1, 8, None], True),
        ([8, 1.02, None], False),  # a name over the other line
        ([None] * 3, False),  # a name without a line
    ],
)
def test_names_stand_at_the_ends_of_lines_where_they_touch_nothing(plain, fit):
    wide = pd.DataFrame({"context_length": [1, 4, 16], "plain": plain, "compiled": [1, 1, 1]})
    chart = lines(wide.melt("context_length", None, "implementation", "p50_ms"), **BY_CONTEXT)
    assert bool(chart.legends) != fit
    names = chart.axes[0].texts
    points = drawn(chart)
    found = {name.get_text(): list(name.xy) for name in names}
    assert found == ({"plain": points[PLAIN][-1], "compiled": points[COMPILED][-1]} if fit else {})
    assert all(chart.bbox.containsx(name.get_window_extent().x1) for name in names)
