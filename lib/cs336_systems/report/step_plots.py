"""Pictures of a training step: what each technique saves, and what memory costs in time."""

import textwrap
from itertools import pairwise

import pandas as pd

from labbook import figure
from labbook.figure import Drawing, plain_numbers, plot, sheet
from labbook.labels import column_label, value_label
from labbook.plots import name_bars, total_label, write_above
from labbook.style import BLUE, GREEN, INK, MUTED, VERMILLION


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
def tradeoff(frame: pd.DataFrame, x: str, y: str, name: str) -> Drawing:
    """What one thing costs in another: a point for each row, and its name; points in one place share it."""
    chart, ((axes, _),) = sheet()
    frame = frame.dropna(subset=[x, y])
    axes.scatter(frame[x], frame[y], color=BLUE, s=70, linewidth=0, zorder=3)
    figure.log_y(axes, frame[y])
    plain_numbers(axes.xaxis)
    axes.set(xlim=(0, 1.15 * frame[x].max()), ylim=(frame[y].min() / 1.6, 1.6 * frame[y].max()))
    same = [(frame[x] / frame[x].max()).round(2), (frame[y] / frame[y].max()).round(2)]
    for _, points in frame.groupby(same):
        place, text = tuple(points[[x, y]].mean()), ", ".join(points[name])
        axes.annotate(text, place, (9, 0), textcoords="offset points", va="center", color=INK)
    return Drawing(chart, [], column_label(x), column_label(y))
