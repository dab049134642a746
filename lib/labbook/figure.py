"""The figure every plot is drawn on: header, legend, panels, axes; and how a notebook shows it."""

import io
import textwrap
from collections.abc import Callable, Sequence
from functools import cached_property, wraps
from typing import NamedTuple

import numpy as np
import pandas as pd
from IPython import display
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from labbook.labels import column_of, is_text, named_value, ordered, value_label
from labbook.style import MUTED, ZONE, in_style

WIDTH = 9.2  # inches: 1472 pixels at 160 dpi
_SHOWN_WIDTH = 883  # pixels on the page, so that it stays sharp on a dense screen
_EDGE = 0.14  # inches between what is drawn and the edge of the figure
_TITLE = {"size": 14, "weight": "bold", "va": "top", "linespacing": 1.4}
_SUBTITLE = {"size": 10, "color": MUTED, "va": "top", "linespacing": 1.5}
_TITLE_LINE = 0.33  # inches
_SUBTITLE_LINE = 0.26
_MOST_TICKS = 12
NO_ROWS = "no rows yet: run this notebook's Measure section, or `python -m cs336_systems run`"


class Chart(Figure):
    """A figure outside pyplot: a cell that ends with it shows one PNG, the same that is saved."""

    title = ""

    @cached_property
    def png(self) -> bytes:
        """The picture in 256 colours, without date or version: the same for equal rows. Drawn once."""
        canvas = FigureCanvasAgg(self)
        with in_style():
            canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
        picture = picture.quantize(256, dither=Image.Dither.NONE)
        buffer = io.BytesIO()
        picture.save(buffer, "png", dpi=(self.dpi, self.dpi), optimize=True)
        return buffer.getvalue()

    def _ipython_display_(self):
        # The text stands for the picture where notebooks are compared: it says nothing that could change.
        bundle = {"image/png": self.png, "text/plain": "<figure>"}
        metadata = {"image/png": {"width": _SHOWN_WIDTH, "alt": self.title}}
        display.display(bundle, raw=True, metadata=metadata)


class Drawing(NamedTuple):
    """Panels without the words around them: entries of the legend, labels of the outer panels."""

    chart: Chart
    legend: Sequence[Artist] = ()
    xlabel: str = ""
    ylabel: str = ""


def plot(draw: Callable) -> Callable:
    """Make a plot of a function that draws panels from rows: in our style, with the words around the panels.

    The plot has more keyword arguments than the function: title (the finding), subtitle (what was measured,
    with units), xlabel and ylabel (else names of columns). Without rows it says what to run.
    """

    @wraps(draw)
    def draw_with_words(frame, *args, title="", subtitle="", xlabel="", ylabel="", **options):
        with in_style():
            if frame.empty:
                return _with_header(_empty_chart(), (), title, "")
            drawing = draw(frame, *args, **options)
            _label_axes(drawing.chart, xlabel or drawing.xlabel, ylabel or drawing.ylabel)
            return _with_header(drawing.chart, drawing.legend, title, subtitle)

    return draw_with_words


def _empty_chart():
    chart, ((axes, _),) = sheet(height=1.2)
    axes.set(facecolor=ZONE, xticks=[], yticks=[])
    axes.text(0.5, 0.5, NO_ROWS, ha="center", va="center", color=MUTED)
    return chart


def _label_axes(chart, xlabel, ylabel):
    """Name the x axis of the lowest panel of each column, and the y axis of the first of each row."""
    lowest = {axes.get_subplotspec().colspan.start: axes for axes in chart.axes}
    for axes in chart.axes:
        axes.set_xlabel(xlabel if axes in lowest.values() else "")
        axes.set_ylabel(ylabel if axes.get_subplotspec().is_first_col() else "")


def _with_header(chart, handles, title, subtitle):
    """Put title and legend above the panels, which keep their size; lay out once, then freeze."""
    chart.title = title
    panels = chart.get_figheight()
    heading = _heading(chart, title, 84, **_TITLE)
    subheading = _heading(chart, subtitle, 117, **_SUBTITLE)
    legend = _legend(chart, handles)
    # Inches from the upper edge to the top of each part.
    below_heading = _EDGE + _TITLE_LINE * len(heading.get_text().splitlines())
    subheading_lines = subheading.get_text().splitlines()
    below_subheading = below_heading + 0.06 + _SUBTITLE_LINE * len(subheading_lines)
    height = panels + below_subheading
    if legend:
        height += legend.get_window_extent().height / chart.dpi + 0.04
    chart.set_figheight(height)
    heading.set_y(1 - _EDGE / height)
    subheading.set_y(1 - below_heading / height)
    if legend:
        legend.set_bbox_to_anchor((_EDGE / WIDTH, 1 - below_subheading / height))
    chart.get_layout_engine().set(rect=(0, 0, 1, panels / height))
    chart.get_layout_engine().execute(chart)
    chart.set_layout_engine("none")
    return chart


