"""Pictures of scaling on paper: what fits, and who sends what when in a ring."""

from collections.abc import Mapping

import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch
from matplotlib.patheffects import withStroke

from labbook.figure import Drawing, plain_numbers, plot, sheet
from labbook.labels import ordered, value_label
from labbook.plots import lines
from labbook.style import INK, PAPER, VERMILLION, palette


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
