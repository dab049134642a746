"""The figure every plot is drawn on: header, legend, panels, axes; and how a notebook shows it."""

import inspect
import io
import textwrap
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Rectangle
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogFormatterSciNotation,
    LogLocator,
    MaxNLocator,
    NullLocator,
)
from PIL import Image

from cs336_systems.report.labels import named_value, ordered, value_label
from cs336_systems.report.style import INK, MUTED, STYLE, ZONE

WIDTH = 9.2  # inches: 1472 pixels at 160 dpi
_SHOWN_WIDTH = 883  # pixels on the page, so that it stays sharp on a dense screen
_EDGE = 0.14  # inches between the header and the edge of the figure
NO_ROWS = "no rows yet: run this notebook's Measure section, or `python -m cs336_systems run`"
_WORDS = ("title", "subtitle", "xlabel", "ylabel", "empty")
_MOST_TICKS = 12
_TINY = 1e-4  # plain numbers below this are mostly zeros


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


def panels_of(frame: pd.DataFrame, facet: str | None) -> dict[Hashable, pd.DataFrame]:
    """The rows of each panel, by the value of `facet` in reading order; one nameless panel without it."""
    if facet is None:
        return {None: frame}
    return {value: frame[frame[facet] == value] for value in ordered(frame[facet], facet)}


def sheet(
    panels: Iterable[Hashable] = (None,),
    facet: str | None = None,
    *,
    height: float = 3.7,
    sharey: bool = True,
) -> tuple[Chart, list[Axes]]:
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


@dataclass(frozen=True)
class Drawing:
    """Panels without the words around them.

    Attributes:
        legend: groups of entries; a group stays on one line if it can.
        xlabel, ylabel: for the outer panels.
        subtitle: where the caller gives none.
    """

    chart: Chart
    legend: Sequence[Sequence[Artist]] = ()
    xlabel: str = ""
    ylabel: str = ""
    subtitle: str = ""


def plot(draw: Callable[..., Drawing | None]) -> Callable[..., Chart]:
    """Make a plot of a function that draws panels from rows: in our style, with the words around the panels.

    The plot has more keyword arguments than the function: title (the finding), subtitle (what was measured,
    with units), xlabel and ylabel (else names of columns), empty (what to say where there are no rows).
    """

    @wraps(draw)
    def drawn(frame: pd.DataFrame, *args: Any, empty: str = NO_ROWS, **options: Any) -> Chart:
        words = {name: options.pop(name, None) for name in _WORDS[:-1]}
        with mpl.rc_context(STYLE):
            drawing = None if frame.empty else draw(frame, *args, **options)
            if drawing is None:
                return _finish(_placeholder(empty), title=words["title"])
            return _finish(drawing, **words)

    keyword = inspect.Parameter.KEYWORD_ONLY
    own = inspect.signature(draw)
    more = [inspect.Parameter(name, keyword, default=None, annotation="str | None") for name in _WORDS]
    drawn.__signature__ = own.replace(parameters=[*own.parameters.values(), *more], return_annotation=Chart)
    return drawn


def _placeholder(hint: str) -> Drawing:
    """What stands where a plot will be once its rows are measured."""
    chart, (axes,) = sheet(height=1.2)
    axes.set_axis_off()
    axes.add_artist(Rectangle((0, 0), 1, 1, transform=axes.transAxes, color=ZONE))
    axes.text(0.5, 0.5, hint, ha="center", va="center", color=MUTED, transform=axes.transAxes)
    return Drawing(chart)


