"""The ordinary plots, drawn from rows: lines, bars, stacks, heat maps, spans. Equal rows, equal ones.

Each takes title, subtitle, xlabel and ylabel too, see `figure.plot`; `facet` is a column whose values get a
panel each. Two rows in one place (x, hue, facet) are refused: the ValueError names their difference.
"""

import textwrap
from collections.abc import Callable, Hashable, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import Any

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator

from labbook import figure, labels
from labbook.compare import key_columns, require_one_row_each
from labbook.figure import Drawing, plain_numbers, plot, sheet
from labbook.labels import STATUS_LABELS, column_label, ordered, quantity, significant, value_label
from labbook.style import (
    BLUE,
    INK,
    MUTED,
    PAPER,
    VERMILLION,
    ZONE,
    palette,
)

_BAND = ("p20_ms", "p80_ms")
_MANY_POINTS = 40  # beyond which markers would hide their line
_GROUP_WIDTH = 0.84  # of the distance between two groups of bars
_BAR_WIDTH = 0.88  # of the room of a bar in its group
_STACK_WIDTH = 0.74
_LABEL_INCHES = 0.36  # the width of a number above a bar
_PANEL_POINTS = 175  # height of a panel
_MARK_POINTS = 11  # height of a mark in the zone of failures
# A value this many times the middle, or a part of it this small, has the darkest colour.
_MOST_APART = 8
# Columns along which the rows of one stacked bar may differ: they are what a bar adds up.
_ADDED = {
    "range",
    "kernel",
    "class",
    "category",
    "code",
    "stage",
    "module",
    "tensor",
    "kind",
    "point",
}
_OUTLINE = withStroke(linewidth=2, foreground=PAPER)
_CELLS = {"fmt": "", "vmin": 0, "vmax": 1, "linewidths": 1.5, "linecolor": PAPER, "cbar": False}
_VISIBLE = 1e-3  # of a bar: what is never more needs no place in the legend


def _with_hue(frame: pd.DataFrame, hue: str | None) -> tuple[pd.DataFrame, dict[Hashable, str]]:
    """The rows with `_hue`, by which they are told apart, and a colour for each of its values."""
    colors = palette(frame[hue], hue) if hue else {"": BLUE}
    return frame.assign(_hue=frame[hue] if hue else ""), colors


@plot
def lines(
    frame: pd.DataFrame,
    x: str,
    y: str = "p50_ms",
    hue: str | None = None,
    *,
    band: tuple[str, str] | None = _BAND,
    facet: str | None = None,
    logx: bool = True,
    logy: bool = True,
    sharey: bool = True,
) -> Drawing:
    """One line for each value of `hue`, with its spread, and a cross where memory ran out.

    band: columns with the lower and the upper edge of the spread, shaded where the rows have them.
    """
    require_one_row_each(frame, x, hue, facet)
    marked, colors = _with_hue(frame, hue)
    places = _places(frame[x])
    chart, panels = sheet(marked.assign(_x=places), facet, sharey=sharey)
    band = band if _is_visible(frame, band) else None
    for axes, rows in panels:
        _draw_lines(axes, rows, y, colors, band)
        # The axis has room for failures too, which are drawn last.
        axes.update_datalim([(place, 0) for place in places], updatey=False)
        figure.x_ticks(axes, x, frame[x], log=logx)
        if logy:
            figure.log_y(axes, frame[y] if sharey else rows[y])
        else:
            plain_numbers(axes.yaxis)
    if not logy and frame[y].min() >= 0:
        panels[0][0].set_ylim(bottom=0)
    if "status" in frame:
        _mark_failures(panels, y, colors)
    legend = _legend(colors, hue, entry=partial(Line2D, [], [], marker="o"))
    if band:
        label = "band: 20th to 80th percentile"
        legend.append(Patch(color=MUTED, alpha=0.32, linewidth=0, label=label))
    return Drawing(chart, legend, column_label(x), column_label(y))


