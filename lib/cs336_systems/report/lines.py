"""Plots of lines: a sweep over one variable, a ratio to a baseline, a trace of steps."""

from collections.abc import Hashable
from dataclasses import dataclass

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from cs336_systems.report.figure import (
    NO_ROWS,
    Chart,
    finish,
    outer_labels,
    panels_of,
    placeholder,
    sheet,
)
from cs336_systems.report.frames import compared, drawable
from cs336_systems.report.marks import label_lines, mark_failures
from cs336_systems.report.series import Series, hue_legend, machine_legend, series_of
from cs336_systems.report.style import GRID, MUTED, PAPER, STYLE
from cs336_systems.report.ticks import plain_log, plain_numbers, x_ticks
from cs336_systems.report.words import column_label, value_label

_MANY_POINTS = 40  # beyond which markers would hide their line


@mpl.rc_context(STYLE)
def sweep(
    frame: pd.DataFrame,
    x: str,
    y: str = "p50_ms",
    hue: str | None = None,
    *,
    band: tuple[str, str] | None = ("p20_ms", "p80_ms"),
    facet: str | None = None,
    title: str | None = None,
    subtitle: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    logx: bool = True,
    logy: bool = True,
    empty: str = NO_ROWS,
) -> Chart:
    """One line for each value of `hue` and machine, with its spread; a row that ran out of memory is a cross.

    Args:
        frame: rows, at most one for each x, hue, facet and machine.
        band: columns with the lower and the upper edge of the spread, shaded where the rows have them.
        facet: column whose values get a panel each.
        empty: what to say when there are no rows.

    Raises:
        ValueError: a column is missing, or two rows belong in one place; the message names their difference.
    """
    if frame.empty:
        return placeholder(title, empty)
    lines = _draw(drawable(frame, x, y, hue, facet), x, y, hue, facet, band=band, logx=logx, logy=logy)
    lines.show_level(0, logy)
    return lines.finish(title, subtitle, xlabel, ylabel)


@mpl.rc_context(STYLE)
def ratio(
    frame: pd.DataFrame,
    x: str,
    hue: str,
    *,
    baseline: Hashable,
    y: str = "p50_ms",
    facet: str | None = None,
    title: str | None = None,
    subtitle: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    logx: bool = True,
    logy: bool = False,
    empty: str = NO_ROWS,
) -> Chart:
    """How many times better than the baseline: above 1 is faster, or smaller, or of a rate higher.

    Each row is divided by the baseline's row that is equal to it in everything but `hue`.

    Raises:
        ValueError: rows differ in something else as well, or the baseline has no row; the message names it.
    """
    if frame.empty:
        return placeholder(title, empty)
    pairs = compared(frame, hue, baseline, y, place=tuple(column for column in (x, facet) if column))
    if pairs.empty:
        return placeholder(title, empty)
    name = value_label(baseline, hue)
    if "status" in pairs:
        lost = pairs["ratio"].isna() & (pairs["status"] == "ok") & (pairs["baseline_status"] == "oom")
        pairs["status"] = pairs["status"].mask(lost, f"{name} OOM")
    lines = _draw(drawable(pairs, x, "ratio", hue, facet), x, "ratio", hue, facet, logx=logx, logy=logy)
    lines.show_level(1, logy)
    for axes, _ in lines.panels:
        axes.axhline(1, color=MUTED, linewidth=1.2, zorder=1.5)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    return lines.finish(title, subtitle, xlabel, ylabel or _better_than(y, name))


def _better_than(y: str, baseline: str) -> str:
    if y.endswith(("_ms", "_s", "_us")):
        return f"times faster than {baseline}"
    return f"times less memory than {baseline}" if y.endswith("_mib") else f"times better than {baseline}"


