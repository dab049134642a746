"""The figure every plot is drawn on: header, legend, panels, axes; and how a notebook shows it."""

import io
import textwrap
from collections.abc import Callable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from IPython import display
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.text import Text
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from labbook.labels import COLUMNS, Column, named_value, ordered, value_label
from labbook.style import MUTED, STYLE, ZONE

WIDTH = 9.2  # inches: 1472 pixels at 160 dpi
_SHOWN_WIDTH = 883  # pixels on the page, so that it stays sharp on a dense screen
_EDGE = 0.14  # inches between what is drawn and the edge of the figure
_TITLE = {"size": 14, "weight": "bold", "va": "top", "linespacing": 1.4}
_SUBTITLE = {"size": 10, "color": MUTED, "va": "top", "linespacing": 1.5}
_TITLE_LINE, _SUBTITLE_LINE = 0.33, 0.26  # inches
_MOST_TICKS = 12
NO_ROWS = "no rows yet: run this notebook's Measure section, or `python -m cs336_systems run`"


class Chart(Figure):
    """A figure outside pyplot: a cell that ends with it shows one PNG, the same that is saved."""

    title, _png = "", b""

    def png(self) -> bytes:
        """The picture in 256 colours, without date or version: the same for equal rows. Drawn once."""
        if not self._png:
            canvas, buffer = FigureCanvasAgg(self), io.BytesIO()
            with mpl.rc_context(STYLE):
                canvas.draw()
            picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
            picture = picture.quantize(256, dither=Image.Dither.NONE)
            picture.save(buffer, "png", dpi=(self.dpi, self.dpi), optimize=True)
            self._png = buffer.getvalue()
        return self._png

    def svg(self) -> bytes:
        """The same picture as vectors, its text as outlines."""
        buffer = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue()

    def _ipython_display_(self) -> None:
        # The text stands for the picture where notebooks are compared: it says nothing that could change.
        bundle = {"image/png": self.png(), "text/plain": "<figure>"}
        display.display(
            bundle, raw=True, metadata={"image/png": {"width": _SHOWN_WIDTH, "alt": self.title}}
        )


class Drawing(NamedTuple):
    """Panels without the words around them: entries of the legend, labels of the outer panels."""

    chart: Chart
    legend: Sequence[Artist] = ()
    xlabel: str = ""
    ylabel: str = ""


def plot(draw: Callable[..., Drawing | None]) -> Callable[..., Chart]:
    """Make a plot of a function that draws panels from rows: in our style, with the words around the panels.

    The plot has more keyword arguments than the function: title (the finding), subtitle (what was measured,
    with units), xlabel and ylabel (else names of columns). Without rows it says what to run.
    """

    @wraps(draw)
    def drawn(
        frame: pd.DataFrame, *args: Any, title: str = "", subtitle: str = "", xlabel: str = "",
        ylabel: str = "", **options: Any,
    ) -> Chart:  # fmt: skip
        with mpl.rc_context(STYLE):
            drawing = None if frame.empty else draw(frame, *args, **options)
            if drawing is None:
                chart, ((axes, _),) = sheet(height=1.2)
                axes.set(facecolor=ZONE, xticks=[], yticks=[])
                axes.text(0.5, 0.5, NO_ROWS, ha="center", va="center", color=MUTED)
                return _with_header(chart, (), title, "")
            panels = drawing.chart.axes
            for axes in panels:
                place = axes.get_subplotspec()
                below = [
                    each for each in panels if each.get_subplotspec().colspan == place.colspan
                ][-1]
                axes.set_xlabel((xlabel or drawing.xlabel) if axes is below else "")
                axes.set_ylabel((ylabel or drawing.ylabel) if place.is_first_col() else "")
            return _with_header(drawing.chart, drawing.legend, title, subtitle)

    return drawn


def _with_header(chart: Chart, handles: Sequence[Artist], title: str, subtitle: str) -> Chart:
    """Put title and legend above the panels, which keep their size; lay out once, then freeze."""
    chart.title, panels = title, chart.get_figheight()
    finding, told = (
        _heading(chart, title, 84, **_TITLE),
        _heading(chart, subtitle, 117, **_SUBTITLE),
    )
    tops = [_EDGE, _TITLE_LINE * bool(title) * (1 + finding.get_text().count("\n"))]
    tops += [0.06 + _SUBTITLE_LINE * bool(subtitle) * (1 + told.get_text().count("\n"))]
    legend = _legend(chart, handles) if handles else None
    height = (
        panels + sum(tops) + (legend.get_window_extent().height / chart.dpi + 0.04 if legend else 0)
    )
    chart.set_figheight(height)
    below, line, bottom = (1 - top / height for top in np.cumsum(tops))
    finding.set_y(below)
    told.set_y(line)
    if legend:
        legend.set_bbox_to_anchor((_EDGE / WIDTH, bottom))
    chart.get_layout_engine().set(rect=(0, 0, 1, panels / height))
    chart.get_layout_engine().execute(chart)
    chart.set_layout_engine("none")
    return chart