def _legend(
    colors: Mapping, column: str | None, seen: set | None = None, entry: Callable = Patch
) -> list[Artist]:
    """An entry for each value of the column, or for each that can be seen; none without a column."""
    if column is None:
        return []
    shown = [value for value in colors if seen is None or value in seen]
    return [entry(color=colors[value], label=labels.named_value(column, value)) for value in shown]


def _places(values: pd.Series) -> pd.Series:
    """Where values stand on an x axis: numbers at themselves, text at equal distances."""
    names = ordered(values, values.name)
    is_text = any(isinstance(name, str) for name in names)
    return values.map(names.index) if is_text else values


def _is_visible(frame: pd.DataFrame, band: tuple[str, str] | None) -> bool:
    """Whether the rows have a spread, and one wide enough to be seen."""
    if band is None or not set(band) <= set(frame):
        return False
    lower, upper = band
    return (frame[upper] > 1.1 * frame[lower]).any()


def _draw_lines(
    axes: Axes, rows: pd.DataFrame, y: str, colors: Mapping, band: tuple[str, str] | None
) -> None:
    points = rows.dropna(subset=["_x", y]).sort_values("_x").groupby("_hue")
    marker = "" if (points.size() > _MANY_POINTS).any() else "o"
    line_of = dict(iter(points))
    # The first of the legend is drawn last, on top.
    for value, color in reversed(colors.items()):
        if value not in line_of:
            continue
        line = line_of[value]
        axes.plot(line["_x"], line[y], color=color, mec=PAPER, mew=0.75, marker=marker)
        if band:
            edges = line[["_x"] + list(band)].dropna().to_numpy(float).T
            axes.fill_between(*edges, color=color, alpha=0.16, lw=0)


def _mark_failures(panels: Sequence[tuple[Axes, pd.DataFrame]], y: str, colors: Mapping) -> None:
    """A cross in the line's colour in a zone above the data, under the word "OOM" (or "error", "skipped")."""
    failures = [(axes, rows[rows[y].isna() & (rows["status"] != "ok")]) for axes, rows in panels]
    most = max(rows.groupby("_x").size().max() if len(rows) else 0 for _, rows in failures)
    if not most:
        return
    share = min((26 + _MARK_POINTS * most) / _PANEL_POINTS, 0.5)
    _make_room_above(panels[0][0], share)
    for axes, rows in failures:
        if len(rows):
            zone = axes.axhspan(1 - share, 1, color=ZONE, lw=0, zorder=0.6)
            # Given to axhspan, it would be replaced by one in which y is data.
            zone.set_transform(axes.transAxes)
        for x, of_place in rows.groupby("_x"):
            words = dict.fromkeys(
                STATUS_LABELS.get(status, status) for status in of_place["status"]
            )
            _mark(axes, x, 0, "/".join(words), MUTED, 8)
            for line, value in enumerate(of_place["_hue"], start=1):
                _mark(axes, x, line, "×", colors[value], 14)


def _make_room_above(axes: Axes, share: float) -> None:
    """Lengthen the y axis so that its upper `share` is free; ticks stay where they were."""
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
    growth = share / (1 - share)
    if axes.get_yscale() == "log":
        axes.set_ylim(top=top * (top / bottom) ** growth)
    else:
        axes.set_ylim(top=top + (top - bottom) * growth)
    axes.yaxis.set_major_locator(FixedLocator(ticks))


def _mark(axes: Axes, x: float, line: int, text: str, color: str, size: int) -> None:
    """Write a mark into a line of the zone of failures, the first at its top."""
    axes.annotate(
        text,
        (x, 1),
        (0, -10 - _MARK_POINTS * line),
        xycoords=("data", "axes fraction"),
        textcoords="offset points",
        color=color,
        size=size,
        weight="bold",
        ha="center",
        va="center",
        annotation_clip=False,
    )


