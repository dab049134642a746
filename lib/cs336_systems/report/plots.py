"""The ordinary plots, drawn by seaborn from rows: lines, bars, heat maps, points. Equal rows, equal pictures.

Each takes title, subtitle, xlabel, ylabel and empty too, see `figure.plot`.
"""

from collections.abc import Hashable, Iterable, Mapping, Sequence

import numpy as np
import pandas as pd
import seaborn as sns
from matplotlib.axes import Axes
from matplotlib.colors import LogNorm, Normalize
from matplotlib.patches import Patch, Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter

from cs336_systems.names import BLUE
from cs336_systems.report.encoding import Encoding, band_swatch, draw_band
from cs336_systems.report.figure import (
    Drawing,
    log_y,
    panels_of,
    plain_numbers,
    plot,
    sheet,
    x_places,
    x_ticks,
)
from cs336_systems.report.frames import (
    check_drawable,
    compared,
    key_columns,
    require_columns,
    varying_values,
)
from cs336_systems.report.labels import (
    MISSING,
    STATUS_LABELS,
    column_label,
    ordered,
    significant,
    value_label,
)
from cs336_systems.report.marks import label_lines, mark_failures, name_points
from cs336_systems.report.style import (
    DIVERGING,
    GRID,
    HATCH,
    INK,
    MUTED,
    PALE,
    PAPER,
    ZONE,
    palette,
    readable_on,
    text_color,
)

_MANY_POINTS = 40  # beyond which markers would hide their line
_GROUP_WIDTH, _BAR_GAP = 0.84, 0.12  # of the distance between two groups, of a bar
_MOST_APART = 8  # a value this many times the middle, or a part of it this small, has the darkest colour
# Columns along which the rows of one stacked bar may differ: they are what a bar adds up.
_ADDED = {"range", "kernel", "class", "category", "code", "stage", "module", "tensor", "kind", "point"}
_VISIBLE = 1e-3  # of a bar: what is never more needs no place in the legend


@plot
def lines(
    frame: pd.DataFrame,
    x: str,
    y: str = "p50_ms",
    hue: str | None = None,
    *,
    band: tuple[str, str] | None = ("p20_ms", "p80_ms"),
    facet: str | None = None,
    logx: bool = True,
    logy: bool = True,
) -> Drawing | None:
    """One line for each value of `hue` and machine, with its spread; a row that ran out of memory is a cross.

    Args:
        frame: rows, at most one for each x, hue, facet and machine.
        band: columns with the lower and the upper edge of the spread, shaded where the rows have them.
        facet: column whose values get a panel each.

    Raises:
        ValueError: a column is missing, or two rows belong in one place; the message names their difference.
    """
    return _Lines(frame, x, y, hue, facet, band=band, logx=logx, logy=logy).named()


@plot
def ratio(
    frame: pd.DataFrame,
    x: str,
    hue: str,
    *,
    baseline: Hashable,
    y: str = "p50_ms",
    facet: str | None = None,
    logx: bool = True,
    logy: bool = False,
) -> Drawing | None:
    """How many times better than the baseline: above 1 is faster, or smaller, or of a rate higher.

    Each row is divided by the baseline's row that is equal to it in everything but `hue`.

    Raises:
        ValueError: rows differ in something else as well, or the baseline has no row; the message names it.
    """
    pairs = compared(frame, hue, baseline, y, place=tuple(column for column in (x, facet) if column))
    if pairs.empty:
        return None
    name = value_label(baseline, hue)
    if "status" in pairs:
        lost = pairs["ratio"].isna() & (pairs["status"] == "ok") & (pairs["baseline_status"] == "oom")
        pairs["status"] = pairs["status"].mask(lost, f"{name} OOM")
    drawn = _Lines(pairs, x, "ratio", hue, facet, logx=logx, logy=logy, level=1)
    for axes, _ in drawn.panels:
        axes.axhline(1, color=MUTED, linewidth=1.2, zorder=1.5)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    better = (
        "faster" if y.endswith(("_ms", "_s", "_us")) else "less memory" if y.endswith("_mib") else "better"
    )
    return drawn.named(f"times {better} than {name}")


@plot
def trace(
    frame: pd.DataFrame,
    x: str = "step_index",
    y: str = "step_ms",
    hue: str | None = None,
    *,
    warmup: int | None = None,
    facet: str | None = None,
    logy: bool = True,
) -> Drawing | None:
    """A value step by step; the first `warmup` steps are shaded.

    Raises:
        ValueError: a column is missing, or two rows belong in one place; the message names their difference.
    """
    drawn = _Lines(frame, x, y, hue, facet, logx=False, logy=logy)
    first = frame[x].min() - 0.5
    for axes, _ in drawn.panels if warmup else ():
        axes.axvspan(first, first + warmup, color=GRID, alpha=0.55, linewidth=0, zorder=0)
        axes.annotate(
            "warm-up", (first + warmup, 1), (-6, -5), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="right", va="top", size=9, color=MUTED,
        )  # fmt: skip
    return drawn.named()


