"""Axes a person can read: 128, 256, 1K along a context length, plain numbers on a logarithm."""

from collections.abc import Iterable

import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import FixedLocator, FuncFormatter, LogLocator, NullFormatter, NullLocator

from cs336_systems.report.words import ordered, value_label

_MOST_TICKS = 12


def x_ticks(axes: Axes, column: str, values: Iterable, *, log: bool) -> None:
    """Tick each measured value when they are few; a logarithm in base 2."""
    values = ordered(values, column)
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    if len(values) <= _MOST_TICKS:
        axes.xaxis.set_major_locator(FixedLocator(values))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: value_label(float(value), column)))


def plain_log(axes: Axes, values: Iterable[float]) -> None:
    """A logarithmic y axis with plain numbers, more of them where it spans little."""
    axes.set_yscale("log")
    values = np.asarray([value for value in values if value > 0], dtype=float)
    decades = np.log10(values.max() / values.min()) if len(values) else 1.0
    subdivisions = (1,) if decades > 3 else (1, 3) if decades > 1.6 else (1, 2, 5)
    axes.yaxis.set_major_locator(LogLocator(subs=subdivisions, numticks=20))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    plain_numbers(axes.yaxis)


def plain_numbers(axis: Axis) -> None:
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
