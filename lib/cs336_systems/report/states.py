"""Plots of a computation's state, step by step: a panel for each quantity, each with an axis of its own."""

from collections.abc import Iterable, Mapping

import matplotlib as mpl
import pandas as pd

from cs336_systems.report.figure import NO_ROWS, Chart, finish, outer_labels, placeholder, sheet
from cs336_systems.report.frames import require_columns
from cs336_systems.report.series import hue_legend, series_of
from cs336_systems.report.style import STYLE
from cs336_systems.report.ticks import plain_log, plain_numbers, x_ticks
from cs336_systems.report.words import column_label


@mpl.rc_context(STYLE)
def states(
    frame: pd.DataFrame,
    x: str,
    quantities: Mapping[str, str],
    hue: str | None = None,
    *,
    logarithmic: Iterable[str] = (),
    title: str | None = None,
    subtitle: str | None = None,
    xlabel: str | None = None,
    empty: str = NO_ROWS,
) -> Chart:
    """What each quantity is after each step, as stairs: it stays until the next step changes it.

    Args:
        frame: one row for each x and hue.
        quantities: columns, and what to call them above their panels.
        logarithmic: those of them with a logarithmic axis; what is not above zero is not drawn there.

    Raises:
        ValueError: a column is missing.
    """
    if frame.empty:
        return placeholder(title, empty)
    require_columns(frame, x, *quantities, hue)
    chart, panels = sheet(list(quantities.values()), "quantity", height=3.2, sharey=False)
    series = series_of(frame, hue)
    for axes, column in zip(panels, quantities, strict=True):
        x_ticks(axes, x, frame[x], log=False)
        for one in series:
            rows = one.rows[one.rows[column] > 0] if column in logarithmic else one.rows
            axes.step(rows[x], rows[column], where="post", color=one.color, linewidth=1.4, alpha=0.6)
            axes.plot(rows[x], rows[column], "o", color=one.color)
        if column in logarithmic:
            plain_log(axes, frame[column])
        else:
            plain_numbers(axes.yaxis)
    outer_labels(panels, xlabel or column_label(x), "")
    return finish(chart, title, [hue_legend(series)], subtitle)