class _Lines:
    """The lines of every panel, drawn, and what is still to be said about them."""

    def __init__(
        self,
        frame: pd.DataFrame,
        x: str,
        y: str,
        hue: str | None,
        facet: str | None,
        *,
        logx: bool,
        logy: bool,
        band: tuple[str, str] | None = None,
        level: float = 0,
    ) -> None:
        check_drawable(frame, x, y, hue, facet)
        self.x, self.y, self.facet = x, y, facet
        self.encoding = Encoding(frame, hue)
        frame = self.encoding.marked(frame).assign(_x=x_places(frame[x], x))
        by_value = panels_of(frame, facet)
        self.chart, all_axes = sheet(by_value, facet)
        self.panels = list(zip(all_axes, by_value.values(), strict=True))
        band = band if band and set(band) <= set(frame.columns) else None
        self.band = None
        for axes, rows in self.panels:
            if band and draw_band(axes, rows, band):
                self.band = band
            self._draw(axes, rows)
            axes.dataLim.update_from_data_x(
                frame["_x"].dropna(), ignore=False
            )  # failures have their place too
            x_ticks(axes, x, frame[x], log=logx)
            log_y(axes, frame[y].dropna()) if logy else plain_numbers(axes.yaxis)
        if not logy or level:
            self._show_level(frame[y].dropna(), level, logy)

    def _draw(self, axes: Axes, rows: pd.DataFrame) -> None:
        """Of machines and of values of the hue the first is drawn last, on top."""
        rows = rows.dropna(subset=["_x", self.y])
        many = rows.groupby(["_hue", "_where"]).size().gt(_MANY_POINTS).any()
        for where, look in reversed(self.encoding.looks.items()):
            colors = {value: self.encoding.color(value, where) for value in reversed(self.encoding.colors)}
            there = rows[rows["_where"] == where]
            if len(there):
                sns.lineplot(
                    there, x="_x", y=self.y, hue="_hue", hue_order=list(colors), palette=colors,
                    estimator=None, legend=False, ax=axes, **look.line() | ({"marker": ""} if many else {}),
                )  # fmt: skip

    def _show_level(self, values: Sequence[float], level: float, logy: bool) -> None:
        """Make the y axis, shared by the panels, reach the level that gives it its meaning, with some air."""
        low, high = min([*values, level]), max([*values, level])
        if logy:
            air = max(high / low, 2) ** 0.08
            limits = low / air, high * air
        else:
            air = 0.06 * (high - low) or 0.5
            limits = max(low - air, 0) if low >= 0 else low - air, high + air
        self.panels[0][0].set_ylim(*limits)

    def named(self, ylabel: str = "") -> Drawing:
        """With failures marked, and lines named at their ends or in the legend."""
        for axes, _ in self.panels:
            axes.set(xlabel="", ylabel="")
        self.chart.draw_without_rendering()
        mark_failures(self.panels, self.y)
        labelled = self.facet is None and label_lines(*self.panels[0], self.y, self.encoding)
        hues, machines = self.encoding.legend()
        legend = [[] if labelled else hues, [] if self.facet == "where" else machines]
        legend += [[band_swatch(self.band)]] if self.band else []
        return Drawing(self.chart, legend, column_label(self.x), ylabel or column_label(self.y))


@plot
def states(
    frame: pd.DataFrame,
    x: str,
    quantities: Mapping[str, str],
    hue: str | None = None,
    *,
    logarithmic: Iterable[str] = (),
) -> Drawing | None:
    """What each quantity is after each step, as stairs: it stays until the next step changes it.

    Args:
        frame: one row for each x and hue.
        quantities: columns, and what to call them above their panels.
        logarithmic: those of them with a logarithmic axis; what is not above zero is not drawn there.

    Raises:
        ValueError: a column is missing.
    """
    require_columns(frame, x, *quantities, hue)
    chart, panels = sheet(quantities.values(), "quantity", height=3.2, sharey=False)
    encoding = Encoding(frame, hue)
    frame = encoding.marked(frame)
    for axes, column in zip(panels, quantities, strict=True):
        rows = frame[frame[column] > 0] if column in logarithmic else frame
        sns.lineplot(
            rows, x=x, y=column, hue="_hue", palette=encoding.colors, estimator=None, legend=False, ax=axes,
            drawstyle="steps-post", marker="o", linewidth=1.4, markeredgecolor="auto",
        )  # fmt: skip
        x_ticks(axes, x, frame[x], log=False)
        log_y(axes, frame[column]) if column in logarithmic else plain_numbers(axes.yaxis)
    return Drawing(chart, encoding.legend(), column_label(x))


