"""The ordinary plots, drawn from rows: lines, ratios, bars, stacks, heat maps. Equal rows, equal pictures.

Each takes title, subtitle, xlabel and ylabel too, see `figure.plot`; `facet` is a column whose values get a
panel each. Two rows in one place (x, hue, facet, machine) are refused: the ValueError names their difference.
"""

import textwrap
from collections.abc import Hashable, Sequence
from itertools import pairwise

import pandas as pd
import seaborn as sns
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm
from matplotlib.lines import Line2D
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator, FuncFormatter

from labbook import figure, labels
from labbook.figure import Drawing, panels_of, plain_numbers, plot, sheet
from labbook.frames import compared, key_columns, require_one_row_each
from labbook.labels import STATUS_LABELS, column_label, ordered, significant, value_label
from labbook.style import BLUE, GREEN, INK, MUTED, PAPER, VERMILLION, ZONE, machine_looks, palette

_BAND = ("p20_ms", "p80_ms")
_MANY_POINTS = 40  # beyond which markers would hide their line
_GROUP_WIDTH = 0.84  # of the distance between two groups of bars
_LABEL_INCHES = 0.36  # the width of a number above a bar
_MOST_APART = 8  # a value this many times the middle, or a part of it this small, has the darkest colour
# Columns along which the rows of one stacked bar may differ: they are what a bar adds up.
_ADDED = {"range", "kernel", "class", "category", "code", "stage", "module", "tensor", "kind", "point"}
_OUTLINE = withStroke(linewidth=2, foreground=PAPER)
_VISIBLE = 1e-3  # of a bar: what is never more needs no place in the legend


@plot
def lines(
    frame: pd.DataFrame, x: str, y: str = "p50_ms", hue: str | None = None, *,
    band: tuple[str, str] | None = _BAND, facet: str | None = None, logx: bool = True, logy: bool = True,
    sharey: bool = True,
) -> Drawing:  # fmt: skip
    """One line for each value of `hue` and machine, with its spread, and a cross where memory ran out.

    Args:
        band: columns with the lower and the upper edge of the spread, shaded where the rows have them.
    """
    require_one_row_each(frame, x, hue, facet)
    colors, looks, frame = _encoded(frame, hue)
    frame = frame.assign(_x=figure.x_places(frame[x], x))
    by_value = panels_of(frame, facet)
    chart, panels = sheet(by_value, facet, sharey=sharey)
    banded = band is not None and set(band) <= set(frame) and (frame[band[1]] > 1.1 * frame[band[0]]).any()
    for axes, rows in zip(panels, by_value.values(), strict=True):
        _draw_lines(axes, rows, y, colors, looks)
        for (value, _), line in rows.dropna(subset=band).groupby(["_hue", "_where"]) if banded else ():
            line = line.sort_values("_x")
            axes.fill_between(line["_x"], line[band[0]], line[band[1]], color=colors[value], alpha=0.16, lw=0)
        axes.update_datalim([(place, 0) for place in frame["_x"]], updatey=False)  # of failures too
        figure.x_ticks(axes, x, frame[x], log=logx)
        figure.log_y(axes, rows[y] if not sharey else frame[y]) if logy else plain_numbers(axes.yaxis)
    if not logy and frame[y].min() >= 0:
        panels[0].set_ylim(bottom=0)
    if "status" in frame:
        failed = [rows[rows[y].isna() & (rows["status"] != "ok")] for rows in by_value.values()]
        _mark_failures(panels, failed, colors)
    legend = _legend(hue, colors, looks)
    if banded:
        legend.append(Patch(color=MUTED, alpha=0.32, linewidth=0, label="band: 20th to 80th percentile"))
    return Drawing(chart, legend, column_label(x), column_label(y))


def _encoded(
    frame: pd.DataFrame, hue: str | None
) -> tuple[dict[Hashable, str], dict[str, tuple], pd.DataFrame]:
    """Colours of the values of the hue, looks of the machines, and the rows with both as `_hue`, `_where`."""
    frame = frame.assign(_hue=frame[hue] if hue else "", _where=frame.get("where", ""))
    return palette(frame[hue], hue) if hue else {"": BLUE}, machine_looks(ordered(frame["_where"])), frame


