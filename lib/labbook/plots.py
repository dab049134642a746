"""The ordinary plots, drawn from rows: lines, ratios, bars, stacks, heat maps, spans. Equal rows, equal ones.

Each takes title, subtitle, xlabel and ylabel too, see `figure.plot`; `facet` is a column whose values get a
panel each. Two rows in one place (x, hue, facet, machine) are refused: the ValueError names their difference.
"""

import textwrap
from collections.abc import Hashable, Mapping, Sequence
from itertools import product
from types import MappingProxyType

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, to_rgb
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter

from labbook import figure, labels
from labbook.compare import compared, key_columns, require_one_row_each
from labbook.figure import Drawing, plain_numbers, plot, sheet
from labbook.labels import STATUS_LABELS, column_label, ordered, quantity, significant, value_label
from labbook.style import BLUE, INK, MUTED, PAPER, VERMILLION, ZONE, machine_looks, palette

_BAND = ("p20_ms", "p80_ms")
_MANY_POINTS = 40  # beyond which markers would hide their line
_GROUP_WIDTH = 0.84  # of the distance between two groups of bars
_LABEL_INCHES = 0.36  # the width of a number above a bar
_PANEL_POINTS, _MARK_POINTS = 175, 11  # height of a panel, of a mark in the zone of failures
_MOST_APART = (
    8  # a value this many times the middle, or a part of it this small, has the darkest colour
)
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
_VISIBLE = 1e-3  # of a bar: what is never more needs no place in the legend


class _Encoding:
    """How rows are told apart: a colour for each value of the hue, a look for each machine.

    frame: the rows with both as `_hue` and `_where`.
    """

    def __init__(self, frame: pd.DataFrame, hue: str | None):
        self.hue, self.colors = hue, palette(frame[hue], hue) if hue else {"": BLUE}
        self.frame = frame.assign(_hue=frame[hue] if hue else "", _where=frame.get("where", ""))
        self.looks = machine_looks(ordered(self.frame["_where"]))

    def legend(self, *, bars: bool = False) -> list[Artist]:
        """An entry for each value of the hue; and, of several machines, one for each: what its look means."""
        values = [value for value in self.colors if self.hue not in (None, "where")]
        entries = [
            (self.colors[v], labels.named_value(self.hue, v), ("", "o", None)) for v in values
        ]
        for where, look in self.looks.items() if len(self.looks) > 1 else ():
            entries.append((self.colors.get(where, MUTED), value_label(where, "where"), look))
        return [
            Patch(facecolor=color, edgecolor=PAPER, hatch=hatch, label=label)
            if bars
            else Line2D(
                [], [], color=color, label=label, linestyle=(0, dashes or None), marker=marker
            )
            for color, label, (dashes, marker, hatch) in entries
        ]


