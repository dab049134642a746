"""Timelines: what is drawn where, in which colour, and what is named."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from cs336_systems.measure.allocations import CATEGORIES
from cs336_systems.report import kernel_timeline, memory_timeline, nsys_timeline, overlap_timeline
from cs336_systems.report.timelines import CALLS, EXPOSED, HIDDEN, STAGES
from labbook.style import GREEN, WINE


@pytest.fixture
def step() -> tuple[pd.DataFrame, pd.DataFrame]:
    ranges = [("measure", 0, 0, 10), ("forward", 1, 0, 4), ("backward", 1, 4, 10), ("layers.0", 2, 1, 3)]
    kernels = [("attention", 7, 2, 5), ("softmax", 7, 5, 5.1), ("communication", 20, 6, 9)]
    return (
        pd.DataFrame(ranges, columns=["name", "depth", "start_ms", "end_ms"]),
        pd.DataFrame(kernels, columns=["class", "stream", "start_ms", "end_ms"]),
    )


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


@pytest.fixture
def held() -> pd.DataFrame:
    frame = pd.DataFrame(0.0, index=range(6), columns=CATEGORIES).assign(parameters=8.0)
    frame["activations"] = [0, 2, 4, 4, 0, 0]
    frame["temporary"] = [0, 0, 0, 3, 0, 1]
    frame.insert(0, "at_ms", [0.0, 1, 2, 3, 4, 5])
    frame.insert(1, "stage", [None, "forward", "forward", "backward", "backward", "optimizer"])
    return frame


def texts(chart) -> list[str]:
    return [text.get_text() for text in chart.findobj(Text) if text.get_text()]


def legend(chart) -> list[str]:
    return [text.get_text() for each in chart.legends for text in each.get_texts()]


def lanes(chart) -> list[str]:
    return [label.get_text() for label in chart.axes[0].get_yticklabels()]


def spans(chart, color) -> list[tuple[float, float]]:
    """Start and end of every bar of one colour, in drawing order."""
    return [
        (round(path.get_extents().x0, 6), round(path.get_extents().x1, 6))
        for bars in chart.axes[0].findobj(PolyCollection)
        if len(bars.get_facecolor()) and to_hex(bars.get_facecolor()[0]) == color.lower()
        for path in bars.get_paths()
    ]


def test_kernels_are_on_their_streams_under_the_host_s_ranges(step):
    chart = kernel_timeline(*step, depth=2, title="A step")
    assert lanes(chart) == ["host: step", "host: stage", "host: block", "stream 7", "stream 20"]
    assert {"A step", "measure", "forward", "backward", "layers.0"} <= set(texts(chart))
    assert legend(chart) == ["attention", "softmax", "communication"]
    assert spans(chart, GREEN) == [(2, 5)]
    assert spans(chart, WINE) == [(6, 9)]
    late = kernel_timeline(*step, depth=1, between_ms=(6, 9))
    assert lanes(late) == ["host: step", "host: stage", "stream 20"]
    assert legend(late) == ["communication"]
    assert late.axes[0].get_xlim() == (6, 9)


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


@pytest.fixture
def seen() -> pd.DataFrame:
    """The host has launched everything after 6 ms, and waits until the GPU is done."""
    rows = [
        ("NVTX", "measure", 0, 0, 10),
        ("NVTX", "forward", 1, 0, 2),
        ("NVTX", "backward", 1, 2, 6),
        ("CUDA API", "launch", None, 0, 2),
        ("CUDA API", "launch", None, 2.5, 6),
        ("CUDA API", "wait", None, 6, 10),
        ("kernels", "forward", None, 0.1, 4),
        ("kernels", "backward", None, 4, 10),
    ]
    return pd.DataFrame(rows, columns=["lane", "event", "depth", "start_ms", "end_ms"])


def test_the_host_runs_ahead_on_one_axis(seen):
    chart = nsys_timeline(seen, title="A step")
    assert lanes(chart) == ["NVTX", "", "CUDA API", "kernels"]
    assert {"A step", "measure", "forward", "backward"} <= set(texts(chart))
    assert legend(chart) == ["launch", "wait", "forward", "backward"]
    assert spans(chart, CALLS["launch"]) == [(0, 2), (2.5, 6)]
    assert spans(chart, CALLS["wait"]) == [(6, 10)]
    assert spans(chart, STAGES["forward"]) == [(0.1, 4)]
    late = nsys_timeline(seen, between_ms=(5, 9))
    assert legend(late) == ["launch", "wait", "backward"]
    assert late.axes[0].get_xlim() == (5, 9)
    assert "forward" not in texts(nsys_timeline(seen[:0])), "without rows it says what to run"


def test_communication_is_red_where_nothing_is_computed(steps):
    chart = overlap_timeline(steps, "wrapper", title="Steps")
    assert lanes(chart) == ["naive", "overlapped"]
    assert spans(chart, EXPOSED) == [(10, 12), (10, 11)]
    assert spans(chart, HIDDEN) == [(10, 12), (9, 11)]  # under the red
    assert spans(chart, STAGES["backward"]) == [(4, 10), (4, 10)]
    names = ["forward", "backward", "communication, hidden", "communication, exposed"]
    assert legend(chart) == names
    late = overlap_timeline(steps, "wrapper", between_ms=(9, 12))
    assert legend(late) == names[1:]
    assert late.axes[0].get_xlim() == (9, 12)


def test_memory_marks_peak_and_stages(held):
    chart = memory_timeline(held)
    assert {"peak 15.0 MiB", "forward", "backward", "optimizer", "memory (MiB)"} <= set(texts(chart))
    assert legend(chart) == ["parameters", "activations", "temporary"]
    shaded = [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in chart.axes[0].patches]
    assert shaded == [(1, 3), (5, 5)]
    held[list(CATEGORIES)] *= 1024
    assert {"peak 15.0 GiB", "memory (GiB)"} <= set(texts(memory_timeline(held)))


def test_without_kernels_a_placeholder(step):
    assert any("cs336_systems run" in text for text in texts(kernel_timeline(step[0], step[1][:0])))