def _heading(chart, text, columns, **font):
    """The text at the left, in lines of so many characters, or as many fewer as do not run off."""
    heading = chart.text(_EDGE / WIDTH, 0, textwrap.fill(text, columns), **font)
    while _runs_off(heading):
        columns -= 1
        heading.set_text(textwrap.fill(text, columns))
    return heading


def _legend(chart, handles):
    """One line of legend; more lines when it would run off the figure; None without entries."""
    for columns in range(len(handles), 0, -1):
        legend = chart.legend(handles=handles, ncols=columns)
        legend.set_in_layout(False)
        if columns == 1 or not _runs_off(legend):
            return legend
        legend.remove()


def _runs_off(artist):
    return artist.get_window_extent().width >= (WIDTH - 2 * _EDGE) * artist.figure.dpi


def sheet(
    frame: pd.DataFrame | None = None,
    facet: str | None = None,
    *,
    height: float = 3.7,
    sharey: bool = True,
) -> tuple[Chart, list]:
    """A chart, and its panels with their rows: a wide one, or one for each value of `facet`."""
    values = ordered(frame[facet], facet) if facet else [None]
    across = 2 if len(values) == 4 else min(len(values), 3)
    down = -(-len(values) // across)
    panel_height = min(height, 3.3) if across > 1 else height
    chart = Chart(figsize=(WIDTH, down * panel_height), layout="constrained")
    chart.get_layout_engine().set(w_pad=_EDGE, h_pad=_EDGE, wspace=0.03, hspace=0.05)
    grid = chart.subplots(down, across, sharey=sharey, squeeze=False).flatten()
    for axes in grid[len(values) :]:
        axes.remove()
    if not facet:
        return chart, [(grid[0], frame)]
    panels = []
    for axes, value in zip(grid, values, strict=False):
        axes.set_title(named_value(facet, value))
        panels.append((axes, frame[frame[facet] == value]))
    return chart, panels


def x_ticks(axes: Axes, column: str, values: pd.Series, *, log: bool) -> None:
    """Tick each measured value when they are few, round ones else, and for fractions on a linear axis.

    log: a logarithmic axis, where the values are numbers.
    """
    distinct = ordered(values, column)
    if is_text(distinct):
        axes.set_xticks(range(len(distinct)), [value_label(value, column) for value in distinct])
        return
    if log:
        _log_scale(axes.set_xscale, axes.xaxis, values, 2)
    else:
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10], integer=True))
    if len(distinct) <= _MOST_TICKS and (log or values.dtype.kind != "f"):
        axes.xaxis.set_major_locator(FixedLocator(distinct))
    plain_numbers(axes.xaxis, column)


def log_y(axes: Axes, values: pd.Series) -> None:
    """A logarithmic y axis with plain numbers, more of them where it spans little."""
    subs = (1, 2, 5) if values.max() <= 100 * values.min() else (1,)
    _log_scale(axes.set_yscale, axes.yaxis, values, 10, subs)
    plain_numbers(axes.yaxis)
    axes.yaxis.set_visible(values.notna().any())


def _log_scale(set_scale, axis, values, base, subs=(1,)):
    """A logarithmic scale; a linear one where it would lose zeros."""
    if values.min() > 0:
        set_scale("log", base=base)
        axis.set_major_locator(LogLocator(subs=subs, numticks=20))
        axis.set_minor_locator(NullLocator())


def plain_numbers(axis: Axis, column: str = "") -> None:
    """1,250 and 0.05 instead of powers of ten, below 0.0009 1e-04; or as the column has its numbers."""
    text = column_of(column).text or _plain
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(float(value))))


def _plain(value):
    return f"{value:.1e}".replace(".0e", "e") if 0 < abs(value) < 9e-4 else f"{value:,.7g}"
