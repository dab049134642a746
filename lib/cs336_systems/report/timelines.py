"""Timelines, drawn by hand: a profiled step on its lanes, steps of wrappers, memory held over time.

Each takes title, subtitle, xlabel, and ylabel too, see `figure.plot`.
"""

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from cs336_systems.measure.overlap import LANES, covered, exposed
from labbook.figure import Drawing, plain_numbers, plot, sheet
from labbook.labels import ordered, significant, value_label
from labbook.memory.allocations import CATEGORIES
from labbook.style import (
    GREEN,
    GREY,
    INK,
    MUTED,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    VERMILLION,
    ZONE,
    palette,
)

_LEVELS = ("step", "stage", "block", "module", "inside", "part")
# Copies to and from one long tensor are launched while the model communicates.
STAGES = {"forward": SKY, "backward": ORANGE, "communication": PURPLE, "optimizer": GREY}
CALLS = {"launch": GREEN, "wait": VERMILLION, "other call": PURPLE}
HIDDEN, EXPOSED = GREEN, VERMILLION
_SINCE_STEP = "time since the step began (ms)"
_THINNEST = 0.6  # points: a message of microseconds shows in a step of half a second


def _spans(axes: Axes, spans: pd.DataFrame, low: float, height: float, color: str, edge: float = 0) -> None:
    pairs = list(zip(spans["start_ms"], spans["end_ms"] - spans["start_ms"], strict=True))
    axes.broken_barh(pairs, (low, height), facecolor=color, edgecolor=color, linewidth=edge, zorder=2)


def _legend(colors: dict[str, str]) -> list[Patch]:
    return [Patch(color=color, label=value_label(name)) for name, color in colors.items()]


def call_kind(name: str) -> str:
    """What a call of the CUDA API does: "launch", "wait" or "other call"."""
    return "launch" if "Launch" in name else "wait" if "Synchronize" in name else "other call"


@plot
def kernel_timeline(
    ranges: pd.DataFrame,
    kernels: pd.DataFrame,
    calls: pd.DataFrame | None = None,
    *,
    depth: int = 3,
    between_ms: tuple[float, float] | None = None,
) -> Drawing | None:
    """One step: a lane for each level of host ranges, for the CUDA API and for each GPU stream.

    Args:
        ranges, kernels: of `labbook.profiles.one_step`. calls: of `labbook.profiles.step_calls`.
        depth: the deepest level of ranges to show; 1 is forward, backward, optimizer.
        between_ms: look at this part of the step only.
    """
    if kernels.empty:
        return None
    start, end = between_ms or (0.0, max(ranges["end_ms"].max(), kernels["end_ms"].max()))
    ranges, kernels = (f[(f["end_ms"] > start) & (f["start_ms"] < end)] for f in (ranges, kernels))
    levels = range(min(depth, int(ranges["depth"].max())) + 1 if len(ranges) else 0)
    colors = palette(kernels["class"], "class")
    below = {f"stream {stream}": rows for stream, rows in kernels.groupby("stream")}
    if calls is not None:
        calls = calls[(calls["end_ms"] > start) & (calls["start_ms"] < end)]
        calls = calls.assign(**{"class": calls["name"].map(call_kind)})
        below, colors = {"CUDA API": calls} | below, colors | CALLS
    chart, ((axes, _),) = sheet(height=0.56 * (len(levels) + len(below)) + 0.9)
    axes.set(xlim=(start, end), ylim=(len(levels) + len(below) - 0.4, -0.6))
    for level in levels:
        _draw_ranges(axes, level, ranges[ranges["depth"] == level])
    for lane, spans in enumerate(below.values(), start=len(levels)):
        axes.axhspan(lane - 0.42, lane + 0.42, color=ZONE, linewidth=0, zorder=0.5)
        for name, rows in spans.groupby("class"):
            _spans(axes, rows, lane - 0.42, 0.84, colors[name])
    names = [f"host: {_LEVELS[min(level, len(_LEVELS) - 1)]}" for level in levels]
    axes.set_yticks(range(len(levels) + len(below)), [*names, *below])
    axes.grid(False)
    plain_numbers(axes.xaxis)
    chart.draw_without_rendering()
    for level in levels:  # only now it is known how much room there is
        _name_ranges(axes, level, ranges[ranges["depth"] == level])
    return Drawing(chart, _legend(colors), _SINCE_STEP)


def _draw_ranges(axes: Axes, level: int, rows: pd.DataFrame) -> None:
    for first, shade in enumerate(("#D5DAE1", "#BFC6D0")):  # neighbours in two greys
        _spans(axes, rows.iloc[first::2], level - 0.42, 0.84, shade)


def _name_ranges(axes: Axes, level: int, rows: pd.DataFrame) -> None:
    """The name of each range of one level, the first way that fits its box: across, smaller, upright."""
    first, last = axes.get_xlim()
    for name, start, end in rows[["name", "start_ms", "end_ms"]].itertuples(index=False):
        low, high = max(start, first), min(end, last)
        corners = axes.transData.transform([(low, level + 0.42), (high, level - 0.42)])
        width, height = np.ptp(corners, axis=0)
        upright = name.replace("_", "_\n")  # on two lines
        for text, size, rotation in ((name, 8, 0), (name, 7, 0), (name, 7, 90), (upright, 7, 90)):
            written = axes.text((low + high) / 2, level, text, ha="center", va="center", size=size)
            written.set(rotation=rotation, zorder=3)
            room = written.get_window_extent()
            if room.width < width and room.height < height:
                break
            written.remove()


