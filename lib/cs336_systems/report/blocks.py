"""Plots of blocks: grouped bars, and a grid of cells coloured by their value."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import LinearSegmentedColormap, LogNorm, Normalize
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke

from cs336_systems.report.figure import (
    NO_ROWS,
    Chart,
    finish,
    outer_labels,
    panels_of,
    placeholder,
    sheet,
)
from cs336_systems.report.frames import drawable, require_columns
from cs336_systems.report.series import Series, bar_look, hue_legend, machine_legend, series_of
from cs336_systems.report.style import (
    BLUE,
    HATCH,
    INK,
    MUTED,
    PAPER,
    STYLE,
    VERMILLION,
    ZONE,
    readable_on,
    text_color,
)
from cs336_systems.report.ticks import plain_log, plain_numbers
from cs336_systems.report.words import (
    MISSING,
    STATUS_WORDS,
    column_label,
    ordered,
    significant,
    value_label,
)

_GROUP_WIDTH = 0.84  # of the distance between two groups
_BAR_WIDTH = 0.88  # of the place each bar has
_PALE = LinearSegmentedColormap.from_list("pale", ["#F2F7FB", "#A9CFE8", "#4C9BCB", BLUE, "#08395C"])
_PARTED = LinearSegmentedColormap.from_list(
    "parted", ["#7A2E00", VERMILLION, "#F2B48A", "#F4F4F2", "#A9CFE8", BLUE, "#08395C"]
)
_MOST_APART = 8  # a value this many times the middle, or a part of it this small, has the darkest colour


@mpl.rc_context(STYLE)
def grouped_bars(
    frame: pd.DataFrame,
    x: str,
    y: str = "mean_ms",
    hue: str | None = None,
    *,
    error: str | None = None,
    facet: str | None = None,
    title: str | None = None,
    subtitle: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    logy: bool = False,
    empty: str = NO_ROWS,
) -> Chart:
    """A group of bars for each x, a bar for each value of `hue` and machine, its value above it.

    Args:
        frame: rows, at most one for each x, hue, facet and machine.
        error: column with half the length of the error bars (a standard deviation).

    Raises:
        ValueError: a column is missing, or two rows belong in one place; the message names their difference.
    """
    if frame.empty:
        return placeholder(title, empty)
    require_columns(frame, error)
    frame = drawable(frame, x, y, hue, facet)
    by_value, series, groups = panels_of(frame, facet), series_of(frame, hue), ordered(frame[x], x)
    bars = {
        (value, group): [
            one for each in series if len((one := each.within(facet, value).within(x, group)).rows)
        ]
        for value in by_value
        for group in groups
    }
    width = _GROUP_WIDTH / max(map(len, bars.values()))  # as wide as the fullest group allows
    chart, panels = sheet(list(by_value), facet)
    for axes, value in zip(panels, by_value, strict=True):
        axes.set_xticks(range(len(groups)), [value_label(group, x) for group in groups])
        axes.set_xlim(-0.55, len(groups) - 0.45)
        axes.tick_params(axis="x", length=0)
        plain_log(axes, frame[y].dropna()) if logy else plain_numbers(axes.yaxis)
        for place, group in enumerate(groups):
            for index, one in enumerate(present := bars[value, group]):
                shift = (index - (len(present) - 1) / 2) * width
                _draw_bar(axes, place + shift, _BAR_WIDTH * width, one, y, error)
    outer_labels(panels, xlabel or column_label(x), ylabel or column_label(y))
    chart.draw_without_rendering()
    _fold_names(panels)
    _label_bars(panels, width, logy)
    machines = [] if facet == "where" else machine_legend(series, bars=True)
    return finish(chart, title, [hue_legend(series, bars=True), machines], subtitle)


def _draw_bar(axes: Axes, place: float, width: float, one: Series, y: str, error: str | None) -> None:
    """One bar with its error and its value, or the word for why there is none."""
    row = one.rows.iloc[0]
    value = row[y]
    if pd.isna(value):
        word = STATUS_WORDS.get(row.get("status"), MISSING)
        _write(axes, place, None, word, text_color(one.color), weight="bold")
        return
    axes.bar(place, value, width, zorder=2, **bar_look(one.color, one.look))
    half = 0 if error is None or pd.isna(row[error]) else row[error]
    if half:
        ends = [[min(half, value)], [half]]
        axes.errorbar(place, value, ends, fmt="none", ecolor=INK, elinewidth=1, zorder=3)
    _write(axes, place, value + half, significant(value), INK)


def _write(
    axes: Axes, place: float, top: float | None, text: str, color: str, weight: str = "normal"
) -> None:
    """A label above a bar, or where there is no bar on the ground of the panel."""
    ground = {"xycoords": ("data", "axes fraction")} if top is None else {}
    axes.annotate(
        text, (place, 0 if top is None else top), (0, 4), textcoords="offset points", color=color,
        weight=weight, size=8.5, ha="center", va="bottom", annotation_clip=False, zorder=4,
        path_effects=[withStroke(linewidth=1.8, foreground=PAPER)], **ground,
    )  # fmt: skip


def _fold_names(panels: Sequence[Axes]) -> None:
    """Put the edition of a model on a second line where the names would run into each other."""
    axes = panels[0]
    room = axes.bbox.width / np.ptp(axes.get_xlim())
    names = axes.get_xticklabels()
    if max(name.get_window_extent().width for name in names) > room:
        for axes in panels:
            axes.set_xticks(axes.get_xticks(), [name.get_text().replace(" (", "\n(") for name in names])


def _label_bars(panels: Sequence[Axes], width: float, logy: bool) -> None:
    """Turn the labels upright where they are wider than their bars, and make room above the highest."""
    labels = [text for axes in panels for text in axes.texts]
    axes = panels[0]
    bar = width * axes.bbox.width / np.ptp(axes.get_xlim())
    longest = max((text.get_window_extent().width for text in labels), default=0)
    upright = longest > bar
    for text in labels:
        text.set(rotation=90 if upright else 0, size=7.5 if upright else text.get_size())
    room = (longest if upright else 20) / axes.bbox.height + 0.02
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top * (top / bottom) ** room if logy else bottom + (top - bottom) * (1 + room))


@mpl.rc_context(STYLE)
def heatmap(
    frame: pd.DataFrame,
    index: str,
    columns: str,
    values: str = "p50_ms",
    *,
    status: str = "status",
    fmt: str | None = None,
    middle: float | None = None,
    facet: str | None = None,
    title: str | None = None,
    subtitle: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    empty: str = NO_ROWS,
) -> Chart:
    """A grid of cells with their value written in; a cell that ran out of memory is hatched and says OOM.

    Args:
        frame: rows, at most one for each index, column and facet.
        status: column that says why a cell has no value.
        fmt: format of a value, "{:.1f}"; three significant digits without it.
        middle: the value that parts two colours, as 1 does for a ratio; without it one colour grows darker.

    Raises:
        ValueError: a column is missing, or two rows belong in one cell; the message names their difference.
    """
    if frame.empty:
        return placeholder(title, empty)
    frame = drawable(frame, columns, values, index, facet)
    down, across = ordered(frame[index], index), ordered(frame[columns], columns)
    by_value = panels_of(frame, facet)
    chart, axes = sheet(list(by_value), facet, height=0.46 * len(down) + 0.75)
    color = _colors(frame[values].dropna(), middle)
    for each, rows in zip(axes, by_value.values(), strict=True):
        _frame_cells(each, [value_label(v, index) for v in down], [value_label(v, columns) for v in across])
        cells = rows.set_index([index, columns])
        for i, j in np.ndindex(len(down), len(across)):
            row = cells.loc[(down[i], across[j])] if (down[i], across[j]) in cells.index else None
            _draw_cell(each, j, i, row, values, status, fmt, color)
    outer_labels(axes, xlabel or column_label(columns), ylabel or column_label(index))
    chart.draw_without_rendering()
    _fit_cells(axes, len(across))
    return finish(chart, title, subtitle=subtitle or column_label(values))


def _fit_cells(panels: Sequence[Axes], across: int) -> None:
    """Shrink the text of all cells until the widest fits into its cell."""
    labels = [text for axes in panels for text in axes.texts]
    widest = max(text.get_window_extent().width for text in labels)
    size = labels[0].get_size() * min(1, 0.8 * panels[0].bbox.width / across / widest)
    for text in labels:
        text.set_size(size)


def _colors(values: pd.Series, middle: float | None) -> ScalarMappable:
    """Colour by the logarithm: a step in colour is a factor in value."""
    if middle is not None:
        return ScalarMappable(LogNorm(middle / _MOST_APART, middle * _MOST_APART, clip=True), _PARTED)
    if values.empty or values.min() <= 0:
        norm = Normalize(values.min() if len(values) else 0, values.max() if len(values) else 1)
    else:
        norm = LogNorm(values.min(), max(values.max(), values.min() * 1.01))
    return ScalarMappable(norm, _PALE)


def _frame_cells(axes: Axes, down: list[str], across: list[str]) -> None:
    axes.set(xlim=(-0.5, len(across) - 0.5), ylim=(len(down) - 0.5, -0.5))
    axes.set_xticks(range(len(across)), across)
    axes.set_yticks(range(len(down)), down)
    axes.tick_params(length=0)
    axes.grid(False)
    axes.spines[:].set_visible(False)


def _draw_cell(
    axes: Axes, x: int, y: int, row: pd.Series | None, values: str, status: str, fmt: str | None, colors
) -> None:
    value = np.nan if row is None else row[values]
    measured = not pd.isna(value)
    face = colors.to_rgba(value) if measured else ZONE
    why = "" if row is None or measured else row.get(status, "ok")
    hatch = "////" if why == "oom" else None
    axes.add_patch(
        Rectangle((x - 0.48, y - 0.46), 0.96, 0.92, facecolor=face, edgecolor=HATCH, linewidth=0, hatch=hatch)
    )
    text = (fmt.format(value) if fmt else significant(value)) if measured else STATUS_WORDS.get(why, MISSING)
    color = readable_on(face) if measured else MUTED
    label = axes.text(
        x, y, text, ha="center", va="center", color=color, size=10, weight="normal" if measured else "bold"
    )
    if hatch:
        label.set_bbox({"facecolor": ZONE, "edgecolor": "none", "pad": 1.5})
