"""Steps of several wrappers under each other: what was computed, and what was communicated meanwhile."""

import matplotlib as mpl
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Patch

from cs336_systems.measure.overlap import LANES, covered, exposed
from cs336_systems.report.figure import NO_ROWS, Chart, finish, placeholder, sheet
from cs336_systems.report.frames import require_columns
from cs336_systems.report.style import (
    GREEN,
    GREY,
    INK,
    ORANGE,
    PURPLE,
    SKY,
    STYLE,
    VERMILLION,
    ZONE,
)
from cs336_systems.report.ticks import plain_numbers
from cs336_systems.report.words import ordered, value_label

# Copies to and from one long tensor are launched while the model communicates.
STAGES = {"forward": SKY, "backward": ORANGE, "communication": PURPLE, "optimizer": GREY}
STAGE_LABELS = {"communication": "copies"}
HIDDEN, EXPOSED = GREEN, VERMILLION
_THINNEST = 0.6  # points: a message of microseconds shows in a step of half a second


@mpl.rc_context(STYLE)
def lanes_timeline(
    frame: pd.DataFrame,
    by: str,
    *,
    between_ms: tuple[float, float] | None = None,
    title: str | None = None,
    subtitle: str | None = None,
    xlabel: str = "time since the step began (ms)",
    empty: str = NO_ROWS,
) -> Chart:
    """One step for each value of `by`: computing above, coloured by stage, communication below it.

    Communication is green while something is computed too, and red where it is exposed. No span is drawn
    thinner than can be seen.

    Args:
        frame: spans with lane, range, start_ms and end_ms, as in `measure.overlap.step_lanes`.
        by: column that tells the steps apart.
        between_ms: look at this part of the steps only.

    Raises:
        ValueError: a column is missing.
    """
    if frame.empty:
        return placeholder(title, empty)
    require_columns(frame, by, "lane", "range", "start_ms", "end_ms")
    start, end = between_ms or (0.0, frame.end_ms.max())
    frame = frame[(frame.end_ms > start) & (frame.start_ms < end)]
    places = ordered(frame[by], by)
    chart, (axes,) = sheet([None], None, height=0.72 * max(len(places), 1.5) + 0.75)
    axes.set(xlim=(start, end), ylim=(len(places) - 0.45, -0.5))
    for place, value in enumerate(places):
        _draw_step(axes, place, frame[frame[by] == value])
    axes.set_yticks(range(len(places)), [value_label(value, by) for value in places])
    axes.grid(False)
    axes.set_xlabel(xlabel)
    plain_numbers(axes.xaxis)
    computed = frame[frame.lane == LANES[0]].assign(ms=frame.end_ms - frame.start_ms)
    times = computed.groupby("range").ms.sum()
    used = set(times[times > 1e-3 * (end - start)].index)  # what can be seen
    stages = [
        Patch(color=color, label=STAGE_LABELS.get(name, name))
        for name, color in STAGES.items()
        if name in used
    ]
    lanes = [
        Patch(color=HIDDEN, label="communication, hidden"),
        Patch(color=EXPOSED, label="communication, exposed"),
    ]
    return finish(chart, title, [stages, lanes], subtitle)


def _draw_step(axes: Axes, place: int, lanes: pd.DataFrame) -> None:
    """Two bars that touch: the eye compares what is above with what is below."""
    axes.axhspan(place - 0.36, place + 0.36, color=ZONE, linewidth=0, zorder=0.5)
    for stage, color in STAGES.items():
        spans = lanes[(lanes.lane == "compute") & (lanes.range == stage)]
        _draw_spans(axes, spans, place - 0.36, color, linewidth=0)
    _draw_spans(axes, covered(lanes[lanes.lane == "communication"]), place, HIDDEN)
    _draw_spans(axes, exposed(lanes), place, EXPOSED)
    axes.axhline(place, color=INK, linewidth=0.6, zorder=3)


def _draw_spans(
    axes: Axes, spans: pd.DataFrame, top: float, color: str, linewidth: float = _THINNEST
) -> None:
    pairs = list(zip(spans.start_ms, spans.end_ms - spans.start_ms, strict=True))
    axes.broken_barh(pairs, (top, 0.36), facecolor=color, edgecolor=color, linewidth=linewidth, zorder=2)