@plot
def bars(
    frame: pd.DataFrame,
    x: str,
    y: str = "p50_ms",
    hue: str | None = None,
    *,
    facet: str | None = None,
) -> Drawing:
    """A group of bars for each x, a bar for each value of `hue`, its value above it."""
    require_one_row_each(frame, x, hue, facet)
    frame, colors = _with_hue(frame, hue)
    groups = ordered(frame[x], x)
    frame["_group"] = frame[x].map(groups.index)
    width = _place_bars(frame, list(colors), facet)
    chart, panels = sheet(frame, facet)
    is_narrow = width * figure.WIDTH / len(groups) / min(len(panels), 3) < _LABEL_INCHES
    for axes, rows in panels:
        for row in rows.to_dict("records"):
            _draw_bar(axes, row, y, width, colors, rotation=90 if is_narrow else 0)
        name_bars(axes, [value_label(group, x).replace(" (", "\n(") for group in groups])
        axes.set_xlim(-0.55, len(groups) - 0.45)
    panels[0][0].margins(y=0.2 if is_narrow else 0.1)  # room for the labels
    return Drawing(chart, _legend(colors, hue), column_label(x), column_label(y))


def _place_bars(frame: pd.DataFrame, values: list[Hashable], facet: str | None) -> float:
    """Add `_place`, the middle of each bar; returns the width of a bar.

    Of each group the bars that it has, side by side around its middle; as wide as the fullest group allows.
    """
    frame["_slot"] = frame["_hue"].map(values.index)
    group = frame.groupby(["_group", facet] if facet else "_group")["_slot"]
    count = group.transform("size")
    width = _GROUP_WIDTH / count.max()
    frame["_place"] = frame["_group"] + (group.rank() - 1 - (count - 1) / 2) * width
    return width


def _draw_bar(
    axes: Axes, row: Mapping, y: str, width: float, colors: Mapping, rotation: int
) -> None:
    """A bar with its value, or the word for why there is none at the foot of its place."""
    color = colors[row["_hue"]]
    place = row["_place"]
    axes.bar(place, row[y], _BAR_WIDTH * width, color=color)
    if pd.isna(row[y]):
        word = STATUS_LABELS.get(row.get("status"), labels.MISSING)
        foot = ("data", "axes fraction")
        write_above(axes, place, 0, word, rotation=rotation, color=color, xycoords=foot)
    else:
        write_above(axes, place, row[y], significant(row[y]), rotation=rotation, color=INK)


def write_above(axes: Axes, place: float, top: float, text: str, **style: object) -> None:
    """Write a text just above the end of a bar."""
    axes.annotate(
        text, (place, top), (0, 4), textcoords="offset points", size=8.5, ha="center", **style
    )


def name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Name the bars at 0, 1, 2 ...; numbers beside them are plain."""
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    plain_numbers(axes.yaxis)


@plot
def stacked_bars(
    frame: pd.DataFrame,
    x: str,
    y: str = "total_ms",
    part: str = "class",
    *,
    share: bool = False,
    facet: str | None = None,
) -> Drawing:
    """A bar for each x, stacked of its parts; with `share` every bar is 100 % and its total stands above it.

    Rows of one bar are added up over ranges, kernels and the like, not over configurations.
    """
    bar = [facet, x] if facet else [x]
    keys = [column for column in key_columns(frame) if column not in _ADDED.union(bar, [part])]
    require_one_row_each(frame[bar + keys].drop_duplicates(), *bar)
    sums = _sums(frame, bar, part, y, share=share)
    colors = palette(frame[part], part)
    groups = ordered(frame[x], x)
    chart, panels = sheet(sums, facet)
    for axes, rows in panels:
        heights = rows.pivot(index=x, columns=part, values="_height")
        _draw_stacks(axes, heights.reindex(groups, columns=list(colors)), colors, share=share)
        for group, of_bar in rows.groupby(x):
            total = quantity(of_bar["total"].iloc[0], y)
            write_above(axes, groups.index(group), of_bar["_height"].sum(), total)
        name_bars(axes, [textwrap.fill(value_label(group, x), 16) for group in groups])
    first = panels[0][0]
    if share:
        first.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
    first.set_ylim(0, 1.1 * sums.groupby(bar)["_height"].sum().max())
    # As wide where the outer bars are missing.
    limits = np.array([axes.get_xlim() for axes, _ in panels])
    for axes, _ in panels:
        axes.set_xlim(limits.min(), limits.max())
    seen = set(sums.loc[sums["_share"] > _VISIBLE, part])
    legend = _legend(colors, part, seen)
    return Drawing(chart, legend, column_label(x), "share of time" if share else column_label(y))


def _sums(frame: pd.DataFrame, bar: list[str], part: str, y: str, *, share: bool) -> pd.DataFrame:
    """A row for each part of each bar: its sum, the bar's `total`, `_share` of it, and `_height`."""
    sums = frame.groupby(bar + [part])[y].sum().reset_index()
    sums["total"] = sums.groupby(bar)[y].transform("sum")
    sums["_share"] = (sums[y] / sums["total"]).fillna(0.0)
    sums["_height"] = 100 * sums["_share"] if share else sums[y]
    return sums


