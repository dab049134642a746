"""The ordinary plots, drawn from rows: lines, bars, stacks, spans. Equal rows, equal ones.

Each takes title, subtitle, xlabel and ylabel too, see `figure.plot`; `facet` is a column whose values get a
panel each. Two rows in one place (x, hue, facet) are refused: the ValueError names their difference; so is
one without a place.
"""

import textwrap
from functools import partial

import numpy as np
import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from labbook import figure, labels
from labbook.compare import require_one_row_each
from labbook.figure import Drawing, plain_numbers, plot, sheet
from labbook.labels import STATUS_LABELS, column_label, ordered, quantity, significant, value_label
from labbook.style import BLUE, PAPER, SILVER, ZONE, palette

_MANY_POINTS = 40  # beyond which markers would hide their line
_BAR_WIDTH = 0.8  # of the distance between two groups
_LABEL_INCHES = 0.34  # the width of a number above a bar
_MARK_SHARE = 0.08  # of the height of the data: a line of words for what failed
_OUTLINE = withStroke(linewidth=2, foreground=PAPER)


def _with_hue(frame, hue):
    """The rows with `_hue`, by which they are told apart, and a colour for each of its values."""
    if hue is None:
        return frame.assign(_hue="all"), {"all": BLUE}
    return frame.assign(_hue=frame[hue]), palette(frame[hue], hue)


@plot
def lines(
    frame: pd.DataFrame,
    x: str,
    y: str = "p50_ms",
    hue: str | None = None,
    *,
    facet: str | None = None,
    logx: bool = True,
    logy: bool = True,
    sharey: bool = True,
) -> Drawing:
    """One line for each value of `hue`, and a word where memory ran out; medians with their spread.

    Their names stand at their ends in one of the panels, or in a legend where they would touch something.
    """
    require_one_row_each(frame, x, hue, facet)
    marked, colors = _with_hue(frame, hue)
    names = ordered(frame[x], x)
    # Numbers stand at themselves, words at equal distances.
    places = frame[x].map(names.index) if labels.is_text(names) else frame[x]
    chart, panels = sheet(marked.assign(_x=places), facet, sharey=sharey)
    # Medians have a spread, and one wide enough to be seen.
    spread = frame.reindex(columns=["p20_ms", "p80_ms"])
    has_band = y == "p50_ms" and spread.eval("p80_ms > 1.1 * p20_ms").any()
    for axes, rows in panels:
        _draw_lines(axes, rows, y, colors, has_band)
        # The axis has room for failures too, which are drawn last.
        axes.update_datalim([(place, 0) for place in places], updatey=False)
        figure.x_ticks(axes, x, frame[x], log=logx)
        if logy:
            figure.log_y(axes, frame[y] if sharey else rows[y])
        else:
            plain_numbers(axes.yaxis)
    if "status" in frame:
        _mark_failures(panels, y, colors)
    if not logy and frame[y].min() >= 0:
        for axes, _ in panels:
            axes.set_ylim(bottom=0)
    legend = _legend(colors, hue, partial(Line2D, [], [], marker="o"))
    if _write_names(panels, legend):
        legend = []
    if has_band:
        legend.append(Patch(color=SILVER, label="band: 20th to 80th percentile"))
    return Drawing(chart, legend, column_label(x), column_label(y))


def _write_names(panels, legend):
    """Write the names of lines at their ends, in the last panel that has all; whether there was room."""
    whole = [axes for axes, _ in panels if len(axes.lines) == len(legend)]
    if not whole:
        return False
    axes = whole[-1]
    style = {"textcoords": "offset points", "va": "center", "size": 9, "path_effects": [_OUTLINE]}
    names = [
        axes.annotate(entry.get_label(), line.get_xydata()[-1], (8, 0), **style)
        # The first of the legend was drawn last.
        for entry, line in zip(reversed(legend), axes.lines, strict=True)
    ]
    axes.figure.draw_without_rendering()  # only now it is known where they are
    boxes = [text.get_window_extent().padded(3) for text in axes.texts]
    curves = [line.get_path().transformed(axes.transData) for line in axes.lines]
    if any(_touches(box, boxes, curves) for box in boxes[-len(names) :]):
        for name in names:
            name.remove()
        return False
    return True


def _touches(box, boxes, curves):
    """Whether a box overlaps another of the boxes, which it is among, or a curve."""
    return box.count_overlaps(boxes) > 1 or any(
        curve.intersects_bbox(box, filled=False) for curve in curves
    )


def _legend(colors, column, entry=Patch):
    """An entry for each value of the column; none without a column."""
    if column is None:
        return []
    return [
        entry(color=color, label=labels.named_value(column, value))
        for value, color in colors.items()
    ]


