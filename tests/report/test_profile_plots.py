import io

import numpy as np
import pandas as pd
import pytest
from matplotlib.patches import Rectangle
from matplotlib.text import Text
from PIL import Image

from cs336_systems.measure.allocations import CATEGORIES
from cs336_systems.measure.kernel_names import CLASSES
from cs336_systems.report.memory_plots import memory_timeline, tradeoff
from cs336_systems.report.profile_plots import PARTS, kernel_timeline, stacked_bars


@pytest.fixture
def shares() -> pd.DataFrame:
    """Kernel rows of two contexts: all classes, and the time doubles."""
    return pd.DataFrame(
        {"model_size": "small", "context_length": context, "range": where, "class": name, "total_ms": time}
        for context in (128, 256)
        for where in ("measure/forward", "measure/backward")
        for name in CLASSES
        for time in [context / 128 * (40 if name == "matrix product" else 1)]
    )


@pytest.fixture
def step() -> tuple[pd.DataFrame, pd.DataFrame]:
    ranges = [("measure", 0, 0, 10), ("forward", 1, 0, 4), ("backward", 1, 4, 10), ("layers.0", 2, 1, 3)]
    kernels = [("matrix product", 7, 2, 5), ("softmax", 7, 5, 5.1), ("communication", 20, 6, 9)]
    return (
        pd.DataFrame(ranges, columns=["name", "depth", "start_ms", "end_ms"]),
        pd.DataFrame(kernels, columns=["class", "stream", "start_ms", "end_ms"]),
    )


@pytest.fixture
def held() -> pd.DataFrame:
    frame = pd.DataFrame(0.0, index=range(6), columns=CATEGORIES).assign(parameters=8.0)
    frame["activations"] = [0, 2, 4, 4, 0, 0]
    frame["temporary"] = [0, 0, 0, 3, 0, 1]
    frame.insert(0, "at_ms", [0.0, 1, 2, 3, 4, 5])
    frame.insert(1, "stage", ["", "forward", "forward", "backward", "backward", "optimizer"])
    return frame


@pytest.fixture
def strategies() -> pd.DataFrame:
    names = ["none", "every 1", "every 2", "every 4", "sqrt_n", "recursive"]
    memory = [34560, 3560, 3360, 4880, 6800, 1480]
    return pd.DataFrame({"case": names, "peak_memory_mib": memory, "p50_ms": [300, 400, 400, 400, 400, 600]})


@pytest.fixture
def every_kind(shares, step, held, strategies):
    return lambda: {
        "shares": stacked_bars(shares, "context_length", share=True, facet="range", title="Shares"),
        "times": stacked_bars(shares, "context_length", title="Times"),
        "kernels": kernel_timeline(*step, title="Kernels"),
        "part": kernel_timeline(*step, depth=1, between_ms=(3, 6), title="A part"),
        "memory": memory_timeline(held, title="Memory"),
        "tradeoff": tradeoff(strategies, title="Trade-off"),
        "empty": stacked_bars(shares.iloc[:0], "context_length", title="Empty"),
    }


def texts(chart) -> list[str]:
    return [text.get_text() for text in chart.findobj(Text) if text.get_text()]


def test_pictures_are_whole_and_repeat(every_kind):
    first, second = every_kind(), every_kind()
    for kind, chart in first.items():
        png = chart.png()
        assert png == second[kind].png(), kind
        assert len(png) < 150_000, kind
        pixels = np.asarray(Image.open(io.BytesIO(png)).convert("L"))
        assert pixels.shape[1] == 1472, kind
        inside = pixels[3:-3, 3:-3]
        assert pixels.sum() - inside.sum() == 255 * (pixels.size - inside.size), f"{kind}: ink at the edge"


def test_every_class_and_category_has_a_colour_of_its_own():
    for family in PARTS.values():
        assert len(set(family.values())) == len(family)
    assert tuple(PARTS["class"]) == CLASSES
    assert tuple(PARTS["category"]) == CATEGORIES


def test_shares_fill_the_bar_and_tell_the_total(shares):
    chart = stacked_bars(shares, "context_length", share=True)
    tops = [patch.get_y() + patch.get_height() for axes in chart.axes for patch in axes.patches]
    assert max(tops) == pytest.approx(100)
    assert {"100 ms", "200 ms", "80"} <= set(texts(chart)), "totals, and matrix products in per cent"


