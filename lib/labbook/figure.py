"""The figure every plot is drawn on: header, legend, panels, axes; and how a notebook shows it."""

import io
import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from functools import wraps
from typing import Any, NamedTuple

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, MaxNLocator, NullLocator
from PIL import Image

from labbook.labels import named_value, ordered, value_label
from labbook.style import MUTED, STYLE, ZONE

WIDTH = 9.2  # inches: 1472 pixels at 160 dpi
_SHOWN_WIDTH = 883  # pixels on the page, so that it stays sharp on a dense screen
_EDGE = 0.14  # inches between what is drawn and the edge of the figure
_TITLE = {"size": 14, "weight": "bold", "va": "top", "linespacing": 1.4}
_SUBTITLE = {"size": 10, "color": MUTED, "va": "top", "linespacing": 1.5}
_MOST_TICKS = 12
NO_ROWS = "no rows yet: run this notebook's Measure section, or `python -m cs336_systems run`"


class Chart(Figure):
    """A figure outside pyplot: a cell that ends with it shows one PNG, the same that is saved."""

    title = ""

    def png(self) -> bytes:
        """The picture in 256 colours, without date or version: the same for equal rows."""
        canvas, buffer = FigureCanvasAgg(self), io.BytesIO()
        with mpl.rc_context(STYLE):
            canvas.draw()
        picture = Image.fromarray(np.asarray(canvas.buffer_rgba())[..., :3])
        picture = picture.quantize(256, dither=Image.Dither.NONE)
        picture.save(buffer, "png", dpi=(self.dpi, self.dpi), optimize=True)
        return buffer.getvalue()

    def svg(self) -> bytes:
        """The same picture as vectors, its text as outlines."""
        buffer = io.BytesIO()
        with mpl.rc_context(STYLE):
            self.savefig(buffer, format="svg", metadata={"Date": None, "Creator": None})
        return buffer.getvalue()

    def _ipython_display_(self) -> None:
        from IPython.display import display

        # The text stands for the picture where notebooks are compared: it says nothing that could change.
        bundle = {"image/png": self.png(), "text/plain": "<figure>"}
        display(bundle, raw=True, metadata={"image/png": {"width": _SHOWN_WIDTH, "alt": self.title}})


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
            drawing, subtitle = (drawing, subtitle) if drawing else (_placeholder(), "")
            _label_outer(drawing.chart.axes, xlabel or drawing.xlabel, ylabel or drawing.ylabel)
            return _with_header(drawing.chart, drawing.legend, title, subtitle)

    return drawn


def _placeholder() -> Drawing:
    """What stands where a plot will be once its rows are measured."""
    chart, (axes,) = sheet(height=1.2)
    axes.set_axis_off()
    axes.axhspan(0, 1, color=ZONE)
    axes.text(0.5, 0.5, NO_ROWS, ha="center", va="center", color=MUTED)
    return Drawing(chart)


def _label_outer(panels: Sequence[Axes], xlabel: str, ylabel: str) -> None:
    for axes in panels:
        place = axes.get_subplotspec()
        below = [each for each in panels if each.get_subplotspec().colspan == place.colspan][-1]
        axes.set(xlabel=xlabel if axes is below else "", ylabel=ylabel if place.is_first_col() else "")


def _with_header(chart: Chart, handles: Sequence[Artist], title: str, subtitle: str) -> Chart:
    """Put title and legend above the panels, which keep their size; lay out once, then freeze."""
    chart.title, panels = title, chart.get_figheight()
    finding, told = _lines(chart, title, 84, **_TITLE), _lines(chart, subtitle, 117, **_SUBTITLE)
    top = _EDGE + 0.33 * len(finding) + 0.26 * len(told) + 0.06
    legend = _legend(chart, handles) if handles else None
    height = panels + top + (legend.get_window_extent().height / chart.dpi + 0.04 if legend else 0)
    chart.set_figheight(height)
    left, line = _EDGE / WIDTH, 1 - _EDGE / height
    chart.text(left, line, "\n".join(finding), **_TITLE)
    line -= 0.33 * len(finding) / height
    chart.text(left, line, "\n".join(told), **_SUBTITLE)
    if legend:
        legend.set_bbox_to_anchor((left, 1 - top / height))
    chart.get_layout_engine().set(rect=(0, 0, 1, panels / height))
    chart.draw_without_rendering()
    chart.set_layout_engine("none")
    return chart