def _legend(
    hue: str | None, colors: dict[Hashable, str], looks: dict[str, tuple], *, bars: bool = False
) -> list[Artist]:
    """An entry for each value of the hue; and, of several machines, one for each: what its look means."""
    values = [value for value in colors if hue not in (None, "where")]
    entries = [(colors[value], labels.named_value(hue, value), ("", "o", None)) for value in values]
    for where, look in looks.items() if len(looks) > 1 else ():
        entries.append((colors.get(where, MUTED), labels.machine_label(where), look))
    return [
        Patch(facecolor=color, edgecolor=PAPER, hatch=hatch, label=label)
        if bars
        else Line2D([], [], color=color, label=label, linestyle=(0, dashes or None), marker=marker)
        for color, label, (dashes, marker, hatch) in entries
    ]


def _draw_lines(
    axes: Axes, rows: pd.DataFrame, y: str, colors: dict[Hashable, str], looks: dict[str, tuple]
) -> None:
    """Of machines and of values of the hue the first is drawn last, on top."""
    rows = rows.dropna(subset=["_x", y])
    if rows.empty:
        return
    many = rows.groupby(["_hue", "_where"]).size().gt(_MANY_POINTS).any()
    sns.lineplot(
        rows, x="_x", y=y, hue="_hue", hue_order=[*colors][::-1], palette=colors, style="_where",
        style_order=[*looks][::-1], dashes={where: look[0] for where, look in looks.items()},
        markers=False if many else {where: look[1] for where, look in looks.items()},
        estimator=None, legend=False, ax=axes,
    )  # fmt: skip


def _mark_failures(
    panels: Sequence[Axes], failed: Sequence[pd.DataFrame], colors: dict[Hashable, str]
) -> None:
    """A cross in the line's colour in a zone above the data, under the word "OOM" (or "error", "skipped")."""
    most = max(rows.groupby("_x").size().max() if len(rows) else 0 for rows in failed)
    if not most:
        return
    share = min((26 + 11 * most) / 175, 0.5)  # of the height of a panel, which is about 175 points
    bottom, top = panels[0].get_ylim()
    ticks = [tick for tick in panels[0].get_yticks() if bottom <= tick <= top]
    more = share / (1 - share)
    log = panels[0].get_yscale() == "log"
    panels[0].set_ylim(top=top * (top / bottom) ** more if log else top + (top - bottom) * more)
    panels[0].yaxis.set_major_locator(FixedLocator(ticks))
    for axes, rows in zip(panels, failed, strict=True):
        if len(rows):
            zone = {"transform": axes.transAxes, "color": ZONE, "linewidth": 0, "zorder": 0.6}
            axes.add_artist(Rectangle((0, 1 - share), 1, share, **zone))
        for x, there in rows.groupby("_x"):
            words = dict.fromkeys(STATUS_LABELS.get(status, status) for status in there["status"])
            marks = [("/".join(words), MUTED, 8), *(("×", colors[value], 14) for value in there["_hue"])]
            for line, (text, color, size) in enumerate(marks):
                axes.annotate(
                    text, (x, 1), (0, -10 - 11 * line), xycoords=("data", "axes fraction"), color=color,
                    textcoords="offset points", size=size, weight="bold", ha="center", va="center",
                    annotation_clip=False,
                )  # fmt: skip


@plot
def ratio(
    frame: pd.DataFrame, x: str, hue: str, *, baseline: Hashable, y: str = "p50_ms",
    facet: str | None = None, logx: bool = True, logy: bool = False,
) -> Drawing | None:  # fmt: skip
    """How many times faster than the baseline's row that is equal in everything but `hue`."""
    pairs = compared(frame, hue, baseline, y)
    if pairs.empty:
        return None
    name = value_label(baseline, hue)
    if "status" in pairs:
        lost = pairs["ratio"].isna() & (pairs["status"] == "ok") & (pairs["baseline_status"] == "oom")
        pairs["status"] = pairs["status"].mask(lost, f"{name} OOM")
    drawing = lines.__wrapped__(pairs, x, "ratio", hue, band=None, facet=facet, logx=logx, logy=logy)
    for axes in drawing.chart.axes:
        axes.axhline(1, color=MUTED, linewidth=1.2, zorder=1.5)
        axes.set_ylim(top=max(axes.get_ylim()[1], 1.1))
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    return drawing._replace(ylabel=f"times faster than {name}")


