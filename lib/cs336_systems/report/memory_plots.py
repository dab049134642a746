"""Plots of memory: what a step held over time, and what memory costs in time."""

from collections.abc import Sequence

import matplotlib as mpl
import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patheffects import withStroke

from cs336_systems.measure.allocations import CATEGORIES
from cs336_systems.report.figure import NO_ROWS, Chart, finish, placeholder, sheet
from cs336_systems.report.frames import require_columns
from cs336_systems.report.profile_plots import PARTS, part_legend
from cs336_systems.report.style import BLUE, INK, MUTED, PAPER, STYLE, ZONE
from cs336_systems.report.ticks import plain_log, plain_numbers
from cs336_systems.report.words import column_label, significant, value_label


@mpl.rc_context(STYLE)
def memory_timeline(
    held: pd.DataFrame,
    *,
    title: str | None = None,
    subtitle: str | None = None,
    empty: str = NO_ROWS,
) -> Chart:
    """Memory held over time, stacked by category; stages shaded and named, the peak marked.

    Args:
        held: of `measure.allocations.timeline`: at_ms, stage, and MiB a category.

    Raises:
        ValueError: a column is missing.
    """
    if held.empty:
        return placeholder(title, empty)
    require_columns(held, "at_ms", "stage", *CATEGORIES)
    parts = held[list(CATEGORIES)]
    gib = parts.sum(axis=1).max() >= 4096
    parts = parts / (1024 if gib else 1)
    used = [name for name in CATEGORIES if parts[name].max() > 0]
    chart, (axes,) = sheet([None], None, height=4.2)
    axes.stackplot(
        held.at_ms, parts[used].T.to_numpy(), colors=[PARTS["category"][name] for name in used],
        step="post", linewidth=0, zorder=2,
    )  # fmt: skip
    top = parts.sum(axis=1)
    axes.set(xlim=(held.at_ms.min(), held.at_ms.max()), ylim=(0, top.max() * 1.17))
    _shade_stages(axes, held)
    peak = top.idxmax()
    unit = "GiB" if gib else "MiB"
    axes.plot(held.at_ms[peak], top[peak], "o", color=INK, markersize=5, zorder=4)
    ha, away = ("right", -8) if held.at_ms[peak] > 0.7 * held.at_ms.max() else ("left", 8)
    axes.annotate(
        f"peak {significant(top[peak])} {unit}", (held.at_ms[peak], top[peak]), (away, 3),
        textcoords="offset points", ha=ha, weight="bold", size=9.5, color=INK,
        zorder=5, path_effects=[withStroke(linewidth=3, foreground=PAPER)],
    )  # fmt: skip
    axes.set(xlabel="time since the recording began (ms)", ylabel=f"memory ({unit})")
    plain_numbers(axes.xaxis)
    plain_numbers(axes.yaxis)
    return finish(chart, title, [part_legend(used, "category")], subtitle)


def _shade_stages(axes: Axes, held: pd.DataFrame) -> None:
    """Every other stage on a grey ground, its name at the top."""
    runs = (held.stage != held.stage.shift()).cumsum()
    starts = held.groupby(runs).at_ms.min()
    ends = [*starts.iloc[1:], held.at_ms.max()]
    names = held.groupby(runs).stage.first()
    shown = 0
    for name, start, end in zip(names, starts, ends, strict=True):
        if not name:
            continue
        if shown % 2 == 0:
            axes.axvspan(start, end, color=ZONE, linewidth=0, zorder=0.5)
        axes.annotate(
            name, ((start + end) / 2, 1), (0, -5), xycoords=("data", "axes fraction"),
            textcoords="offset points", ha="center", va="top", size=9, color=MUTED, annotation_clip=False,
        )  # fmt: skip
        shown += 1


@mpl.rc_context(STYLE)
def tradeoff(
    frame: pd.DataFrame,
    x: str = "peak_memory_mib",
    y: str = "p50_ms",
    label: str = "case",
    *,
    title: str | None = None,
    subtitle: str | None = None,
    empty: str = NO_ROWS,
) -> Chart:
    """What one thing costs in another: a named point for each row, x from zero, y in decades.

    Raises:
        ValueError: a column is missing.
    """
    if frame.empty:
        return placeholder(title, empty)
    require_columns(frame, x, y, label)
    frame = frame.dropna(subset=[x, y]).sort_values(x)
    if frame.empty:
        return placeholder(title, empty)
    chart, (axes,) = sheet([None], None, height=4.2)
    axes.grid(True, axis="both")
    axes.plot(frame[x], frame[y], "o", color=BLUE, markersize=8, zorder=3)
    plain_log(axes, frame[y])
    axes.set(xlim=(0, frame[x].max() * 1.16), ylim=(frame[y].min() / 2.5, frame[y].max() * 1.4))
    axes.set(xlabel=column_label(x), ylabel=column_label(y))
    plain_numbers(axes.xaxis)
    chart.draw_without_rendering()
    _name_points(axes, frame[[x, y]].to_numpy(float), [value_label(name, label) for name in frame[label]])
    return finish(chart, title, subtitle=subtitle)


def _name_points(axes: Axes, points: np.ndarray, names: Sequence[str]) -> None:
    """A name to the right of each point; slanting below it where that would cover another point or name."""
    dots = axes.transData.transform(points) * 72 / axes.figure.dpi
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in dots]
    merged: dict[int, list[str]] = {}
    for number, dot in enumerate(dots):  # points on top of each other share their names
        same = next(other for other in range(number + 1) if np.abs(dots[other] - dot).max() < 6)
        merged.setdefault(same, []).append(names[number])
    for number, shared in merged.items():
        (x, y), name = dots[number], ", ".join(shared)
        box = (x + 8, y - 6, x + 10 + 5.5 * len(name), y + 6)
        free = not any(_overlap(box, other) for other in taken)
        taken += [box] if free else []
        beside = (
            {"xytext": (10, 0), "va": "center"} if free else {"xytext": (2, -6), "va": "top", "rotation": -35}
        )
        axes.annotate(
            name, tuple(points[number]), textcoords="offset points", size=9.5, color=INK, zorder=4, ha="left",
            rotation_mode="anchor", path_effects=[withStroke(linewidth=3, foreground=PAPER)], **beside,
        )  # fmt: skip


def _overlap(one: tuple[float, ...], other: tuple[float, ...]) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]