def _draw_stacks(axes: Axes, heights: pd.DataFrame, colors: Mapping, *, share: bool) -> None:
    """heights: a row for each bar, a column for each part from the bottom on."""
    bottoms = heights.fillna(0).cumsum(axis=1) - heights
    places = range(len(heights))
    for name, color in colors.items():
        boxes = axes.bar(
            places, heights[name], _STACK_WIDTH, bottoms[name], color=color, edgecolor=PAPER, lw=0.8
        )
        texts = [f"{height:.0f}" if share and height >= 5.5 else "" for height in heights[name]]
        axes.bar_label(boxes, texts, label_type="center", size=8, path_effects=[_OUTLINE])


@plot
def heatmap(
    frame: pd.DataFrame,
    index: str,
    columns: str,
    values: str = "p50_ms",
    *,
    fmt: str | None = None,
    middle: float | None = None,
    facet: str | None = None,
) -> Drawing:
    """A grid of cells with their value written in; a grey cell was not measured, or ran out of memory (OOM).

    fmt: format of a value, "{:.1f}"; three significant digits without it.
    middle: the value that parts two colours, as 1 does for a ratio; without it one colour grows darker.
    """
    require_one_row_each(frame, index, columns, facet)
    down = ordered(frame[index], index)
    across = ordered(frame[columns], columns)
    down_labels = [value_label(value, index) for value in down]
    across_labels = [value_label(value, columns) for value in across]
    chart, panels = sheet(frame, facet, height=0.46 * len(down) + 0.75)
    norm, shades = _shades(frame[values], middle)
    font = {"size": 10 if len(across) * min(len(panels), 3) <= 18 else 8}
    for axes, rows in panels:
        table = rows.assign(status=rows.get("status")).pivot(index=index, columns=columns)
        grid = table[values].reindex(down, columns=across)
        status = table["status"].reindex(down, columns=across)
        sns.heatmap(
            grid,
            annot=grid.map(fmt.format if fmt else significant),
            annot_kws=font,
            cmap=shades,
            norm=norm,
            xticklabels=across_labels,
            yticklabels=down_labels,
            ax=axes,
            **_CELLS,
        )
        axes.set(facecolor=ZONE, xlabel="", ylabel="")
        for i, j in np.argwhere(grid.isna().to_numpy()):
            word = STATUS_LABELS.get(status.iloc[i, j], labels.MISSING)
            middle_of_cell = (j + 0.5, i + 0.5)
            axes.text(
                *middle_of_cell, word, ha="center", va="center", color=MUTED, weight="bold", **font
            )
        axes.tick_params(length=0, rotation=0)
        axes.grid(False)
    return Drawing(chart, (), column_label(columns), column_label(index))


def _shades(values: pd.Series, middle: float | None) -> tuple[LogNorm, Any]:
    """The colours of a heat map: a step in colour is a factor in value."""
    if middle:
        norm = LogNorm(middle / _MOST_APART, middle * _MOST_APART, clip=True)
        return norm, sns.blend_palette([VERMILLION, "#F4F4F2", BLUE], as_cmap=True)
    least, most = values.agg(["min", "max"]).fillna(1)
    if least <= 0:
        raise ValueError(f"{values.name} is {least:g}; allowed in a heat map: above 0")
    return LogNorm(least, most, clip=True), sns.blend_palette(["#F2F7FB", BLUE], as_cmap=True)