@plot
def bars(
    frame: pd.DataFrame,
    x: str,
    y: str = "mean_ms",
    hue: str | None = None,
    *,
    facet: str | None = None,
    logy: bool = False,
) -> Drawing | None:
    """A group of bars for each x, a bar for each value of `hue` and machine, its value above it.

    Args:
        frame: rows, at most one for each x, hue, facet and machine.

    Raises:
        ValueError: a column is missing, or two rows belong in one place; the message names their difference.
    """
    check_drawable(frame, x, y, hue, facet)
    encoding, groups = Encoding(frame, hue), ordered(frame[x], x)
    frame = encoding.marked(frame).assign(_group=frame[x].map(groups.index))
    slots = {key: slot for slot, key in enumerate((v, w) for v in encoding.colors for w in encoding.looks)}
    frame["_slot"] = [slots[key] for key in zip(frame["_hue"], frame["_where"], strict=True)]
    # Of each group the bars that it has, side by side around its middle; as wide as the fullest group allows.
    group = frame.groupby(["_group", facet] if facet else "_group")["_slot"]
    count = group.transform("size")
    width = _GROUP_WIDTH / count.max()
    frame["_place"] = frame["_group"] + (group.rank() - 1 - (count - 1) / 2) * width
    by_value = panels_of(frame, facet)
    chart, panels = sheet(by_value, facet)
    for axes, rows in zip(panels, by_value.values(), strict=True):
        _draw_bars(axes, rows, y, list(slots), encoding, width * (1 - _BAR_GAP))
        axes.set_xticks(range(len(groups)), [value_label(group, x) for group in groups])
        axes.set(xlim=(-0.55, len(groups) - 0.45), xlabel="", ylabel="")
        axes.tick_params(axis="x", length=0)
        log_y(axes, frame[y].dropna()) if logy else plain_numbers(axes.yaxis)
    chart.draw_without_rendering()
    _fold_names(panels)
    _fit_bar_labels(panels, width, logy)
    hues, machines = encoding.legend(bars=True)
    return Drawing(chart, [hues, [] if facet == "where" else machines], column_label(x), column_label(y))


def _draw_bars(
    axes: Axes, rows: pd.DataFrame, y: str, slots: list[tuple], encoding: Encoding, width: float
) -> None:
    """The bars of one panel, each with its value above it, or the word for why it has none."""
    measured = rows.dropna(subset=y)
    if len(measured):
        sns.barplot(
            measured, x="_group", y=y, hue="_slot", hue_order=range(len(slots)), native_scale=True, ax=axes,
            palette=[encoding.color(*slot) for slot in slots], saturation=1, errorbar=None, legend=False,
        )  # fmt: skip
    for slot, container in enumerate(axes.containers):
        value, where = slots[slot]
        there = measured[measured["_slot"] == slot].sort_values("_group")
        for bar, place in zip(container, there["_place"], strict=True):
            bar.set(x=place - width / 2, width=width, zorder=2)
            bar.set(**encoding.looks[where].bar(encoding.color(value, where)))
    for _, row in rows.iterrows():
        missing = pd.isna(row[y])
        text = STATUS_LABELS.get(row.get("status"), MISSING) if missing else significant(row[y])
        axes.annotate(
            text, (row["_place"], 0 if missing else row[y]), (0, 4), textcoords="offset points", size=8.5,
            xycoords=("data", "axes fraction") if missing else "data", ha="center", va="bottom", zorder=4,
            color=text_color(row["_color"]) if missing else INK, weight="bold" if missing else "normal",
            annotation_clip=False, path_effects=[withStroke(linewidth=1.8, foreground=PAPER)],
        )  # fmt: skip


def _fold_names(panels: Sequence[Axes]) -> None:
    """Put the edition of a model on a second line where the names would run into each other."""
    axes = panels[0]
    room = axes.bbox.width / np.ptp(axes.get_xlim())
    names = axes.get_xticklabels()
    if max(name.get_window_extent().width for name in names) > room:
        for axes in panels:
            axes.set_xticks(axes.get_xticks(), [name.get_text().replace(" (", "\n(") for name in names])


