"""The sheet every plot is drawn on: header, legend, panels; how a notebook shows it and how it is saved."""

import io
import os
import textwrap
from collections.abc import Hashable, Sequence
from pathlib import Path

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.patches import Rectangle
from PIL import Image

from cs336_systems.measure.files import figures_dir, make_folder
from cs336_systems.report.style import INK, MUTED, STYLE, ZONE
from cs336_systems.report.words import named_value, ordered

WIDTH = 9.2  # inches: 1472 pixels at 160 dpi
_SHOWN_WIDTH = 883  # pixels on the page, so that it stays sharp on a dense screen
_EDGE = 0.14  # inches between the header and the edge of the sheet
NO_ROWS = "no rows yet: run this notebook's Measure section, or `python -m cs336_systems run`"


class Chart(Figure):
    """A figure outside pyplot: a cell that ends with it shows one PNG, the same bytes that `save` writes."""

    title = ""

    def png(self) -> bytes:
        """The picture, without date or version: equal bytes for equal rows."""
        canvas = FigureCanvasAgg(self)
        with mpl.rc_context(STYLE):
            canvas.draw()
        buffer = io.BytesIO()
        picture = _with_few_colors(np.asarray(canvas.buffer_rgba())[..., :3])
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


def _with_few_colors(pixels: np.ndarray) -> Image.Image:
    """The 256 most frequent colours exactly, the rest by the nearest of them: a third of the bytes."""
    packed = pixels.astype(np.int32) @ [1 << 16, 1 << 8, 1]
    colors, inverse, counts = np.unique(packed, return_inverse=True, return_counts=True)
    rgb = np.stack([colors >> 16, colors >> 8 & 255, colors & 255], axis=-1)
    kept = rgb[np.argsort(-counts, kind="stable")[:256]]
    nearest = np.square(rgb[:, None] - kept).sum(axis=-1).argmin(axis=-1)
    picture = Image.fromarray(nearest.astype(np.uint8)[inverse.reshape(packed.shape)])
    picture.putpalette(kept.astype(np.uint8).tobytes())
    return picture


def panels_of(frame: pd.DataFrame, facet: str | None) -> dict[Hashable, pd.DataFrame]:
    """The rows of each panel, by the value of `facet` in reading order; one nameless panel without it."""
    if facet is None:
        return {None: frame}
    return {value: frame[frame[facet] == value] for value in ordered(frame[facet], facet)}


def sheet(
    panels: Sequence[Hashable], facet: str | None, *, height: float = 3.7, sharey: bool = True
) -> tuple[Chart, list[Axes]]:
    """A chart and its axes: one wide panel, or small multiples named after their value of `facet`."""
    count = len(panels)
    columns = count if count <= 3 else 2 if count == 4 else 3
    rows = -(-count // columns)
    chart = Chart(figsize=(WIDTH, rows * min(height, 3.3 if columns > 1 else height)), layout="constrained")
    chart.get_layout_engine().set(w_pad=_EDGE, h_pad=_EDGE, wspace=0.03, hspace=0.05)
    grid = chart.subplots(rows, columns, sharey=sharey, squeeze=False).flatten()
    for axes in grid[count:]:
        axes.remove()
    for axes, value in zip(grid, panels, strict=False):
        axes.set_title(named_value(facet, value) if facet else "")
        axes.tick_params(axis="x", labelsize=9 if columns == 3 else 10)
    return chart, list(grid[:count])


def outer_labels(axes: Sequence[Axes], xlabel: str, ylabel: str) -> None:
    """Name the axes where the grid ends: y on the left, x below."""
    for each in axes:
        place = each.get_subplotspec()
        below = [other for other in axes if other.get_subplotspec().colspan.start == place.colspan.start]
        if place.is_first_col():
            each.set_ylabel(ylabel)
        if each is below[-1]:
            each.set_xlabel(xlabel)


def finish(
    chart: Chart, title: str | None, legends: Sequence[Sequence[Artist]] = (), subtitle: str | None = None
) -> Chart:
    """Put title and legends above the panels, which keep their size; lay out once, then freeze."""
    chart.title = title or ""
    panels, header = chart.get_figheight(), _EDGE
    placed: list[tuple[Artist, float, float]] = []  # inches from the left and from the top
    for text, size, weight, color, line in (
        (title, 14, "bold", INK, 0.33),
        (subtitle, 10, "normal", MUTED, 0.26),
    ):
        for part in textwrap.wrap(text, width=int(1170 / size)) if text else []:
            placed.append(
                (chart.text(0, 0, part, size=size, weight=weight, color=color, va="top"), _EDGE, header)
            )
            header += line
    left, line = _EDGE, 0.0
    for legend in [_legend(chart, handles) for handles in legends if handles]:
        width, height = (side / chart.dpi for side in legend.get_window_extent().bounds[2:])
        if line and left + width > WIDTH - _EDGE:
            left, header = _EDGE, header + line
        placed.append((legend, left, header))
        left, line = left + width + 0.4, height + 0.1
    header += max(line - 0.06, 0)
    chart.set_figheight(panels + header)
    for artist, x, y in placed:
        place = (x / WIDTH, 1 - y / (panels + header))
        artist.set_bbox_to_anchor(place) if isinstance(artist, Legend) else artist.set_position(place)
    chart.get_layout_engine().set(rect=(0, 0, 1, panels / (panels + header)))
    chart.draw_without_rendering()
    chart.set_layout_engine("none")
    return chart


def _legend(chart: Chart, handles: Sequence[Artist]) -> Legend:
    """One line of legend; more lines when it would run off the sheet."""
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


@mpl.rc_context(STYLE)
def placeholder(title: str | None, hint: str = NO_ROWS) -> Chart:
    """What stands where a plot will be once its rows are measured."""
    chart, (axes,) = sheet([None], None, height=1.2)
    axes.set_axis_off()
    axes.add_artist(Rectangle((0, 0), 1, 1, transform=axes.transAxes, color=ZONE))
    axes.text(0.5, 0.5, hint, ha="center", va="center", color=MUTED, transform=axes.transAxes)
    return finish(chart, title)


def save(fig: Chart, slug: str, stem: str, machine: str) -> Chart:
    """Write the chart to figures/<machine>/<slug>/<stem>.png and .svg, whole or not at all, and hand it back.

    A cell that ends with `save(...)` shows the chart once. Equal rows give equal bytes.
    """
    folder = make_folder(figures_dir() / machine / slug)
    for suffix, content in ((".png", fig.png()), (".svg", fig.svg())):
        _write_atomically(folder / f"{stem}{suffix}", content)
    return fig


def _write_atomically(path: Path, content: bytes) -> None:
    unfinished = path.with_name(f".{path.name}.{os.getpid()}")
    unfinished.write_bytes(content)
    os.replace(unfinished, path)