@plot
def spans(
    frame: pd.DataFrame,
    lane: str,
    color: str,
    *,
    x: tuple[str, str] = ("start_ms", "end_ms"),
    side: str | None = None,
    text: str | None = None,
    facet: str | None = None,
    between: tuple[float, float] | None = None,
    shades: Mapping[Hashable, str] = MappingProxyType({}),
) -> Drawing:
    """What happens when: a lane for each value of `lane`, a box for each row.

    x: columns with the start and the end of a box, times since a step began.
    side: a column of two values, of which the first is drawn in the upper half of its lane and the second
        below it, no box so thin that it could not be seen.
    text: a column with what is written into a box, where it fits.
    between: look at this part of the time only.
    shades: colours of values that the vocabulary does not have.
    """
    start, end = x
    window = between or (frame[start].clip(upper=0).min(), frame[end].max())
    frame = frame[(frame[end] > window[0]) & (frame[start] < window[1])]
    lanes = ordered(frame[lane], lane)
    sides = ordered(frame[side], side) if side else [0]
    colors = palette(frame[color], color) | shades
    frame = frame.assign(_start=frame[start], _length=frame[end] - frame[start])
    frame["_place"] = frame[lane].map(lanes.index)
    frame["_half"] = frame[side].map(sides.index) if side else 0
    frame["_named"] = frame[text].ne("") if text else False
    height = (0.72 if side else 0.58) * max(len(lanes), 1.5) + 0.75
    chart, panels = sheet(frame, facet, height=height)
    for axes, rows in panels:
        axes.set(xlim=window, ylim=(len(lanes) - 0.45, -0.55))
        axes.set_yticks(range(len(lanes)), [value_label(value, lane) for value in lanes])
        axes.grid(False)
        plain_numbers(axes.xaxis)
        for place in range(len(lanes)):
            axes.axhspan(place - 0.4, place + 0.4, color=ZONE, lw=0, zorder=0.5)
        for value, shade in colors.items():
            _draw_boxes(axes, rows[rows[color] == value], shade, 0.8 / len(sides))
    chart.draw_without_rendering()  # only now it is known how much room there is
    for axes, rows in panels:
        for row in rows[rows["_named"]].to_dict("records"):
            ends = np.clip([row[start], row[end]], *window)
            _write_inside(axes, ends, row["_place"], row[text], colors[row[color]])
    # A box in the lower half is drawn however short: it belongs into the legend.
    duration = window[1] - window[0]
    drawn = (frame["_length"] + frame["_half"] * duration).groupby(frame[color]).sum()
    seen = set(drawn.index[drawn > _VISIBLE * duration])
    return Drawing(chart, _legend(colors, color, seen), "time since the step began (ms)")


def _draw_boxes(axes: Axes, rows: pd.DataFrame, shade: str, height: float) -> None:
    """The boxes of one colour, in their lanes and halves."""
    for (place, half, named), boxes in rows.groupby(["_place", "_half", "_named"]):
        axes.broken_barh(
            boxes[["_start", "_length"]].to_numpy(),
            (place - 0.4 + 0.4 * half, height),
            facecolor=shade,
            zorder=2,
            edgecolor=PAPER if named else shade,
            lw=0.6 if half or named else 0,
        )


def _write_inside(axes: Axes, ends: Sequence[float], place: int, text: str, ground: str) -> None:
    """Write a text into its box the first way that fits: across, smaller, upright, upright on two lines."""
    corners = axes.transData.transform([(ends[0], place + 0.4), (ends[1], place - 0.4)])
    width, height = np.ptp(corners, axis=0)
    is_light = sum(to_rgb(ground)) > 1.8
    style = {"ha": "center", "va": "center", "color": INK if is_light else PAPER, "zorder": 3}
    two_lines = text.replace("_", "_\n")
    for words, size, rotation in ((text, 8.5, 0), (text, 7, 0), (text, 7, 90), (two_lines, 7, 90)):
        label = axes.text(sum(ends) / 2, place, words, size=size, rotation=rotation, **style)
        extent = label.get_window_extent()
        if extent.width < width and extent.height < height:
            return
        label.remove()
