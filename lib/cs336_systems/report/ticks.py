"""Axes a person can read: 128, 256, 1K along a context length, plain numbers on a logarithm."""

from collections.abc import Iterable

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.ticker import (
    FixedLocator,
    FuncFormatter,
    LogFormatterSciNotation,
    LogLocator,
    MaxNLocator,
    NullLocator,
)

from cs336_systems.report.words import ordered, value_label

_MOST_TICKS = 12
_TINY = 1e-4  # plain numbers below this are mostly zeros


def x_ticks(axes: Axes, column: str, values: pd.Series, *, log: bool) -> pd.Series:
    """Tick each measured value when they are few, round ones else; names stand at equal distances.

    Returns:
        Where each of `values` is on the axis.
    """
    distinct = ordered(values, column)
    if any(isinstance(value, str) for value in distinct):
        axes.set_xticks(range(len(distinct)), [value_label(value, column) for value in distinct])
        return values.map({value: place for place, value in enumerate(distinct)})
    if log:
        axes.set_xscale("log", base=2)
        axes.xaxis.set_minor_locator(NullLocator())
    many = LogLocator(10) if log else MaxNLocator(8, steps=[1, 2, 5, 10], integer=True)
    axes.xaxis.set_major_locator(FixedLocator(distinct) if len(distinct) <= _MOST_TICKS else many)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: value_label(float(value), column)))
    return values


def plain_log(axes: Axes, values: Iterable[float]) -> None:
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
