"""Pictures of a training step: what each technique saves, and what memory costs in time."""

import textwrap
from itertools import pairwise

import pandas as pd

from labbook import figure
from labbook.figure import Drawing, plot, sheet
from labbook.labels import column_label, value_label
from labbook.plots import name_bars, total_label, write_above
from labbook.style import BLUE, GREEN, MUTED, VERMILLION, palette


@plot
def waterfall(frame: pd.DataFrame, x: str, y: str) -> Drawing:
    """How a value becomes another, row by row: the first and the last in full, between them each change.

    Green is less than before, red is more.
    """
    chart, ((axes, _),) = sheet()
    values = frame[y].tolist()
    steps = [(0, values[0]), *pairwise(values), (0, values[-1])]
    for place, (start, end) in enumerate(steps):
        whole = place in (0, len(values))
        color = BLUE if whole else GREEN if end <= start else VERMILLION
        axes.bar(place, end - start, 0.74, start, color=color, lw=0)
        write_above(axes, place, max(start, end), total_label(end, y) if whole else f"{end - start:+,.0f}")
        if place < len(values):
            axes.plot([place - 0.37, place + 1.37], [end, end], color=MUTED, lw=0.8)
    names = [*(value_label(value, x) for value in frame[x]), "in the end"]
    name_bars(axes, [textwrap.fill(name, 16) for name in names])
    axes.set_ylim(0, 1.1 * max(values))
    return Drawing(chart, [], column_label(x), column_label(y))


@plot
def tradeoff(frame: pd.DataFrame, x: str, y: str, name: str, hue: str) -> Drawing:
    """What one thing costs in another: a point for each row, and its name beside it."""
    chart, ((axes, _),) = sheet()
    frame, colors = frame.dropna(subset=[x, y]), palette(frame[hue], hue)
    for value, of in frame.groupby(hue):
        axes.scatter(of[x], of[y], 70, colors[value], lw=0, zorder=3, label=value_label(value, hue))
    figure.log_y(axes, frame[y])
    axes.set(xlim=(0, 1.15 * frame[x].max()), ylim=(frame[y].min() / 1.6, 1.6 * frame[y].max()))
    for at, up, text in frame[[x, y, name]].itertuples(index=False):
        beside = frame[x].between(at, 1.2 * at, "right") & (frame[y] / up).between(0.9, 1.1)
        away, ha = (-9, "right") if beside.any() else (9, "left")
        axes.annotate(text, (at, up), (away, 0), textcoords="offset points", va="center", ha=ha)
    return Drawing(chart, axes.get_legend_handles_labels()[0], column_label(x), column_label(y))