@plot
def overlap_timeline(
    frame: pd.DataFrame, by: str, *, between_ms: tuple[float, float] | None = None
) -> Drawing:
    """One step for each value of `by`: computing above, coloured by stage, communication below it.

    Communication is green while something is computed too, and red where it is exposed. No span is drawn
    thinner than can be seen.

    Args:
        frame: spans with lane, range, start_ms and end_ms, as in `measure.overlap.step_lanes`.
        by: column that tells the steps apart.
        between_ms: look at this part of the steps only.
    """
    start, end = between_ms or (0.0, frame["end_ms"].max())
    frame = frame[(frame["end_ms"] > start) & (frame["start_ms"] < end)]
    places = ordered(frame[by], by)
    chart, ((axes, _),) = sheet(height=0.72 * max(len(places), 1.5) + 0.75)
    axes.set(xlim=(start, end), ylim=(len(places) - 0.45, -0.5))
    for place, value in enumerate(places):
        _draw_step(axes, place, frame[frame[by] == value])
    axes.set_yticks(range(len(places)), [value_label(value, by) for value in places])
    axes.grid(False)
    plain_numbers(axes.xaxis)
    computed = frame[frame["lane"] == LANES[0]]
    times = (computed["end_ms"] - computed["start_ms"]).groupby(computed["range"]).sum()
    seen = times[times > 1e-3 * (end - start)].index
    legend = {stage.replace("communication", "copies"): STAGES[stage] for stage in STAGES if stage in seen}
    legend |= {"communication, hidden": HIDDEN, "communication, exposed": EXPOSED}
    return Drawing(chart, _legend(legend), _SINCE_STEP)


def _draw_step(axes: Axes, place: int, lanes: pd.DataFrame) -> None:
    """Two bars that touch: the eye compares what is above with what is below."""
    axes.axhspan(place - 0.36, place + 0.36, color=ZONE, linewidth=0, zorder=0.5)
    for stage, color in STAGES.items():
        computed = lanes[(lanes["lane"] == "compute") & (lanes["range"] == stage)]
        _spans(axes, computed, place - 0.36, 0.36, color)
    _spans(axes, covered(lanes[lanes["lane"] == "communication"]), place, 0.36, HIDDEN, _THINNEST)
    _spans(axes, exposed(lanes), place, 0.36, EXPOSED, _THINNEST)
    axes.axhline(place, color=INK, linewidth=0.6, zorder=3)


@plot
def memory_timeline(held: pd.DataFrame) -> Drawing:
    """Memory held from allocation to allocation, stacked by category; stages shaded, the peak marked.

    What stays the same through the step lies below the axis, where its names and sizes are written.

    Args:
        held: of `labbook.memory.timeline`: stage, and MiB a category.
    """
    parts = held[[name for name in CATEGORIES if held[name].max() > 0]].reset_index(drop=True)
    gib = parts.sum(axis=1).max() >= 4096
    parts, unit = (parts / 1024, "GiB") if gib else (parts, "MiB")
    colors, top = palette(parts.columns, "category"), parts.sum(axis=1)
    lasting = [name for name in parts if parts[name].max() - parts[name].min() < 1e-3 * top.max()]
    parts = parts[[*lasting, *parts.columns.difference(lasting, sort=False)]]
    base = parts[lasting].min().sum()
    chart, ((axes, _),) = sheet(height=4.2)
    shades = [colors[name] for name in parts]
    axes.stackplot(parts.index, parts.T.to_numpy(), colors=shades, step="post", lw=0, zorder=2)
    axes.set(xlim=(0, len(parts) - 1), ylim=(base, base + 1.17 * (top.max() - base)), xticks=[])
    _shade_stages(axes, held["stage"].fillna("").reset_index(drop=True))
    peak = top.idxmax()
    axes.plot(peak, top[peak], "o", color=INK, markersize=5, zorder=4)
    ha, away = ("right", -8) if peak > 0.7 * len(parts) else ("left", 8)
    axes.annotate(
        f"peak {significant(top[peak])} {unit}", (peak, top[peak]), (away, 3),
        textcoords="offset points", ha=ha, weight="bold", size=9.5, color=INK,
        zorder=5, path_effects=[withStroke(linewidth=3, foreground=PAPER)],
    )  # fmt: skip
    plain_numbers(axes.yaxis)
    below = ", ".join(f"{name} {significant(parts[name].max())} {unit}" for name in lasting)
    xlabel = "allocations and frees, in order" + f"; below the axis: {below}" * bool(below)
    legend = _legend({name: colors[name] for name in parts if name not in lasting})
    return Drawing(chart, legend, xlabel, f"memory ({unit})")


def _shade_stages(axes: Axes, stages: pd.Series) -> None:
    """Every other stage on a grey ground, its name at the top."""
    begins = stages.index[stages != stages.shift()]
    spans = zip(stages[begins], begins, [*begins[1:], len(stages) - 1], strict=True)
    for shown, (name, start, end) in enumerate(span for span in spans if span[0]):
        if shown % 2 == 0:
            axes.axvspan(start, end, color=ZONE, linewidth=0, zorder=0.5)
        axes.annotate(
            name, ((start + end) / 2, 1), (0, -5), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="top", size=9, color=MUTED, annotation_clip=False,
        )  # fmt: skip