@mpl.rc_context(STYLE)
def trace(
    frame: pd.DataFrame,
    x: str = "step",
    y: str = "step_ms",
    hue: str | None = None,
    *,
    warmup: int | None = None,
    facet: str | None = None,
    title: str | None = None,
    subtitle: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
    logy: bool = True,
    empty: str = NO_ROWS,
) -> Chart:
    """A value step by step; the first `warmup` steps are shaded.

    Raises:
        ValueError: a column is missing, or two rows belong in one place; the message names their difference.
    """
    if frame.empty:
        return placeholder(title, empty)
    lines = _draw(drawable(frame, x, y, hue, facet), x, y, hue, facet, logx=False, logy=logy)
    lines.show_level(0, logy)
    start = frame[x].min()
    for axes, _ in lines.panels if warmup else ():
        axes.axvspan(start - 0.5, start + warmup - 0.5, color=GRID, alpha=0.55, linewidth=0, zorder=0)
        axes.annotate(
            "warm-up", (start + warmup - 0.5, 1), (-6, -5), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="right", va="top", size=9, color=MUTED,
        )  # fmt: skip
    return lines.finish(title, subtitle, xlabel, ylabel)


@dataclass(frozen=True)
class _Lines:
    """Drawn lines, not yet labelled."""

    chart: Chart
    panels: list[tuple[Axes, list[Series]]]
    series: list[Series]
    x: str
    y: str
    facet: str | None

    def show_level(self, level: float, logy: bool) -> None:
        """Make the y axis, shared by the panels, reach the level that gives it its meaning, with some air."""
        if logy and level == 0:
            return
        values = [value for one in self.series for value in one.rows[self.y].dropna()]
        low, high = min([*values, level]), max([*values, level])
        if logy:
            air = max(high / low, 2) ** 0.08
            limits = low / air, high * air
        else:
            air = 0.06 * (high - low) or 0.5
            limits = max(low - air, 0) if low >= 0 else low - air, high + air
        self.panels[0][0].set_ylim(*limits)

    def finish(
        self, title: str | None, subtitle: str | None, xlabel: str | None, ylabel: str | None
    ) -> Chart:
        outer_labels(
            [axes for axes, _ in self.panels], xlabel or column_label(self.x), ylabel or column_label(self.y)
        )
        self.chart.draw_without_rendering()
        mark_failures(self.panels, self.x, self.y)
        labelled = self.facet is None and label_lines(self.panels[0][0], self.series, self.x, self.y)
        hues = [] if labelled else hue_legend(self.series)
        machines = [] if self.facet == "where" else machine_legend(self.series)
        return finish(self.chart, title, [hues, machines], subtitle)


def _draw(
    frame: pd.DataFrame,
    x: str,
    y: str,
    hue: str | None,
    facet: str | None,
    *,
    logx: bool,
    logy: bool,
    band: tuple[str, str] | None = None,
) -> _Lines:
    """The lines of every panel; colours and looks are decided once for all of them."""
    by_value = panels_of(frame, facet)
    chart, all_axes = sheet(list(by_value), facet)
    for axes in all_axes:
        frame_x = x_ticks(axes, x, frame[x], log=logx)
    series = series_of(frame.assign(**{x: frame_x}), hue)
    panels = [
        (axes, [one.within(facet, value) for one in series])
        for axes, value in zip(all_axes, by_value, strict=True)
    ]
    for axes, parts in panels:
        for depth, one in enumerate(reversed(parts)):
            _draw_line(axes, one, x, y, band, depth)
        axes.dataLim.update_from_data_x(frame_x.dropna(), ignore=False)  # also where nothing was measured
        if logy:
            plain_log(axes, frame[y].dropna())
        else:
            plain_numbers(axes.yaxis)
    return _Lines(chart, panels, series, x, y, facet)


def _draw_line(axes: Axes, one: Series, x: str, y: str, band: tuple[str, str] | None, depth: int) -> None:
    rows = one.rows.dropna(subset=[x, y]).sort_values(x)
    look = {"color": one.color, "linestyle": one.look.linestyle, "linewidth": one.look.linewidth}
    if len(rows) <= _MANY_POINTS:
        look |= {"marker": one.look.marker, "markerfacecolor": PAPER if one.look.hollow else one.color}
    axes.plot(rows[x], rows[y], zorder=3 + depth / 100, **look)
    if band and set(band) <= set(rows.columns):
        edges = rows.dropna(subset=list(band))
        axes.fill_between(edges[x], *(edges[edge] for edge in band), color=one.color, alpha=0.16, linewidth=0)
