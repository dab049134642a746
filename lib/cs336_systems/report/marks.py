"""Marks written onto a panel: where a measurement ran out of memory, and which line is which."""

from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.ticker import FixedLocator

from cs336_systems.report.series import Series
from cs336_systems.report.style import MUTED, ZONE, text_color
from cs336_systems.report.words import STATUS_WORDS

_WORD_POINTS, _CROSS_POINTS = 12, 11
_LABEL_GAP = 13.0  # points between two labels
_LABEL_REACH = 16.0  # points a label may be moved off the end of its line
_MOST_LABELS = 8


def _failures(rows: pd.DataFrame, y: str) -> pd.DataFrame:
    """Rows with a status instead of a number."""
    return rows[rows[y].isna() & (rows["status"] != "ok")] if "status" in rows else rows.iloc[:0]


def mark_failures(panels: Sequence[tuple[Axes, Sequence[Series]]], x: str, y: str) -> None:
    """A cross in the line's colour in a zone above the data, under the word "OOM" (or "error", "skipped")."""
    found = [_failures_at(series, x, y) for _, series in panels]
    most = max((len(marks) for at in found for marks in at.values()), default=0)
    if not most:
        return
    abreast = _crosses_abreast(
        panels[0][0], {place for _, series in panels for one in series for place in one.rows[x]}
    )
    height = _WORD_POINTS + -(-most // abreast) * _CROSS_POINTS + 8
    share = _make_room([axes for axes, _ in panels], height)
    for (axes, _), at in zip(panels, found, strict=True):
        if at:
            zone = {"transform": axes.transAxes, "color": ZONE, "linewidth": 0, "zorder": 0.2}
            axes.add_artist(Rectangle((0, 1 - share), 1, share, **zone))
        for place, marks in at.items():
            _write(axes, place, (0, -10), "/".join(dict.fromkeys(word for word, _ in marks)), MUTED, size=8)
            for index, (_, color) in enumerate(marks):
                row, column = divmod(index, abreast)
                beside = min(abreast, len(marks) - row * abreast)
                shift = (column - (beside - 1) / 2) * _CROSS_POINTS
                _write(axes, place, (shift, -10 - _WORD_POINTS - row * _CROSS_POINTS), "×", color, size=14)


def _failures_at(series: Sequence[Series], x: str, y: str) -> dict[float, list[tuple[str, str]]]:
    at = defaultdict(list)
    for one in series:
        for _, row in _failures(one.rows, y).iterrows():
            at[row[x]].append((STATUS_WORDS.get(row["status"], row["status"]), one.color))
    return at


def _crosses_abreast(axes: Axes, places: set[float]) -> int:
    """How many crosses fit beside each other at one tick."""
    pixels = np.sort(axes.transData.transform([(place, 1) for place in places])[:, 0])
    edges = 2 * min(pixels[0] - axes.bbox.x0, axes.bbox.x1 - pixels[-1])
    free = min([edges, *np.diff(pixels)])
    return max(1, int((free * 72 / axes.figure.dpi - 2) // _CROSS_POINTS))


def _write(axes: Axes, x: float, points: tuple[float, float], text: str, color: str, size: float) -> None:
    axes.annotate(
        text, (x, 1), points, xycoords=("data", "axes fraction"), textcoords="offset points",
        color=color, size=size, weight="bold", ha="center", va="center", annotation_clip=False,
    )  # fmt: skip


def _make_room(panels: Sequence[Axes], points: float) -> float:
    """Keep data, grid and ticks out of the panels' uppermost points; returns their share of the height."""
    axes = panels[0]
    share = min(points * axes.figure.dpi / 72 / axes.bbox.height, 0.5)
    bottom, top = axes.get_ylim()
    ticks = [tick for tick in axes.get_yticks() if bottom <= tick <= top]
    scale = axes.transScale
    (_, low), (_, high) = scale.transform([(1, bottom), (1, top)])
    _, raised = scale.inverted().transform((1, low + (high - low) / (1 - share)))
    for each in panels:
        each.set_ylim(bottom, raised)
        each.yaxis.set_major_locator(FixedLocator(ticks))
    return share


def label_lines(axes: Axes, series: Sequence[Series], x: str, y: str) -> bool:
    """Write each line's name at its right end; False, and nothing written, where a legend reads better."""
    named = {one.label: one for one in reversed(series) if one.label}
    if not 1 <= len(named) <= _MOST_LABELS or any(one.hue == one.where for one in series):
        return False
    ends = {label: one.rows.dropna(subset=[y]).sort_values(x)[[x, y]].tail(1) for label, one in named.items()}
    last = max(one.rows[x].max() for one in series)
    if any(end.empty or end[x].item() != last for end in ends.values()):
        return False
    axes.figure.draw_without_rendering()
    points = {
        label: axes.transData.transform(end.to_numpy()[0])[1] * 72 / axes.figure.dpi
        for label, end in ends.items()
    }
    labels = sorted(points, key=points.get)
    moved = spread([points[label] for label in labels], _LABEL_GAP)
    if any(abs(to - points[label]) > _LABEL_REACH for label, to in zip(labels, moved, strict=True)):
        return False
    for label, to in zip(labels, moved, strict=True):
        axes.annotate(
            label, tuple(ends[label].to_numpy()[0]), (9, to - points[label]), textcoords="offset points",
            color=text_color(named[label].color), weight="bold", size=10, va="center", annotation_clip=False,
        )  # fmt: skip
    return True


def spread(places: Sequence[float], gap: float) -> list[float]:
    """Move ascending places at least `gap` apart, with least squared moves (pool adjacent violators)."""
    blocks: list[list[float]] = []  # [sum of (place - index * gap), count]
    for index, place in enumerate(places):
        blocks.append([place - index * gap, 1])
        while len(blocks) > 1 and blocks[-2][0] / blocks[-2][1] > blocks[-1][0] / blocks[-1][1]:
            total, count = blocks.pop()
            blocks[-1][0] += total
            blocks[-1][1] += count
    means = np.repeat([total / count for total, count in blocks], [int(count) for _, count in blocks])
    return [float(mean + index * gap) for index, mean in enumerate(means)]