def _finish(
    drawing: Drawing,
    title: str | None,
    subtitle: str | None = None,
    xlabel: str | None = None,
    ylabel: str | None = None,
) -> Chart:
    """Put title and legend above the panels, which keep their size; lay out once, then freeze."""
    chart = drawing.chart
    chart.title = title or ""
    _label_outer(chart.axes, xlabel or drawing.xlabel, ylabel or drawing.ylabel)
    panels, header = chart.get_figheight(), _EDGE
    placed: list[tuple[Artist, float, float]] = []  # inches from the left and from the top
    for text, size, weight, color, line in (
        (title, 14, "bold", INK, 0.33),
        (subtitle or drawing.subtitle, 10, "normal", MUTED, 0.26),
    ):
        for part in textwrap.wrap(text or "", width=int(1170 / size)):
            written = chart.text(0, 0, part, size=size, weight=weight, color=color, va="top")
            placed.append((written, _EDGE, header))
            header += line
    left, line = _EDGE, 0.0
    for legend in [_legend(chart, group) for group in drawing.legend if group]:
        width, height = (side / chart.dpi for side in legend.get_window_extent().bounds[2:])
        if line and left + width > WIDTH - _EDGE:
            left, header = _EDGE, header + line
        placed.append((legend, left, header))
        left, line = left + width + 0.25, height + 0.1
    header += max(line - 0.06, 0)
    chart.set_figheight(panels + header)
    for artist, x, y in placed:
        place = (x / WIDTH, 1 - y / (panels + header))
        artist.set_bbox_to_anchor(place) if isinstance(artist, Legend) else artist.set_position(place)
    chart.get_layout_engine().set(rect=(0, 0, 1, panels / (panels + header)))
    chart.draw_without_rendering()
    chart.set_layout_engine("none")
    return chart


def _label_outer(panels: Sequence[Axes], xlabel: str, ylabel: str) -> None:
    for axes in panels:
        place = axes.get_subplotspec()
        below = [each for each in panels if each.get_subplotspec().colspan == place.colspan][-1]
        axes.set(xlabel=xlabel if axes is below else "", ylabel=ylabel if place.is_first_col() else "")


def _legend(chart: Chart, handles: Sequence[Artist]) -> Legend:
    """One line of legend; more lines when it would run off the figure."""
    for columns in range(len(handles), 0, -1):
        legend = chart.legend(
            handles=handles, ncols=columns, loc="upper left", borderpad=0, borderaxespad=0, handlelength=2.7,
            columnspacing=1.6, handletextpad=0.6, labelcolor=INK,
        )  # fmt: skip
        legend.set_in_layout(False)
        if columns == 1 or legend.get_window_extent().width < (WIDTH - 2 * _EDGE) * chart.dpi:
            break
        legend.remove()
    return legend


def x_places(values: pd.Series, column: str) -> pd.Series:
    """Where values are on the x axis: numbers where they are, names at equal distances in their order."""
    distinct = ordered(values, column)
    if any(isinstance(value, str) for value in distinct):
        return values.map({value: place for place, value in enumerate(distinct)})
    return values


def x_ticks(axes: Axes, column: str, values: pd.Series, *, log: bool) -> None:
    """Tick each measured value when they are few, round ones else; `log`: where they are numbers."""
    distinct = ordered(values, column)
    if any(isinstance(value, str) for value in distinct):
        axes.set_xticks(range(len(distinct)), [value_label(value, column) for value in distinct])
        return
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    many = LogLocator(10) if log else MaxNLocator(8, steps=[1, 2, 5, 10], integer=True)
    axes.xaxis.set_major_locator(FixedLocator(distinct) if len(distinct) <= _MOST_TICKS else many)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: value_label(float(value), column)))


def log_y(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic y axis: plain numbers, powers of ten where they are tiny, more where it spans little."""
    sizes = [value for value in values if value > 0]
    if not sizes:
        axes.set_yticks([])
        return
    axes.set_yscale("log")
    decades = np.log10(max(sizes) / min(sizes))
    tiny = min(sizes) < _TINY and decades > 1
    subdivisions = (1,) if tiny or decades > 3 else (1, 3) if decades > 1.6 else (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=subdivisions, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    if tiny:
        axes.yaxis.set_major_formatter(LogFormatterSciNotation())
    else:
        plain_numbers(axes.yaxis)


def plain_numbers(axis: Axis) -> None:
    """1,250 and 0.05 instead of powers of ten."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
