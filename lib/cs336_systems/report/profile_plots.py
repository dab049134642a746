"""Plots of a profile: what the time (or the memory) went to, and one step on its lanes."""

from collections.abc import Hashable, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from cs336_systems.measure.allocations import CATEGORIES
from cs336_systems.measure.kernel_names import CLASSES
from cs336_systems.report.figure import (
    NO_ROWS,
    Chart,
    finish,
    outer_labels,
    panels_of,
    placeholder,
    sheet,
)
from cs336_systems.report.frames import key_columns, require_columns
from cs336_systems.report.style import (
    BLUE,
    GREEN,
    GREY,
    INK,
    ORANGE,
    PAPER,
    PURPLE,
    SKY,
    STYLE,
    VERMILLION,
    ZONE,
    readable_on,
)
from cs336_systems.report.ticks import plain_numbers
from cs336_systems.report.words import MISSING, column_label, ordered, significant, value_label

YELLOW, BROWN, WINE = "#F0E442", "#8C6D1F", "#7A1F5C"
PARTS: dict[str, dict[str, str]] = {
    "class": dict(
        zip(
            CLASSES,
            (BLUE, GREEN, VERMILLION, PURPLE, SKY, ORANGE, YELLOW, BROWN, INK, WINE, GREY),
            strict=True,
        )
    ),
    "category": dict(zip(CATEGORIES, (BLUE, ORANGE, SKY, GREEN, VERMILLION, GREY), strict=True)),
}
# Columns along which the rows of one bar may differ: they are what a bar adds up.
_ADDED = {"range", "kernel", "class", "category", "code", "grid", "stream", "step", "tensor"}
_VISIBLE = 1e-3  # of a bar: what is never more needs no place in the legend
_LEVELS = ("step", "stage", "block", "module", "inside", "part")


@mpl.rc_context(STYLE)
def stacked_bars(
    frame: pd.DataFrame,
    x: str,
    y: str = "total_ms",
    part: str = "class",
    *,
    share: bool = False,
    facet: str | None = None,
    title: str | None = None,
    subtitle: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    empty: str = NO_ROWS,
) -> Chart:
    """A bar for each x, stacked of its parts; with `share` every bar is 100 % and its total stands above it.

    Args:
        frame: rows; those of one bar are added up over ranges, kernels and the like.
        part: "class" (of kernels) or "category" (of memory): what a segment is, and its colour.

    Raises:
        ValueError: a column is missing, or rows of one bar differ in more than a bar adds up.
    """
    if frame.empty:
        return placeholder(title, empty)
    require_columns(frame, x, y, part, facet)
    _require_one_configuration(frame, x, part, facet)
    groups, panels = ordered(frame[x], x), panels_of(frame, facet)
    used = [name for name in PARTS[part] if name in set(frame[part])]
    seen: set[str] = set()
    chart, all_axes = sheet(list(panels), facet)
    for axes, rows in zip(all_axes, panels.values(), strict=True):
        table = rows.pivot_table(index=x, columns=part, values=y, aggfunc="sum").reindex(groups)
        table = table.reindex(columns=used).fillna(0.0)
        totals = table.sum(axis=1)
        heights = table.div(totals.where(totals > 0), axis=0).mul(100).fillna(0.0) if share else table
        bottom = np.zeros(len(groups))
        for name in used:
            axes.bar(
                range(len(groups)), heights[name], 0.74, bottom, color=PARTS[part][name], edgecolor=PAPER,
                linewidth=0.8, zorder=2,
            )  # fmt: skip
            _label_segments(axes, heights[name], bottom, heights.sum(axis=1).max(), PARTS[part][name], share)
            bottom += heights[name].to_numpy()
            if (table[name] > _VISIBLE * totals).any():
                seen.add(name)
        for place, (top, total) in enumerate(zip(bottom, totals, strict=True)):
            text = _total(total, y) if total else MISSING
            axes.annotate(
                text, (place, top), (0, 4), textcoords="offset points", ha="center", size=8.5, color=INK
            )
        axes.set_xticks(range(len(groups)), [value_label(group, x) for group in groups])
        axes.tick_params(axis="x", length=0)
        plain_numbers(axes.yaxis)
    if share:
        all_axes[0].set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
    all_axes[0].set_ylim(
        0, 1.1 * max(patch.get_y() + patch.get_height() for a in all_axes for patch in a.patches)
    )
    outer_labels(
        all_axes,
        xlabel or column_label(x),
        ylabel or (("share of time" if y.endswith("_ms") else "share") if share else column_label(y)),
    )
    return finish(chart, title, [part_legend([name for name in used if name in seen], part)], subtitle)


def _require_one_configuration(frame: pd.DataFrame, x: str, part: str, facet: str | None) -> None:
    by = [column for column in (x, facet) if column]
    others = [column for column in key_columns(frame) if column not in {*by, part} | _ADDED]
    for place, rows in frame.groupby(by, dropna=False):
        varying = [column for column in others if rows[column].nunique(dropna=False) > 1]
        if varying:
            where = ", ".join(f"{column}={value}" for column, value in zip(by, place, strict=True))
            values = "; ".join(
                f"{column} ({', '.join(map(str, rows[column].unique()[:4]))})" for column in varying
            )
            raise ValueError(
                f"the bar at {where} would add up rows that differ in {values}; keep one of each"
            )