def _fit_bar_labels(panels: Sequence[Axes], width: float, logy: bool) -> None:
    """Turn the labels upright where they are wider than their bars, and make room above the highest."""
    labels = [text for axes in panels for text in axes.texts]
    axes = panels[0]
    longest = max(text.get_window_extent().width for text in labels)
    upright = longest > width * axes.bbox.width / np.ptp(axes.get_xlim())
    for text in labels if upright else ():
        text.set(rotation=90, size=7.5)
    room = (longest if upright else 20) / axes.bbox.height + 0.02
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top * (top / bottom) ** room if logy else bottom + (top - bottom) * (1 + room))


@plot
def stacked_bars(
    frame: pd.DataFrame,
    x: str,
    y: str = "total_ms",
    part: str = "class",
    *,
    share: bool = False,
    facet: str | None = None,
) -> Drawing | None:
    """A bar for each x, stacked of its parts; with `share` every bar is 100 % and its total stands above it.

    Args:
        frame: rows; those of one bar are added up over ranges, kernels and the like.

    Raises:
        ValueError: a column is missing, or a bar would add up rows of two configurations.
    """
    require_columns(frame, x, y, part, facet)
    bar = [facet, x] if facet else [x]
    keys = [column for column in key_columns(frame) if column not in {*bar, part} | _ADDED]
    for place, rows in frame.groupby(bar, dropna=False):
        if varying := varying_values(rows, keys):
            where = ", ".join(f"{column}={value}" for column, value in zip(bar, place, strict=True))
            raise ValueError(
                f"the bar at {where} would add up rows that differ in {varying}; keep one of each"
            )
    colors, groups = palette(frame[part], part), ordered(frame[x], x)
    sums = frame.groupby([*bar, part])[y].sum().reset_index()
    sums = sums.assign(total=sums.groupby(bar)[y].transform("sum"), _group=sums[x].map(groups.index))
    sums["_share"] = (sums[y] / sums["total"]).where(sums["total"] > 0, 0.0)
    sums["_height"] = 100 * sums["_share"] if share else sums[y]
    by_value = panels_of(sums, facet)
    chart, panels = sheet(by_value, facet)
    for axes, rows in zip(panels, by_value.values(), strict=True):
        sns.histplot(
            rows, x="_group", weights="_height", hue=part, hue_order=list(reversed(colors)), palette=colors,
            multiple="stack", binwidth=1, binrange=(-0.5, len(groups) - 0.5), shrink=0.74, alpha=1,
            edgecolor=PAPER, linewidth=0.8, legend=False, ax=axes,
        )  # fmt: skip
        _label_stacks(axes, rows, y, share)
        axes.set_xticks(range(len(groups)), [value_label(group, x) for group in groups])
        axes.set(xlabel="", ylabel="")
        axes.tick_params(axis="x", length=0)
        plain_numbers(axes.yaxis)
    if share:
        panels[0].set_yticks(range(0, 101, 25), [f"{tick} %" for tick in range(0, 101, 25)])
    panels[0].set_ylim(0, 1.1 * sums.groupby(bar)["_height"].sum().max())
    seen = set(sums.loc[sums["_share"] > _VISIBLE, part])
    legend = [Patch(color=colors[name], label=value_label(name, part)) for name in colors if name in seen]
    of_what = "share of time" if y.endswith("_ms") else "share"
    return Drawing(chart, [legend], column_label(x), of_what if share else column_label(y))


def _label_stacks(axes: Axes, rows: pd.DataFrame, y: str, share: bool) -> None:
    """The share of a part, where there is room for it, and the total above each bar."""
    for container in axes.containers if share else ():
        color = readable_on(container[0].get_facecolor())
        texts = [f"{height:.0f}" if height >= 5.5 else "" for height in container.datavalues]
        axes.bar_label(container, texts, label_type="center", size=8, color=color)
    for place, group in rows.groupby("_group"):
        total = group["total"].iloc[0]
        text = _total(total, y) if total else MISSING
        axes.annotate(
            text, (place, group["_height"].sum()), (0, 4), textcoords="offset points", ha="center", size=8.5,
            color=INK,
        )  # fmt: skip