def _lines(chart: Chart, text: str, columns: int, **font: Any) -> list[str]:
    """The text in lines of so many characters, or of as many fewer as do not run off the figure."""
    probe = chart.text(0, 0, "", **font)
    while True:
        lines = textwrap.wrap(text, columns)
        probe.set_text("\n".join(lines))
        if probe.get_window_extent().width < (WIDTH - 2 * _EDGE) * chart.dpi:
            probe.remove()
            return lines
        columns -= 1


def _legend(chart: Chart, handles: Sequence[Artist]) -> Legend:
    """One line of legend; more lines when it would run off the figure."""
    for columns in range(len(handles), 0, -1):
        legend = chart.legend(
            handles=handles, ncols=columns, loc="upper left", borderpad=0, borderaxespad=0, handlelength=2.7,
            columnspacing=1.6, handletextpad=0.6,
        )  # fmt: skip
        legend.set_in_layout(False)
        if columns == 1 or legend.get_window_extent().width < (WIDTH - 2 * _EDGE) * chart.dpi:
            break
        legend.remove()
    return legend


def panels_of(frame: pd.DataFrame, facet: str | None) -> dict[Hashable, pd.DataFrame]:
    """The rows of each panel, by the value of `facet` in reading order; one nameless panel without it."""
    if facet is None:
        return {None: frame}
    return {value: frame[frame[facet] == value] for value in ordered(frame[facet], facet)}


def sheet(
    panels: Iterable[Hashable] = (None,), facet: str | None = None, *, height: float = 3.7,
    sharey: bool = True,
) -> tuple[Chart, list[Axes]]:  # fmt: skip
    """A chart and its axes: one wide panel, or small multiples named after their value of `facet`."""
    panels = list(panels)
    columns = len(panels) if len(panels) <= 3 else 2 if len(panels) == 4 else 3
    rows = -(-len(panels) // columns)
    chart = Chart(figsize=(WIDTH, rows * min(height, 3.3 if columns > 1 else height)), layout="constrained")
    chart.get_layout_engine().set(w_pad=_EDGE, h_pad=_EDGE, wspace=0.03, hspace=0.05)
    grid = list(chart.subplots(rows, columns, sharey=sharey, squeeze=False).flatten())
    for axes in grid[len(panels) :]:
        axes.remove()
    for axes, value in zip(grid, panels, strict=False):
        axes.set_title(named_value(facet, value) if facet else "")
        axes.tick_params(axis="x", labelsize=9 if columns == 3 else 10)
    return chart, grid[: len(panels)]


def x_places(values: pd.Series, column: str) -> pd.Series:
    """Where values are on the x axis: numbers where they are, names at equal distances in their order."""
    distinct = ordered(values, column)
    return values.map(distinct.index) if any(isinstance(value, str) for value in distinct) else values


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
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: value_label(float(value), column)))


def log_y(axes: Axes, values: pd.Series) -> None:
    """A logarithmic y axis with plain numbers, more of them where it spans little."""
    values = values[values > 0]
    if values.empty:
        axes.set_yticks([])
        return
    axes.set_yscale("log")
    decades = np.log10(values.max() / values.min())
    axes.yaxis.set_major_locator(
        LogLocator(subs=(1,) if decades > 3 else (1, 3) if decades > 1.6 else (1, 2, 5), numticks=20)
    )
    axes.yaxis.set_minor_locator(NullLocator())
    plain_numbers(axes.yaxis)


def plain_numbers(axis: Axis) -> None:
    """1,250 and 0.05 instead of powers of ten; below a thousandth 1e-04."""

    def text(value: float, _: int) -> str:
        small = 0 < abs(value) < 9e-4
        return f"{value:.1e}".replace(".0e", "e") if small else f"{value:,.6g}"

    axis.set_major_formatter(FuncFormatter(text))