def test_the_legend_names_what_can_be_seen(shares):
    shares.loc[shares["class"] == "softmax", "total_ms"] = 1e-4
    shown = texts(stacked_bars(shares, "context_length", share=True))
    assert "other" in shown
    assert "softmax" not in shown


def test_bars_add_up_ranges_but_no_configurations(shares):
    other = pd.concat([shares, shares.assign(model_size="large")])
    with pytest.raises(
        ValueError, match=r"bar at context_length=128 .* differ in model_size \(small, large\)"
    ):
        stacked_bars(other, "context_length")
    assert stacked_bars(other, "context_length", facet="model_size").axes[1].get_title("left") == "large"


def test_lanes_of_the_timeline(step):
    chart = kernel_timeline(*step)
    lanes = [label.get_text() for label in chart.axes[0].get_yticklabels()]
    assert lanes == ["host: step", "host: stage", "host: block", "stream 7", "stream 20"]
    assert {"measure", "forward", "backward", "layers.0", "softmax", "communication"} <= set(texts(chart))
    part = kernel_timeline(*step, between_ms=(6, 9))
    assert "softmax" not in texts(part)
    assert part.axes[0].get_xlim() == (6, 9)


def test_a_range_has_its_name_wherever_it_fits(step):
    ranges, kernels = step
    narrow = {"softmax": 0.66, "q_proj": 0.25, "output_proj": 0.36, "no_room_at_all": 0.1}
    inside = [(name, 2, 4 + place, 4 + place + width) for place, (name, width) in enumerate(narrow.items())]
    chart = kernel_timeline(pd.concat([ranges, pd.DataFrame(inside, columns=ranges.columns)]), kernels)
    names = {text.get_text().replace("\n", ""): text for text in chart.axes[0].texts}
    assert {"softmax", "q_proj", "output_proj"} <= set(names)
    assert "no_room_at_all" not in names
    per_ms = np.ptp(chart.axes[0].transData.transform([(0, 0), (1, 0)])[:, 0])
    assert all(names[name].get_window_extent().width < narrow[name] * per_ms for name in list(narrow)[:3])


def test_memory_marks_peak_and_stages(held):
    chart = memory_timeline(held)
    assert {"peak 15.0 MiB", "forward", "backward", "optimizer", "memory (MiB)"} <= set(texts(chart))
    assert "gradients" not in texts(chart), "nothing of it is held"
    spans = [patch for patch in chart.axes[0].patches if isinstance(patch, Rectangle)]
    assert [(span.get_x(), span.get_x() + span.get_width()) for span in spans] == [(1, 3), (5, 5)]
    held[list(CATEGORIES)] *= 1024
    assert "peak 15.0 GiB" in texts(memory_timeline(held))


def test_names_of_points_do_not_cover_each_other(strategies):
    chart = tradeoff(strategies)
    chart.draw_without_rendering()
    names = chart.axes[0].texts
    level = [Text.get_window_extent(text) for text in names if text.get_rotation() == 0]
    assert len(level) >= 2
    assert not any(a.overlaps(b) for i, a in enumerate(level) for b in level[:i])
    assert all(
        chart.bbox.contains(*corner) for text in names for corner in text.get_window_extent().corners()
    )


def test_points_on_top_of_each_other_share_their_names(strategies):
    twins = pd.concat([strategies, strategies.assign(case="twin of " + strategies["case"])])
    names = {text.get_text() for text in tradeoff(twins).axes[0].texts}
    first = "recursive"
    assert f"{first}, twin of {first}" in names


def test_one_slow_point_does_not_press_the_others_together(strategies):
    slow = strategies.iloc[:1].assign(case="slow", p50_ms=10 * strategies["p50_ms"].max())
    chart = tradeoff(pd.concat([strategies, slow]))
    chart.draw_without_rendering()
    assert chart.axes[0].get_window_extent().height > 0.4 * chart.bbox.height


def test_missing_columns_are_named(shares, step, held, strategies):
    for draw in (
        lambda: stacked_bars(shares.drop(columns="class"), "context_length"),
        lambda: kernel_timeline(step[0], step[1].drop(columns="class")),
    ):
        with pytest.raises(ValueError, match="the rows have no column class"):
            draw()
    with pytest.raises(ValueError, match="no column stage"):
        memory_timeline(held.drop(columns="stage"))
    with pytest.raises(ValueError, match="no column case"):
        tradeoff(strategies.drop(columns="case"))