def _total(value: float, column: str) -> str:
    """A bar's total with its unit; from a second on in seconds, which leaves room for the bar beside it."""
    if column.endswith("_ms") and value >= 1000:
        return f"{significant(value / 1000)} s"
    return significant(value) + column_label(column).partition(" (")[2].rstrip(")").join((" ", ""))


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
) -> Drawing | None:
    """A grid of cells with their value written in; a cell that ran out of memory is hatched and says OOM.

    Args:
        frame: rows, at most one for each index, column and facet.
        fmt: format of a value, "{:.1f}"; three significant digits without it.
        middle: the value that parts two colours, as 1 does for a ratio; without it one colour grows darker.

    Raises:
        ValueError: a column is missing, or two rows belong in one cell; the message names their difference.
    """
    check_drawable(frame, columns, values, index, facet)
    down, across = ordered(frame[index], index), ordered(frame[columns], columns)
    by_value = panels_of(frame, facet)
    chart, panels = sheet(by_value, facet, height=0.46 * len(down) + 0.75)
    norm = _norm(frame[values].dropna(), middle)
    for axes, rows in zip(panels, by_value.values(), strict=True):
        grid = rows.pivot(index=index, columns=columns, values=values).reindex(down, columns=across)
        texts = grid.map(fmt.format if fmt else significant)
        sns.heatmap(
            grid, annot=texts, fmt="", norm=norm, vmin=0, vmax=1, cmap=PALE if middle is None else DIVERGING,
            linewidths=1.5, linecolor=PAPER, cbar=False, annot_kws={"size": 10}, ax=axes,
        )  # fmt: skip
        _draw_unmeasured(axes, rows, grid)
        axes.set(xlabel="", ylabel="")
        axes.set_xticks(np.arange(len(across)) + 0.5, [value_label(v, columns) for v in across], rotation=0)
        axes.set_yticks(np.arange(len(down)) + 0.5, [value_label(v, index) for v in down], rotation=0)
        axes.tick_params(length=0)
        axes.grid(False)
    chart.draw_without_rendering()
    labels = [text for axes in panels for text in axes.texts]
    widest = max(text.get_window_extent().width for text in labels)
    for text in labels:
        text.set_size(10 * min(1, 0.8 * panels[0].bbox.width / len(across) / widest))
    return Drawing(chart, (), column_label(columns), column_label(index), column_label(values))


def _norm(values: pd.Series, middle: float | None) -> Normalize:
    """Colour by the logarithm: a step in colour is a factor in value."""
    if middle is not None:
        return LogNorm(middle / _MOST_APART, middle * _MOST_APART, clip=True)
    if values.empty or values.min() <= 0:
        return Normalize(values.min() if len(values) else 0, values.max() if len(values) else 1)
    return LogNorm(values.min(), max(values.max(), values.min() * 1.01))


def _draw_unmeasured(axes: Axes, rows: pd.DataFrame, grid: pd.DataFrame) -> None:
    """A grey cell with the word for why there is no value, hatched where memory ran out."""
    why = {}
    if "status" in rows:
        index, columns = grid.index.name, grid.columns.name
        why = dict(zip(zip(rows[index], rows[columns], strict=True), rows["status"], strict=True))
    for i, j in zip(*np.nonzero(grid.isna().to_numpy()), strict=True):
        status = why.get((grid.index[i], grid.columns[j]))
        hatch = "////" if status == "oom" else None
        axes.add_patch(
            Rectangle(
                (j + 0.02, i + 0.04), 0.96, 0.92, facecolor=ZONE, edgecolor=HATCH, linewidth=0, hatch=hatch
            )
        )
        word = STATUS_LABELS.get(status, MISSING)
        label = axes.text(
            j + 0.5, i + 0.5, word, ha="center", va="center", color=MUTED, size=10, weight="bold"
        )
        if hatch:
            label.set_bbox({"facecolor": ZONE, "edgecolor": "none", "pad": 1.5})


@plot
def tradeoff(
    frame: pd.DataFrame,
    x: str = "peak_memory_mib",
    y: str = "p50_ms",
    label: str = "strategy",
) -> Drawing | None:
    """What one thing costs in another: a named point for each row, x from zero, y in decades.

    Raises:
        ValueError: a column is missing.
    """
    require_columns(frame, x, y, label)
    frame = frame.dropna(subset=[x, y]).sort_values(x)
    if frame.empty:
        return None
    chart, (axes,) = sheet(height=4.2)
    sns.scatterplot(frame, x=x, y=y, color=BLUE, s=64, linewidth=0, zorder=3, ax=axes)
    axes.grid(True, axis="both")
    log_y(axes, frame[y])
    plain_numbers(axes.xaxis)
    axes.set(xlim=(0, frame[x].max() * 1.16), ylim=(frame[y].min() / 2.5, frame[y].max() * 1.4))
    chart.draw_without_rendering()
    name_points(axes, frame[[x, y]].to_numpy(float), [value_label(name, label) for name in frame[label]])
    return Drawing(chart, (), column_label(x), column_label(y))