@plot
def lines(
    frame: pd.DataFrame, x: str, y: str = "p50_ms", hue: str | None = None, *,
    band: tuple[str, str] | None = _BAND, facet: str | None = None, logx: bool = True, logy: bool = True,
    sharey: bool = True,
) -> Drawing:  # fmt: skip
    """One line for each value of `hue` and machine, with its spread, and a cross where memory ran out.

    band: columns with the lower and the upper edge of the spread, shaded where the rows have them.
    """
    require_one_row_each(frame, x, hue, facet)
    told = _Encoding(frame, hue)
    names = ordered(frame[x], x)  # at equal distances; numbers are where they are
    places = frame[x].map(names.index) if any(isinstance(name, str) for name in names) else frame[x]
    chart, panels = sheet(told.frame.assign(_x=places), facet, sharey=sharey)
    banded = (
        band is not None
        and set(band) <= set(frame)
        and (frame[band[1]] > 1.1 * frame[band[0]]).any()
    )
    for axes, rows in panels:
        there = rows.dropna(subset=["_x", y]).sort_values("_x").groupby(["_where", "_hue"])
        drawn, many = dict(iter(there)), (there.size() > _MANY_POINTS).any()
        for where, value in product(
            reversed(told.looks), reversed(told.colors)
        ):  # the first on top
            if (where, value) in drawn:
                line, color, (dashes, marker, _) = (
                    drawn[where, value],
                    told.colors[value],
                    told.looks[where],
                )
                style = {"linestyle": (0, dashes or None), "marker": "" if many else marker}
                axes.plot(line["_x"], line[y], color=color, mec=PAPER, mew=0.75, **style)
                if banded:
                    edges = line[["_x", *band]].dropna().to_numpy(float).T
                    axes.fill_between(*edges, color=color, alpha=0.16, lw=0)
        axes.update_datalim([(place, 0) for place in places], updatey=False)  # of failures too
        figure.x_ticks(axes, x, frame[x], log=logx)
        figure.log_y(axes, frame[y] if sharey else rows[y]) if logy else plain_numbers(axes.yaxis)
    if not logy and frame[y].min() >= 0:
        panels[0][0].set_ylim(bottom=0)
    if "status" in frame:
        failed = [rows[rows[y].isna() & (rows["status"] != "ok")] for _, rows in panels]
        _mark_failures([axes for axes, _ in panels], failed, told.colors)
    legend = told.legend()
    if banded:
        legend.append(
            Patch(color=MUTED, alpha=0.32, linewidth=0, label="band: 20th to 80th percentile")
        )
    return Drawing(chart, legend, column_label(x), column_label(y))


def _mark_failures(panels: Sequence[Axes], failed: Sequence[pd.DataFrame], colors: Mapping) -> None:
    """A cross in the line's colour in a zone above the data, under the word "OOM" (or "error", "skipped")."""
    most, first = (
        max(rows.groupby("_x").size().max() if len(rows) else 0 for rows in failed),
        panels[0],
    )
    if not most:
        return
    share = min((26 + _MARK_POINTS * most) / _PANEL_POINTS, 0.5)
    (bottom, top), more = first.get_ylim(), share / (1 - share)
    ticks = [tick for tick in first.get_yticks() if bottom <= tick <= top]
    log = first.get_yscale() == "log"
    first.set_ylim(top=top * (top / bottom) ** more if log else top + (top - bottom) * more)
    first.yaxis.set_major_locator(FixedLocator(ticks))
    for axes, rows in zip(panels, failed, strict=True):
        if len(rows):
            axes.axhspan(1 - share, 1, transform=axes.transAxes, color=ZONE, lw=0, zorder=0.6)
        for x, there in rows.groupby("_x"):
            words = "/".join(
                dict.fromkeys(STATUS_LABELS.get(status, status) for status in there["status"])
            )
            marks = [(words, MUTED, 8), *(("×", colors[value], 14) for value in there["_hue"])]
            for line, (text, color, size) in enumerate(marks):
                axes.annotate(
                    text, (x, 1), (0, -10 - _MARK_POINTS * line), xycoords=("data", "axes fraction"),
                    textcoords="offset points", color=color, size=size, weight="bold", ha="center",
                    va="center", annotation_clip=False,
                )  # fmt: skip


@plot
def ratio(
    frame: pd.DataFrame, x: str, hue: str, *, baseline: Hashable, y: str = "p50_ms",
    facet: str | None = None, logx: bool = True, logy: bool = False,
) -> Drawing | None:  # fmt: skip
    """How many times faster than the baseline's row that is equal in everything but `hue`."""
    pairs, name = compared(frame, hue, baseline, y), value_label(baseline, hue)
    if pairs.empty:
        return None
    if "status" in pairs:
        lost = (
            pairs["ratio"].isna() & (pairs["status"] == "ok") & (pairs["baseline_status"] == "oom")
        )
        pairs["status"] = pairs["status"].mask(lost, f"{name} OOM")
    drawing = lines.__wrapped__(
        pairs, x, "ratio", hue, band=None, facet=facet, logx=logx, logy=logy
    )
    for axes in drawing.chart.axes:
        axes.axhline(1, color=MUTED, linewidth=1.2, zorder=1.5)
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    return drawing._replace(ylabel=f"times faster than {name}")