@plot
def bars(
    frame: pd.DataFrame, x: str, y: str = "p50_ms", hue: str | None = None, *, facet: str | None = None
) -> Drawing:
    """A group of bars for each x, a bar for each value of `hue` and machine, its value above it."""
    require_one_row_each(frame, x, hue, facet)
    colors, looks, frame = _encoded(frame, hue)
    groups, slots = ordered(frame[x], x), [(value, where) for value in colors for where in looks]
    frame["_group"] = frame[x].map(groups.index)
    frame["_slot"] = [slots.index(key) for key in zip(frame["_hue"], frame["_where"], strict=True)]
    # Of each group the bars that it has, side by side around its middle; as wide as the fullest group allows.
    group = frame.groupby(["_group", facet] if facet else "_group")["_slot"]
    count = group.transform("size")
    width = _GROUP_WIDTH / count.max()
    frame["_place"] = frame["_group"] + (group.rank() - 1 - (count - 1) / 2) * width
    by_value = panels_of(frame, facet)
    chart, panels = sheet(by_value, facet)
    upright = width * figure.WIDTH / len(groups) / min(len(panels), 3) < _LABEL_INCHES
    for axes, rows in zip(panels, by_value.values(), strict=True):
        for row in rows.to_dict("records"):
            color, hatch = colors[row["_hue"]], looks[row["_where"]][2]
            axes.bar(row["_place"], row[y], 0.88 * width, color=color, hatch=hatch, edgecolor=PAPER, lw=0)
            failed = pd.isna(row[y])
            text = STATUS_LABELS.get(row.get("status"), labels.MISSING) if failed else significant(row[y])
            axes.annotate(
                text, (row["_place"], 0 if failed else row[y]), (0, 3), textcoords="offset points", size=8.5,
                xycoords=("data", "axes fraction") if failed else "data", ha="center", va="bottom",
                rotation=90 if upright else 0, color=color if failed else INK,
            )  # fmt: skip
        axes.set_xticks(range(len(groups)), [value_label(each, x).replace(" (", "\n(") for each in groups])
        axes.set_xlim(-0.55, len(groups) - 0.45)
        axes.tick_params(axis="x", length=0)
        plain_numbers(axes.yaxis)
    panels[0].margins(y=0.2 if upright else 0.1)  # room for the labels
    return Drawing(chart, _legend(hue, colors, looks, bars=True), column_label(x), column_label(y))


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
    by_value = panels_of(sums, facet)
    chart, panels = sheet(by_value, facet)
    for axes, rows in zip(panels, by_value.values(), strict=True):
        heights = rows.pivot(index=x, columns=part, values="_height").reindex(groups, columns=list(colors))
        bottoms = heights.fillna(0).cumsum(axis=1) - heights
        for name, color in colors.items():
            bars = axes.bar(
                range(len(groups)), heights[name], 0.74, bottoms[name], color=color, edgecolor=PAPER, lw=0.8
            )
            texts = [f"{height:.0f}" if share and height >= 5.5 else "" for height in heights[name]]
            axes.bar_label(bars, texts, label_type="center", size=8, path_effects=[_OUTLINE])
        for group, rows_of_bar in rows.groupby(x):
            total, top = rows_of_bar["total"].iloc[0], rows_of_bar["_height"].sum()
            axes.annotate(
                _total(total, y), (groups.index(group), top), (0, 4), textcoords="offset points", ha="center",
                size=8.5,
            )  # fmt: skip
        _label_bars(axes, [value_label(group, x) for group in groups])
    if share:
        panels[0].set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
    panels[0].set_ylim(0, 1.1 * sums.groupby(bar)["_height"].sum().max())
    for axes in panels:  # as wide where the outer bars are missing
        axes.set_xlim(min(a.get_xlim()[0] for a in panels), max(a.get_xlim()[1] for a in panels))
    seen = set(sums.loc[sums["_share"] > _VISIBLE, part])
    legend = [Patch(color=colors[name], label=value_label(name, part)) for name in colors if name in seen]
    return Drawing(chart, legend, column_label(x), "share of time" if share else column_label(y))


@plot
def waterfall(frame: pd.DataFrame, x: str, y: str) -> Drawing:
    """How a value becomes another, row by row: the first and the last in full, between them each change.

    Green is less than before, red is more.
    """
    chart, (axes,) = sheet()
    values = frame[y].tolist()
    spans = [(0, values[0], BLUE), *((a, b, GREEN if b <= a else VERMILLION) for a, b in pairwise(values))]
    spans.append((0, values[-1], BLUE))
    texts = [_total(values[0], y), *(f"{b - a:+,.0f}" for a, b in pairwise(values)), _total(values[-1], y)]
    for place, ((start, end, color), text) in enumerate(zip(spans, texts, strict=True)):
        axes.bar(place, end - start, 0.74, start, color=color, lw=0)
        high = max(start, end)
        axes.annotate(text, (place, high), (0, 4), textcoords="offset points", ha="center", size=8.5)
        if place < len(spans) - 1:
            axes.plot([place - 0.37, place + 1.37], [end, end], color=MUTED, lw=0.8)
    names = [value_label(value, x) for value in frame[x]]
    _label_bars(axes, [*names, "in the end"])
    axes.set_ylim(0, 1.1 * max(values))
    return Drawing(chart, [], column_label(x), column_label(y))