def _visible(colors, shares):
    """The colours of what takes more than a thousandth: less needs no place in a legend."""
    return {value: color for value, color in colors.items() if shares[value] > 1e-3}


def _draw_lines(axes, rows, y, colors, has_band):
    points = rows.dropna(subset=[y]).sort_values("_x")
    marker = "" if (points["_hue"].value_counts() > _MANY_POINTS).any() else "o"
    # The first of the legend is drawn last, on top.
    for value, color in reversed(colors.items()):
        line = points[points["_hue"] == value]
        if line.empty:
            continue
        axes.plot(line["_x"], line[y], color=color, marker=marker)
        if has_band:
            band = line.dropna(subset=["p20_ms", "p80_ms"])
            axes.fill_between("_x", "p20_ms", "p80_ms", data=band, color=color, alpha=0.16)


def _mark_failures(panels, y, colors):
    """The word "OOM" (or "error", "skipped") above the data, in the colour of the line that has none."""
    for axes, rows in panels:
        failures = rows[rows[y].isna() & rows["status"].isin(STATUS_LABELS)]
        for x, of_place in failures.groupby("_x"):
            for line, row in enumerate(of_place.to_dict("records")):
                # In a line of its own, below those before it.
                axes.text(
                    x,
                    1,
                    "\n" * line + STATUS_LABELS[row["status"]],
                    transform=axes.get_xaxis_transform(),
                    color=colors[row["_hue"]],
                    size=8,
                    weight="bold",
                    ha="center",
                    va="top",
                )
            # Room for them above the data; below it there is as much.
            axes.margins(y=max(axes.margins()[1], _MARK_SHARE * (1 + len(of_place))))


@plot
def bars(
    frame: pd.DataFrame,
    x: str,
    y: str = "p50_ms",
    hue: str | None = None,
    *,
    facet: str | None = None,
) -> Drawing:
    """A group of bars for each x, a bar for each value of `hue`; above it its value, or why there is none."""
    require_one_row_each(frame, x, hue, facet)
    marked, colors = _with_hue(frame, hue)
    # Without a number, the word for why there is none.
    status = frame["status"].map(STATUS_LABELS) if "status" in frame else labels.MISSING
    marked["_text"] = frame[y].map(significant).where(frame[y].notna(), status)
    groups = ordered(frame[x], x)
    chart, panels = sheet(marked, facet)
    bars_in_row = len(groups) * len(colors) * min(len(panels), 3)
    is_narrow = _LABEL_INCHES * bars_in_row > _BAR_WIDTH * figure.WIDTH
    for axes, rows in panels:
        wide = rows.pivot(index=x, columns="_hue", values=[y, "_text"]).reindex(groups)
        heights = wide[y].reindex(columns=list(colors)).astype(float).fillna(0)
        texts = wide["_text"].reindex(columns=list(colors)).fillna("")
        _draw_groups(axes, heights, colors)
        for boxes, value in zip(axes.containers, colors, strict=True):
            axes.bar_label(
                boxes, texts[value], padding=3, size=8.5, rotation=90 if is_narrow else 0
            )
        axes.margins(y=0.2 if is_narrow else 0.1)  # room for the labels
    return Drawing(chart, _legend(colors, hue), column_label(x), column_label(y))