@plot
def bars(
    frame: pd.DataFrame,
    x: str,
    y: str = "p50_ms",
    hue: str | None = None,
    *,
    facet: str | None = None,
) -> Drawing:
    """A group of bars for each x, a bar for each value of `hue` and machine, its value above it."""
    require_one_row_each(frame, x, hue, facet)
    told, groups = _Encoding(frame, hue), ordered(frame[x], x)
    frame, slots = told.frame, [(value, where) for value in told.colors for where in told.looks]
    # Of each group the bars that it has, side by side around its middle; as wide as the fullest group allows.
    frame["_group"] = frame[x].map(groups.index)
    frame["_slot"] = [slots.index(key) for key in zip(frame["_hue"], frame["_where"], strict=True)]
    group = frame.groupby(["_group", facet] if facet else "_group")["_slot"]
    width = _GROUP_WIDTH / group.transform("size").max()
    frame["_place"] = (
        frame["_group"] + (group.rank() - 1 - (group.transform("size") - 1) / 2) * width
    )
    chart, panels = sheet(frame, facet)
    upright = width * figure.WIDTH / len(groups) / min(len(panels), 3) < _LABEL_INCHES
    for axes, rows in panels:
        for row in rows.to_dict("records"):
            color, hatch, failed = (
                told.colors[row["_hue"]],
                told.looks[row["_where"]][2],
                pd.isna(row[y]),
            )
            axes.bar(
                row["_place"], row[y], 0.88 * width, color=color, hatch=hatch, edgecolor=PAPER, lw=0
            )
            text = (
                STATUS_LABELS.get(row.get("status"), labels.MISSING)
                if failed
                else significant(row[y])
            )
            write_above(
                axes, row["_place"], 0 if failed else row[y], text, rotation=90 if upright else 0,
                color=color if failed else INK, xycoords=("data", "axes fraction") if failed else "data",
            )  # fmt: skip
        name_bars(axes, [value_label(each, x).replace(" (", "\n(") for each in groups])
        axes.set_xlim(-0.55, len(groups) - 0.45)
    panels[0][0].margins(y=0.2 if upright else 0.1)  # room for the labels
    return Drawing(chart, told.legend(bars=True), column_label(x), column_label(y))


def write_above(axes: Axes, place: float, top: float, text: str, **how: object) -> None:
    """Write a text just above the end of a bar."""
    axes.annotate(
        text, (place, top), (0, 4), textcoords="offset points", size=8.5, ha="center", **how
    )


def name_bars(axes: Axes, names: Sequence[str]) -> None:
    """Name the bars at 0, 1, 2 ...; numbers beside them are plain."""
    axes.set_xticks(range(len(names)), names)
    axes.tick_params(axis="x", length=0)
    plain_numbers(axes.yaxis)


