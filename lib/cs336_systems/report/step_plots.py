"""What memory costs in time."""

import pandas as pd

from labbook import figure
from labbook.figure import Drawing, plot, sheet
from labbook.labels import column_label, value_label
from labbook.style import palette


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
