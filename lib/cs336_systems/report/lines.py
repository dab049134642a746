"""Plots of lines: a sweep over one variable, a ratio to a baseline, a trace of steps."""

from collections.abc import Hashable, Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

from cs336_systems.report.figure import NO_ROWS, Chart, finish, outer_labels, panels_of, placeholder, sheet
from cs336_systems.report.frames import compared, require_columns, require_one_row_each
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
    require_columns(frame, x, y, hue, facet)
    require_one_row_each(frame, x, hue, facet)
    chart, panels = _panels(frame, x, hue, facet)
    for axes, series in panels:
        _draw_lines(axes, series, x, y, band)
    _scale(panels, frame, x, y, logx, logy)
    return _finish(chart, panels, frame, x, y, hue, title, subtitle, xlabel, ylabel or column_label(y))


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
    require_one_row_each(pairs, x, hue, facet)
    chart, panels = _panels(pairs, x, hue, facet)
    for axes, series in panels:
        axes.axhline(1, color=MUTED, linewidth=1.2, zorder=1.5)
        _draw_lines(axes, series, x, "ratio", None)
    _scale(panels, pairs, x, "ratio", logx, logy)
    for axes, _ in panels:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}×"))
    name = value_label(baseline, hue)
    return _finish(
        chart, panels, pairs, x, "ratio", hue, title, subtitle, xlabel, ylabel or _better_than(y, name)
    )


def _better_than(y: str, baseline: str) -> str:
    if y.endswith(("_ms", "_s", "_us")):
        return f"times faster than {baseline}"
    return (
        f"times less than {baseline}"
        if y.endswith(("_mib", "_gib", "_mb", "_gb", "_bytes"))
        else f"times {baseline}"
    )


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
    require_columns(frame, x, y, hue, facet)
    require_one_row_each(frame, x, hue, facet)
    chart, panels = _panels(frame, x, hue, facet)
    for axes, series in panels:
        axes.grid(axis="x", visible=False)
        if warmup:
            axes.axvspan(
                frame[x].min() - 0.5, frame[x].min() + warmup - 0.5, color=GRID, alpha=0.55, lw=0, zorder=0
            )
            axes.annotate("warm-up", (frame[x].min() - 0.4, 1), (4, -5), xycoords=("data", "axes fraction"),
                          textcoords="offset points", va="top", size=9, color=MUTED)  # fmt: skip
        _draw_lines(axes, series, x, y, None)
    _scale(panels, frame, x, y, False, logy)
    return _finish(chart, panels, frame, x, y, hue, title, subtitle, xlabel, ylabel or column_label(y))


_Panels = list[tuple[Axes, list[Series]]]


def _panels(frame: pd.DataFrame, x: str, hue: str | None, facet: str | None) -> tuple[Chart, _Panels]:
    """Colours and looks are decided once for all panels."""
    by_value = panels_of(frame, facet)
    chart, axes = sheet(list(by_value), facet)
    series = series_of(frame, hue)
    return chart, [
        (each, [one.within(facet, value) for one in series])
        for each, value in zip(axes, by_value, strict=True)
    ]


def _draw_lines(axes: Axes, series: Sequence[Series], x: str, y: str, band: tuple[str, str] | None) -> None:
    for depth, one in enumerate(reversed(series)):
        rows = one.rows.dropna(subset=[y]).sort_values(x)
        if rows.empty:
            continue
        markers = {} if len(rows) > _MANY_POINTS else {"marker": one.look.marker}
        axes.plot(
            rows[x], rows[y], color=one.color, linestyle=one.look.linestyle, zorder=3 + depth / 100,
            markerfacecolor=PAPER if one.look.hollow else one.color, markeredgecolor=one.color, **markers,
        )  # fmt: skip
        if band and set(band) <= set(rows.columns):
            edges = rows.dropna(subset=list(band))
            axes.fill_between(
                edges[x], edges[band[0]], edges[band[1]], color=one.color, alpha=0.16, linewidth=0
            )


def _scale(panels: _Panels, frame: pd.DataFrame, x: str, y: str, logx: bool, logy: bool) -> None:
    for axes, _ in panels:
        x_ticks(axes, x, frame[x], log=logx)
        if logy:
            plain_log(axes, frame[y].dropna())
        else:
            plain_numbers(axes.yaxis)
            axes.set_ylim(bottom=min(0, np.nanmin(frame[y], initial=0)))


def _finish(chart, panels, frame, x, y, hue, title, subtitle, xlabel, ylabel) -> Chart:
    outer_labels([axes for axes, _ in panels], xlabel or column_label(x), ylabel)
    chart.draw_without_rendering()
    mark_failures(panels, x, y)
    everything = series_of(frame, hue)
    labelled = len(panels) == 1 and label_lines(panels[0][0], everything, x, y)
    legends = [] if labelled else [hue_legend(everything)]
    return finish(chart, title, [*legends, machine_legend(everything)], subtitle)