@plot
def stacked_bars(
    frame: pd.DataFrame, x: str, y: str = "total_ms", part: str = "class", *, share: bool = False,
    facet: str | None = None,
) -> Drawing:  # fmt: skip
    """A bar for each x, stacked of its parts; with `share` every bar is 100 % and its total stands above it.

    Rows of one bar are added up over ranges, kernels and the like, not over configurations.
    """
    bar = [facet, x] if facet else [x]
    keys = [column for column in key_columns(frame) if column not in {*bar, part} | _ADDED]
    require_one_row_each(frame[[*bar, *keys]].drop_duplicates(), *bar)
    colors, groups = palette(frame[part], part), ordered(frame[x], x)
    sums = frame.groupby([*bar, part])[y].sum().reset_index()
    sums["total"] = sums.groupby(bar)[y].transform("sum")
    sums["_share"] = (sums[y] / sums["total"]).fillna(0.0)
    sums["_height"] = 100 * sums["_share"] if share else sums[y]
    chart, panels = sheet(sums, facet)
    for axes, rows in panels:
        heights = rows.pivot(index=x, columns=part, values="_height").reindex(
            groups, columns=list(colors)
        )
        bottoms = heights.fillna(0).cumsum(axis=1) - heights
        for name, color in colors.items():
            style = {"color": color, "edgecolor": PAPER, "lw": 0.8}
            drawn = axes.bar(range(len(groups)), heights[name], 0.74, bottoms[name], **style)
            texts = [f"{height:.0f}" if share and height >= 5.5 else "" for height in heights[name]]
            axes.bar_label(drawn, texts, label_type="center", size=8, path_effects=[_OUTLINE])
        for group, of_bar in rows.groupby(x):
            top, total = of_bar["_height"].sum(), quantity(of_bar["total"].iloc[0], y)
            write_above(axes, groups.index(group), top, total)
        name_bars(axes, [textwrap.fill(value_label(group, x), 16) for group in groups])
    first, widths = panels[0][0], [axes.get_xlim() for axes, _ in panels]
    if share:
        first.set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
    first.set_ylim(0, 1.1 * sums.groupby(bar)["_height"].sum().max())
    for axes, _ in panels:  # as wide where the outer bars are missing
        axes.set_xlim(min(left for left, _ in widths), max(right for _, right in widths))
    seen = set(sums.loc[sums["_share"] > _VISIBLE, part])
    legend = [
        Patch(color=colors[name], label=value_label(name, part)) for name in colors if name in seen
    ]
    return Drawing(chart, legend, column_label(x), "share of time" if share else column_label(y))


@plot
def heatmap(
    frame: pd.DataFrame, index: str, columns: str, values: str = "p50_ms", *, fmt: str | None = None,
    middle: float | None = None, facet: str | None = None,
) -> Drawing:  # fmt: skip
    """A grid of cells with their value written in; a grey cell was not measured, or ran out of memory (OOM).

    fmt: format of a value, "{:.1f}"; three significant digits without it.
    middle: the value that parts two colours, as 1 does for a ratio; without it one colour grows darker.
    """
    require_one_row_each(frame, index, columns, facet)
    down, across = ordered(frame[index], index), ordered(frame[columns], columns)
    chart, panels = sheet(frame, facet, height=0.46 * len(down) + 0.75)
    least, most = (
        frame[values].agg(["min", "max"]).fillna(1)
    )  # a step in colour is a factor in value
    least, most = (middle / _MOST_APART, middle * _MOST_APART) if middle else (least, most)
    cmap = sns.blend_palette(
        [VERMILLION, "#F4F4F2", BLUE] if middle else ["#F2F7FB", BLUE], as_cmap=True
    )
    font = {"size": 10 if len(across) * min(len(panels), 3) <= 18 else 8}
    for axes, rows in panels:
        table = rows.assign(status=rows.get("status")).pivot(index=index, columns=columns)
        grid, status = (table[name].reindex(down, columns=across) for name in (values, "status"))
        sns.heatmap(
            grid, annot=grid.map(fmt.format if fmt else significant), fmt="", cmap=cmap, vmin=0, vmax=1,
            norm=LogNorm(least, most, clip=True), linewidths=1.5, linecolor=PAPER, cbar=False,
            annot_kws=font, xticklabels=[value_label(value, columns) for value in across],
            yticklabels=[value_label(value, index) for value in down], ax=axes,
        )  # fmt: skip
        axes.set(facecolor=ZONE, xlabel="", ylabel="")
        for i, j in zip(*grid.isna().to_numpy().nonzero(), strict=True):
            why = STATUS_LABELS.get(status.iloc[i, j], labels.MISSING)
            axes.text(
                j + 0.5, i + 0.5, why, ha="center", va="center", color=MUTED, weight="bold", **font
            )
        axes.tick_params(length=0, rotation=0)
        axes.grid(False)
    return Drawing(chart, (), column_label(columns), column_label(index))