def _heading(chart: Chart, text: str, columns: int, **font: Any) -> Text:
    """The text at the left, in lines of so many characters, or as many fewer as do not run off."""
    heading = chart.text(_EDGE / WIDTH, 0, "\n".join(textwrap.wrap(text, columns)), **font)
    while _runs_off(heading, chart):
        columns -= 1
        heading.set_text("\n".join(textwrap.wrap(text, columns)))
    return heading


def _legend(chart: Chart, handles: Sequence[Artist]) -> Legend:
    """One line of legend; more lines when it would run off the figure."""
    for columns in range(len(handles), 0, -1):
        legend = chart.legend(
            handles=handles, ncols=columns, loc="upper left", borderpad=0, borderaxespad=0, handlelength=2.7,
            columnspacing=1.6, handletextpad=0.6,
        )  # fmt: skip
        legend.set_in_layout(False)
        if columns == 1 or not _runs_off(legend, chart):
            return legend
        legend.remove()


def _runs_off(artist: Artist, chart: Chart) -> bool:
    return artist.get_window_extent().width >= (WIDTH - 2 * _EDGE) * chart.dpi


def sheet(
    frame: pd.DataFrame | None = None,
    facet: str | None = None,
    *,
    height: float = 3.7,
    sharey: bool = True,
) -> tuple[Chart, list[tuple[Axes, pd.DataFrame]]]:
    """A chart, and its panels with their rows: a wide one, or one for each value of `facet`."""
    values = ordered(frame[facet], facet) if facet else [None]
    columns = len(values) if len(values) <= 3 else 2 if len(values) == 4 else 3
    rows = -(-len(values) // columns)
    chart = Chart(
        figsize=(WIDTH, rows * min(height, 3.3 if columns > 1 else height)), layout="constrained"
    )
    chart.get_layout_engine().set(w_pad=_EDGE, h_pad=_EDGE, wspace=0.03, hspace=0.05)
    grid = chart.subplots(rows, columns, sharey=sharey, squeeze=False).flatten()
    for axes in grid[len(values) :]:
        axes.remove()
    for axes, value in zip(grid, values, strict=False):
        axes.set_title(named_value(facet, value) if facet else "")
        axes.tick_params(axis="x", labelsize=9 if columns == 3 else 10)
    panels = [frame[frame[facet] == value] if facet else frame for value in values]
    return chart, list(zip(grid, panels, strict=False))


def x_ticks(axes: Axes, column: str, values: pd.Series, *, log: bool) -> None:
    """Tick each measured value when they are few, round ones else; `log`: where they are numbers."""
    distinct = ordered(values, column)
    if any(isinstance(value, str) for value in distinct):
        axes.set_xticks(range(len(distinct)), [value_label(value, column) for value in distinct])
        return
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    few = len(distinct) <= _MOST_TICKS and (log or values.dtype.kind != "f")
    many = LogLocator(10) if log else MaxNLocator(8, steps=[1, 2, 5, 10], integer=True)
    axes.xaxis.set_major_locator(FixedLocator(distinct) if few else many)
    plain_numbers(axes.xaxis, column)


def log_y(axes: Axes, values: pd.Series) -> None:
    """A logarithmic y axis with plain numbers, more of them where it spans little."""
    values = values[values > 0]
    if values.empty:
        axes.set_yticks([])
        return
    axes.set_yscale("log")
    decades = np.log10(values.max() / values.min())
    subs = (1,) if decades > 3 else (1, 3) if decades > 1.6 else (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=subs, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    plain_numbers(axes.yaxis)


def plain_numbers(axis: Axis, column: str = "") -> None:
    """1,250 and 0.05 instead of powers of ten, below a thousandth 1e-04; or as the column has its numbers."""
    text = COLUMNS.get(column, Column()).text or _plain
    axis.set_major_formatter(FuncFormatter(lambda value, _: text(float(value))))


def _plain(value: float) -> str:
    return f"{value:.1e}".replace(".0e", "e") if 0 < abs(value) < 9e-4 else f"{value:,.7g}"