def _draw_groups(axes, heights, colors, **style):
    """Bars for each line of a table, side by side, or stacked; numbers beside them are plain."""
    places = len(heights) * min(len(axes.figure.axes), 3)
    # About 96 characters fit across the figure.
    characters = np.clip(96 // places, 8, 16)  # below a group, so that names do not touch
    names = [
        textwrap.fill(value_label(name, heights.index.name), characters, break_long_words=False)
        for name in heights.index
    ]
    heights.set_axis(names).plot.bar(
        ax=axes,
        width=_BAR_WIDTH,
        color=colors,
        edgecolor=PAPER,
        lw=0.8,
        legend=False,
        rot=0,
        xlabel="",
        **style,
    )
    axes.grid(False, axis="x")
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

    Rows of one bar are added up, whatever they are of: over ranges, kernels; pass one configuration a bar.
    """
    colors = palette(frame[part], part)
    groups = ordered(frame[x], x)
    chart, panels = sheet(frame, facet)
    shares = []
    for axes, rows in panels:
        heights = rows.pivot_table(y, x, part, "sum")
        heights = heights.reindex(groups, columns=list(colors)).fillna(0)
        totals = heights.sum(axis=1)
        of_panel = heights.div(totals, axis=0).fillna(0)
        shares.append(of_panel)
        _draw_groups(axes, 100 * of_panel if share else heights, colors, stacked=True)
        if share:
            _write_percentages(axes)
        texts = [quantity(total, y) if total else "" for total in totals]
        axes.bar_label(axes.containers[-1], texts, padding=3, size=8.5)
        axes.margins(y=0.1)
    ylabel = "share of time" if share else column_label(y)
    legend = _legend(_visible(colors, pd.concat(shares).max()), part)
    return Drawing(chart, legend, column_label(x), ylabel)


def _write_percentages(axes):
    """At the axis, and into the boxes that are high enough for a number."""
    axes.yaxis.set_major_formatter("{x:.0f} %")
    for boxes in axes.containers:
        axes.bar_label(
            boxes,
            fmt=lambda height: f"{height:.0f}" if height >= 5.5 else "",
            label_type="center",
            size=8,
            path_effects=[_OUTLINE],
        )


@plot
def spans(
    frame: pd.DataFrame,
    lane: str,
    color: str,
    *,
    side: str | None = None,
    text: str | None = None,
    facet: str | None = None,
    between: tuple[float, float] | None = None,
) -> Drawing:
    """What happens when: a lane for each value of `lane`, a box for each row from start_ms to end_ms.

    side: a column of two values, of which the first is drawn in the upper half of its lane and the second
        below it, no box so thin that it could not be seen.
    text: a column with what is written into a box, where it fits.
    between: look at this part of the time only.
    """
    start, end = between or (frame["start_ms"].clip(upper=0).min(), frame["end_ms"].max())
    frame = frame.query("end_ms > @start and start_ms < @end")
    lanes = ordered(frame[lane], lane)
    colors = palette(frame[color], color)
    boxes = _with_boxes(frame, frame[lane].map(lanes.index), side, text)
    lane_inches, height = (0.72, 0.4) if side else (0.58, 0.8)
    chart, panels = sheet(boxes, facet, height=lane_inches * max(len(lanes), 1.5) + 0.75)
    for axes, rows in panels:
        axes.set_xlim(start, end)
        plain_numbers(axes.xaxis)
        _draw_lanes(axes, [value_label(value, lane) for value in lanes])
        # In the order of the colours: what is exposed lies over what was hidden.
        for value, shade in colors.items():
            _draw_boxes(axes, rows[rows[color] == value], height, shade)
    chart.draw_without_rendering()  # only now it is known how much room there is
    for axes, rows in panels:
        for row in rows.query("_text != ''").to_dict("records"):
            ends = np.clip([row["start_ms"], row["end_ms"]], start, end)
            _write_inside(axes, ends, row["_top"] + height / 2, height, row["_text"])
    # A box in the lower half is drawn however short: it belongs into the legend.
    duration = end - start
    seen_ms = boxes["_length_ms"].mask(boxes["_is_lower"], duration)
    shares = seen_ms.groupby(boxes[color]).sum() / duration
    return Drawing(
        chart, _legend(_visible(colors, shares), color), "time since the step began (ms)"
    )


def _with_boxes(frame, places, side, text):
    """The rows with the place of their box, y growing downwards; `places`: of their lanes, 0 above."""
    is_lower = frame[side] != ordered(frame[side], side)[0] if side else False
    return frame.assign(
        _length_ms=frame.eval("end_ms - start_ms"),
        _top=places - 0.4 + 0.4 * is_lower,
        _is_lower=is_lower,
        _text=frame[text] if text else "",
    )


def _draw_lanes(axes, names):
    """An empty lane for each name, the first above."""
    places = range(len(names))
    axes.set_yticks(places, names)
    axes.set_ylim(len(names) - 0.45, -0.55)
    axes.grid(False)
    for place in places:
        axes.axhspan(place - 0.4, place + 0.4, color=ZONE, zorder=0.5)


def _draw_boxes(axes, rows, height, shade):
    """Boxes of one colour; an outline is around those with a text, an edge around those in a lower half."""
    for (top, is_lower, has_text), boxes in rows.groupby(
        ["_top", "_is_lower", rows["_text"] != ""]
    ):
        axes.broken_barh(
            boxes[["start_ms", "_length_ms"]].to_numpy(),
            (top, height),
            facecolor=shade,
            edgecolor=PAPER if has_text else shade,
            lw=0.6 if is_lower or has_text else 0,
        )


def _write_inside(axes, ends, middle, height, text):
    """Write a text into its box the first way that fits: across, upright, upright on two lines."""
    corners = axes.transData.transform([(ends[0], 0), (ends[1], height)])
    room = np.ptp(corners, axis=0)
    for words, size, rotation in (text, 8.5, 0), (text, 7, 90), (text.replace("_", "_\n"), 7, 90):
        label = axes.text(
            sum(ends) / 2,
            middle,
            words,
            size=size,
            rotation=rotation,
            ha="center",
            va="center",
            path_effects=[_OUTLINE],
            zorder=3,
        )
        if (label.get_window_extent().size < room).all():
            return
        label.remove()