@plot
def spans(
    frame: pd.DataFrame, lane: str, color: str, *, x: tuple[str, str] = ("start_ms", "end_ms"),
    side: str | None = None, text: str | None = None, facet: str | None = None,
    between: tuple[float, float] | None = None, shades: Mapping[Hashable, str] = MappingProxyType({}),
) -> Drawing:  # fmt: skip
    """What happens when: a lane for each value of `lane`, a box for each row.

    x: columns with the start and the end of a box, times since a step began.
    side: a column of two values, of which the first is drawn in the upper half of its lane and the second
        below it, no box so thin that it could not be seen.
    text: a column with what is written into a box, where it fits.
    between: look at this part of the time only.
    shades: colours of values that the vocabulary does not have.
    """
    start, end = between or (frame[x[0]].clip(upper=0).min(), frame[x[1]].max())
    frame = frame[(frame[x[1]] > start) & (frame[x[0]] < end)]
    lanes, colors = ordered(frame[lane], lane), palette(frame[color], color) | shades
    sides = ordered(frame[side], side) if side else [0]
    frame = frame.assign(
        _place=frame[lane].map(lanes.index), _half=frame[side].map(sides.index) if side else 0,
        _length=frame[x[1]] - frame[x[0]], _named=frame[text].ne("") if text else False,
    )  # fmt: skip
    chart, panels = sheet(
        frame, facet, height=(0.72 if side else 0.58) * max(len(lanes), 1.5) + 0.75
    )
    for axes, rows in panels:
        axes.set(xlim=(start, end), ylim=(len(lanes) - 0.45, -0.55))
        axes.set_yticks(range(len(lanes)), [value_label(value, lane) for value in lanes])
        axes.grid(False)
        plain_numbers(axes.xaxis)
        for place in range(len(lanes)):
            axes.axhspan(place - 0.4, place + 0.4, color=ZONE, lw=0, zorder=0.5)
        for value, shade in colors.items():
            boxes = rows[rows[color] == value].groupby(["_place", "_half", "_named"])
            for (place, half, named), times in boxes[[x[0], "_length"]]:
                edge = {"edgecolor": PAPER if named else shade, "lw": 0.6 if half or named else 0}
                room = (place - 0.4 + 0.4 * half, 0.8 / len(sides))
                axes.broken_barh(times.to_numpy(), room, facecolor=shade, zorder=2, **edge)
    chart.draw_without_rendering()  # only now it is known how much room there is
    for axes, rows in panels:
        for row in rows[rows["_named"]].to_dict("records"):
            ends = max(row[x[0]], start), min(row[x[1]], end)
            _write_inside(axes, ends, row["_place"], row[text], colors[row[color]])
    lasted = (frame["_length"] + frame["_half"] * (end - start)).groupby(frame[color]).sum()
    seen = [value for value in colors if lasted.get(value, 0) > _VISIBLE * (end - start)]
    legend = [Patch(color=colors[value], label=value_label(value, color)) for value in seen]
    return Drawing(chart, legend, "time since the step began (ms)")


def _write_inside(
    axes: Axes, ends: tuple[float, float], place: int, text: str, ground: str
) -> None:
    """Write a text into its box the first way that fits: across, smaller, upright."""
    corners = axes.transData.transform([(ends[0], place + 0.4), (ends[1], place - 0.4)])
    width, height = np.ptp(corners, axis=0)
    style = {"ha": "center", "va": "center", "color": INK if sum(to_rgb(ground)) > 1.8 else PAPER}
    upright = text.replace("_", "_\n")  # on two lines
    for words, size, rotation in ((text, 8.5, 0), (text, 7, 0), (text, 7, 90), (upright, 7, 90)):
        written = axes.text(
            sum(ends) / 2, place, words, size=size, rotation=rotation, zorder=3, **style
        )
        room = written.get_window_extent()
        if room.width < width and room.height < height:
            return
        written.remove()