def _label_segments(
    axes: Axes, heights: pd.Series, bottom: np.ndarray, highest: float, color: str, share: bool
) -> None:
    """The share of a segment, where there is room for it."""
    for place, (height, low) in enumerate(zip(heights, bottom, strict=True)):
        if share and height >= 0.055 * highest:
            axes.text(
                place, low + height / 2, f"{height:.0f}", ha="center", va="center", size=8,
                color=readable_on(color),
            )  # fmt: skip


def _total(value: float, column: str) -> str:
    """A bar's total with its unit; from a second on in seconds, which leaves room for the bar beside it."""
    if column.endswith("_ms") and value >= 1000:
        return f"{significant(value / 1000)} s"
    return significant(value) + column_label(column).partition(" (")[2].rstrip(")").join((" ", ""))


def part_legend(names: Sequence[Hashable], part: str) -> list[Patch]:
    """A patch for each class or category."""
    return [Patch(color=PARTS[part][name], label=name) for name in names]


@mpl.rc_context(STYLE)
def kernel_timeline(
    ranges: pd.DataFrame,
    kernels: pd.DataFrame,
    *,
    depth: int = 3,
    between_ms: tuple[float, float] | None = None,
    title: str | None = None,
    subtitle: str | None = None,
    empty: str = NO_ROWS,
) -> Chart:
    """One step: a lane for each level of host ranges and for each GPU stream, kernels coloured by class.

    Args:
        ranges, kernels: of `measure.kernels.one_step`.
        depth: the deepest level of ranges to show; 1 is forward, backward, optimizer.
        between_ms: look at this part of the step only.

    Raises:
        ValueError: a column is missing.
    """
    if kernels.empty:
        return placeholder(title, empty)
    require_columns(ranges, "name", "depth", "start_ms", "end_ms")
    require_columns(kernels, "class", "stream", "start_ms", "end_ms")
    start, end = between_ms or (0.0, max(ranges.end_ms.max(), kernels.end_ms.max()))
    ranges, kernels = (frame[(frame.end_ms > start) & (frame.start_ms < end)] for frame in (ranges, kernels))
    levels = range(min(depth, int(ranges.depth.max())) + 1 if len(ranges) else 0)
    streams = sorted(set(kernels.stream))
    chart, (axes,) = sheet([None], None, height=0.56 * (len(levels) + len(streams)) + 0.9)
    axes.set(xlim=(start, end), ylim=(len(levels) + len(streams) - 0.4, -0.6))
    for level in levels:
        _draw_level(axes, level, ranges[ranges.depth == level])
    for lane, stream in enumerate(streams, start=len(levels)):
        axes.axhspan(lane - 0.42, lane + 0.42, color=ZONE, linewidth=0, zorder=0.5)
        for name, rows in kernels[kernels.stream == stream].groupby("class"):
            spans = list(zip(rows.start_ms, rows.end_ms - rows.start_ms, strict=True))
            axes.broken_barh(spans, (lane - 0.42, 0.84), color=PARTS["class"][name], linewidth=0, zorder=2)
    names = [f"host: {_LEVELS[min(level, len(_LEVELS) - 1)]}" for level in levels]
    axes.set_yticks(range(len(levels) + len(streams)), names + [f"stream {stream}" for stream in streams])
    axes.grid(False)
    axes.set_xlabel("time since the step began (ms)")
    plain_numbers(axes.xaxis)
    used = [name for name in CLASSES if name in set(kernels["class"])]
    finish(chart, title, [part_legend(used, "class")], subtitle)
    for level in levels:  # only now it is known how much room there is
        _name_ranges(axes, level, ranges[ranges.depth == level])
    return chart


def _draw_level(axes: Axes, level: int, rows: pd.DataFrame) -> None:
    """The ranges of one level, in two alternating greys."""
    shades = ("#D5DAE1", "#BFC6D0")
    for number, (start, end) in enumerate(rows[["start_ms", "end_ms"]].itertuples(index=False)):
        axes.broken_barh([(start, end - start)], (level - 0.42, 0.84), color=shades[number % 2], linewidth=0)


def _name_ranges(axes: Axes, level: int, rows: pd.DataFrame) -> None:
    """The name of each range of one level, the first way that fits its box: across, smaller, upright."""
    first, last = axes.get_xlim()
    for name, start, end in rows[["name", "start_ms", "end_ms"]].itertuples(index=False):
        low, high = max(start, first), min(end, last)
        corners = axes.transData.transform([(low, level + 0.42), (high, level - 0.42)])
        width, height = np.ptp(corners, axis=0)
        upright = name.replace("_", "_\n")  # on two lines
        for text, size, rotation in ((name, 8, 0), (name, 7, 0), (name, 7, 90), (upright, 7, 90)):
            written = axes.text((low + high) / 2, level, text, ha="center", va="center", color=INK)
            written.set(size=size, rotation=rotation)
            room = written.get_window_extent()
            if room.width < width and room.height < height:
                break
            written.remove()