def _label_bars(axes: Axes, names: Sequence[str]) -> None:
    axes.set_xticks(range(len(names)), [textwrap.fill(name, 16) for name in names])
    axes.tick_params(axis="x", length=0)
    plain_numbers(axes.yaxis)


def _total(value: float, column: str) -> str:
    """A bar's total with its unit; from a second on in seconds, which leaves room for the bar beside it."""
    if column.endswith("_ms") and value >= 1000:
        return f"{significant(value / 1000)} s"
    return significant(value) + column_label(column).partition(" (")[2].rstrip(")").join((" ", ""))


@plot
def heatmap(
    frame: pd.DataFrame, index: str, columns: str, values: str = "p50_ms", *, fmt: str | None = None,
    middle: float | None = None, facet: str | None = None,
) -> Drawing:  # fmt: skip
    """A grid of cells with their value written in; a grey cell was not measured, or ran out of memory (OOM).

    Args:
        fmt: format of a value, "{:.1f}"; three significant digits without it.
        middle: the value that parts two colours, as 1 does for a ratio; without it one colour grows darker.
    """
    require_one_row_each(frame, index, columns, facet)
    down, across = ordered(frame[index], index), ordered(frame[columns], columns)
    by_value = panels_of(frame, facet)
    chart, panels = sheet(by_value, facet, height=0.46 * len(down) + 0.75)
    least, most = frame[values].agg(["min", "max"]).fillna(1)  # a step in colour is a factor in value
    least, most = (middle / _MOST_APART, middle * _MOST_APART) if middle else (least, most)
    cmap = sns.blend_palette([VERMILLION, "#F4F4F2", BLUE] if middle else ["#F2F7FB", BLUE], as_cmap=True)
    size = 10 if len(across) * min(len(panels), 3) <= 18 else 8
    for axes, rows in zip(panels, by_value.values(), strict=True):
        table = rows.assign(status=rows.get("status")).pivot(index=index, columns=columns)
        grid, status = (table[name].reindex(down, columns=across) for name in (values, "status"))
        sns.heatmap(
            grid, annot=grid.map(fmt.format if fmt else significant), fmt="", cmap=cmap, vmin=0, vmax=1,
            norm=LogNorm(least, most, clip=True), linewidths=1.5, linecolor=PAPER, cbar=False,
            annot_kws={"size": size}, xticklabels=[value_label(value, columns) for value in across],
            yticklabels=[value_label(value, index) for value in down], ax=axes,
        )  # fmt: skip
        axes.set(facecolor=ZONE, xlabel="", ylabel="")
        for i, j in zip(*grid.isna().to_numpy().nonzero(), strict=True):
            why = STATUS_LABELS.get(status.iloc[i, j], labels.MISSING)
            axes.text(j + 0.5, i + 0.5, why, ha="center", va="center", color=MUTED, size=size, weight="bold")
        axes.tick_params(length=0, rotation=0)
        axes.grid(False)
    return Drawing(chart, (), column_label(columns), column_label(index))


@plot
def tradeoff(frame: pd.DataFrame, x: str, y: str, name: str) -> Drawing:
    """What one thing costs in another: a point for each row, and its name; points in one place share it."""
    chart, (axes,) = sheet()
    frame = frame.dropna(subset=[x, y])
    sns.scatterplot(frame, x=x, y=y, color=BLUE, s=70, linewidth=0, zorder=3, ax=axes)
    figure.log_y(axes, frame[y])
    plain_numbers(axes.xaxis)
    axes.set(xlim=(0, 1.15 * frame[x].max()), ylim=(frame[y].min() / 1.6, 1.6 * frame[y].max()))
    same = [(frame[x] / frame[x].max()).round(2), (frame[y] / frame[y].max()).round(2)]
    for _, points in frame.groupby(same):
        place, text = tuple(points[[x, y]].mean()), ", ".join(points[name])
        axes.annotate(text, place, (9, 0), textcoords="offset points", va="center", color=INK)
    return Drawing(chart, [], column_label(x), column_label(y))
