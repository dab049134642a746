"""Pictures of scaling on paper: what a step is bound by, what fits, who sends what when in a ring."""

from collections.abc import Mapping

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

from labbook.figure import Drawing, plain_numbers, plot, sheet
from labbook.labels import column_label, ordered, value_label
from labbook.plots import lines
from labbook.style import BLACK, GREEN, INK, PAPER, VERMILLION, palette

COMPUTE, COMMUNICATION = "bound by compute", "bound by communication"
_TINTS = {COMMUNICATION: "#F9E2D3", COMPUTE: "#D3EEE3"}  # light enough to write on


@plot
def region(
    grid: pd.DataFrame, x: str, y: str, ratio: str = "ratio", *, points: pd.DataFrame | None = None,
    marks: Mapping[str, tuple[float, float]] | None = None, facet: str | None = None,
) -> Drawing:  # fmt: skip
    """Where compute takes longer than communication, both axes logarithmic; the border is a line.

    Args:
        grid: the closed form on a grid: x, y and ratio, the time of compute over that of communication.
        points: the same columns, simulated or measured, drawn over it as dots.
        marks: places to name, in every panel.
    """
    chart, panels = sheet(grid, facet, height=4.2)
    for axes, rows in panels:
        table = rows.pivot(index=y, columns=x, values=ratio)
        place = (table.columns.to_numpy(float), table.index.to_numpy(float), table.to_numpy(float))
        axes.contourf(*place, levels=[0, 1, np.inf], colors=[*_TINTS.values()], zorder=0)
        axes.contour(*place, levels=[1], colors=[BLACK], linewidths=1.6, zorder=2)
        axes.set(xscale="log", xlim=(place[0].min(), place[0].max()))
        axes.set(yscale="log", ylim=(place[1].min(), place[1].max()))
        for axis in (axes.xaxis, axes.yaxis):
            decades = np.log10(np.divide(*axis.get_view_interval()[::-1]))
            axis.set_major_locator(LogLocator(subs=(1,) if decades > 4 else (1, 2, 5), numticks=20))
            axis.set_minor_locator(NullLocator())
            axis.set_major_formatter(FuncFormatter(_count))
        axes.grid(False)
        if points is not None:
            dots = points if facet is None else points[points[facet] == rows[facet].iloc[0]]
            colors = np.where(dots[ratio] >= 1, GREEN, VERMILLION)
            axes.scatter(
                dots[x], dots[y], c=colors, s=30, edgecolors=PAPER, linewidths=0.8, zorder=3, clip_on=False
            )
        _mark(axes, marks or {})
    legend = [Patch(color=tint, label=name) for name, tint in _TINTS.items()]
    legend.append(Line2D([], [], color=BLACK, linewidth=1.6, label="closed form: equally long"))
    if points is not None:
        legend += [
            Line2D([], [], linestyle="", marker="o", color=color, label=f"simulated: {name}")
            for color, name in ((GREEN, COMPUTE), (VERMILLION, COMMUNICATION))
        ]
    return Drawing(chart, legend, column_label(x), column_label(y))


def _count(value: float, _: object) -> str:
    return f"{value:,.6g}" if value < 1e6 else f"{value / 1e6:,g} M"


@plot
def limit_lines(
    frame: pd.DataFrame, x: str, y: str, hue: str | None = None, *, limit: tuple[str, float],
    marks: Mapping[str, tuple[float, float]] | None = None,
) -> Drawing:  # fmt: skip
    """`lines` under a limit, which is a named level; places to name are marked."""
    drawing = lines.__wrapped__(frame, x, y, hue, band=None)
    (axes,) = drawing.chart.axes
    name, level = limit
    axes.axhline(level, color=VERMILLION, linewidth=1.6, zorder=1.5)
    axes.annotate(
        name, (0, level), (4, -4), xycoords=axes.get_yaxis_transform(), textcoords="offset points",
        va="top", color=VERMILLION, weight="bold", size=9,
    )  # fmt: skip
    _mark(axes, marks or {})
    return drawing


def _mark(axes: Axes, marks: Mapping[str, tuple[float, float]]) -> None:
    for name, at in marks.items():
        axes.plot(*at, "D", color=INK, markersize=7, markeredgecolor=PAPER, zorder=4)
        axes.annotate(
            name, at, (8, -7), textcoords="offset points", va="top", weight="bold", size=9,
            path_effects=[withStroke(linewidth=3, foreground=PAPER)], zorder=5,
        )  # fmt: skip


@plot
def ring_timeline(sends: pd.DataFrame, by: str, color: str) -> Drawing:
    """Who sends what when: a panel for each algorithm, a lane for each device, a box for each message.

    Args:
        sends: rows of messages: device, start and end (any unit of time), `color` (what the box is coloured
            by) and text (written into it).
        by: column of the algorithms.
    """
    colors = palette(sorted(sends[color].astype(str)), color)
    chart, panels = sheet(sends, by, height=3.1)
    for axes, rows in panels:
        devices = ordered(rows["device"])
        for row in rows.to_dict("records"):
            width = row["end"] - row["start"]
            axes.barh(
                devices.index(row["device"]), width, 0.78, row["start"], color=colors[str(row[color])],
                edgecolor=PAPER, linewidth=1.5,
            )  # fmt: skip
            middle = (row["start"] + width / 2, devices.index(row["device"]))
            axes.annotate(row["text"], middle, ha="center", va="center", color=PAPER, size=9, weight="bold")
        axes.set(ylim=(len(devices) - 0.5, -0.5), xlim=(0, sends["end"].max() * 1.02))
        axes.set_yticks(range(len(devices)), [value_label(device) for device in devices])
        axes.grid(False)
        plain_numbers(axes.xaxis)
    legend = [Patch(color=shade, label=f"{color} {value}") for value, shade in colors.items()]
    return Drawing(chart, legend, "time", "")
