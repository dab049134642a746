"""Timelines: what is drawn when, in which lane and colour."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.collections import PolyCollection
from matplotlib.colors import to_hex
from matplotlib.text import Text

from cs336_systems.report import kernel_timeline, memory_timeline, overlap_timeline
from cs336_systems.report.timelines import CALLS, EXPOSED, HIDDEN, STAGES
from labbook.memory.allocations import CATEGORIES
from labbook.style import GREEN, WINE

SPAN = ["start_ms", "end_ms"]
RANGES = [("measure", 0, 0, 10), ("forward", 1, 0, 4), ("backward", 1, 4, 10), ("layers.0", 2, 1, 3)]
RANGES = pd.DataFrame(RANGES, columns=["name", "depth", *SPAN])
KERNELS = [("attention", 7, 2, 5), ("softmax", 7, 5, 5.1), ("communication", 20, 6, 9)]
KERNELS = pd.DataFrame(KERNELS, columns=["class", "stream", *SPAN])


def texts(chart) -> set[str]:
    return {text.get_text() for text in chart.findobj(Text)}


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


def test_kernels_are_on_their_streams_under_the_host_s_ranges():
    chart = kernel_timeline(RANGES, KERNELS, depth=2)
    assert lanes(chart) == ["host: step", "host: stage", "host: block", "stream 7", "stream 20"]
    assert {"measure", "forward", "backward", "layers.0"} <= texts(chart)
    assert (spans(chart, GREEN), spans(chart, WINE)) == ([(2, 5)], [(6, 9)])
    late = kernel_timeline(RANGES, KERNELS, depth=1, between_ms=(6, 9))
    assert lanes(late) == ["host: step", "host: stage", "stream 20"]
    assert any("cs336_systems run" in text for text in texts(kernel_timeline(RANGES, KERNELS[:0])))


def test_calls_have_a_lane_of_their_own_at_their_true_width():
    calls = [("cudaLaunchKernel", 1, 2), ("cudaDeviceSynchronize", 2, 9), ("cudaMalloc", 3, 3.25)]
    chart = kernel_timeline(RANGES, KERNELS, pd.DataFrame(calls, columns=["name", *SPAN]), depth=1)
    assert lanes(chart) == ["host: step", "host: stage", "CUDA API", "stream 7", "stream 20"]
    assert spans(chart, CALLS["launch"]) == [(1, 2), (2, 5)]  # attention's kernel is green, too
    assert spans(chart, CALLS["other call"]) == [(3, 3.25)]


def test_communication_is_red_where_nothing_is_computed():
    """Naive: 2 ms of communication after backward. Overlapped: 1 ms inside it, 1 ms after it."""
    steps = [(name, "compute", stage, *times) for name in ("naive", "overlapped")
             for stage, times in (("forward", (0, 4)), ("backward", (4, 10)))]  # fmt: skip
    steps += [("naive", "communication", "communication", 10, 12)]
    steps += [("overlapped", "communication", "backward", 9, 11)]
    steps = pd.DataFrame(steps, columns=["wrapper", "lane", "range", *SPAN])
    chart = overlap_timeline(steps, "wrapper")
    assert lanes(chart) == ["naive", "overlapped"]
    assert spans(chart, EXPOSED) == [(10, 12), (10, 11)]
    assert spans(chart, HIDDEN) == [(10, 12), (9, 11)]  # under the red
    assert spans(chart, STAGES["backward"]) == [(4, 10), (4, 10)]


@pytest.mark.parametrize(("times", "unit"), [(1, "MiB"), (1024, "GiB")])
def test_memory_marks_peak_and_stages(times, unit):
    held = pd.DataFrame(0.0, index=range(6), columns=CATEGORIES).assign(parameters=8.0)
    held["activations"], held["temporary"] = [0, 2, 4, 4, 0, 0], [0, 0, 0, 3, 0, 1]
    stages = [None, "forward", "forward", "backward", "backward", "optimizer"]
    chart = memory_timeline((held * times).assign(at_ms=np.arange(6.0), stage=stages))
    assert {f"peak 15.0 {unit}", "forward", "backward", "optimizer", f"memory ({unit})"} <= texts(chart)
    assert f"below the axis: parameters 8.00 {unit}" in " ".join(texts(chart))
