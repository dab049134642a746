"""Marks on a panel: where memory ran out, which line is which, what a point is called."""

from collections.abc import Sequence

import numpy as np
import pandas as pd
from matplotlib.axes import Axes
from matplotlib.patches import Rectangle
from matplotlib.patheffects import withStroke
from matplotlib.ticker import FixedLocator

from cs336_systems.report.encoding import Encoding
from cs336_systems.report.labels import STATUS_LABELS
from cs336_systems.report.style import INK, MUTED, PAPER, ZONE, text_color

_WORD_POINTS, _CROSS_POINTS = 12, 11
_LABEL_GAP = 13.0  # points between two labels
_LABEL_REACH = 16.0  # points a label may be moved off the end of its line
_MOST_LABELS = 8


def mark_failures(panels: Sequence[tuple[Axes, pd.DataFrame]], y: str) -> None:
    """A cross in the line's colour in a zone above the data, under the word "OOM" (or "error", "skipped").

    Args:
        panels: axes, and their rows with `_x` and `_color`; a row with a status and no value is a failure.
    """
    if not all("status" in rows for _, rows in panels):
        return
    failed = [rows[rows[y].isna() & (rows["status"] != "ok")] for _, rows in panels]
    most = max(rows.groupby("_x").size().max() if len(rows) else 0 for rows in failed)
    if not most:
        return
    abreast = _crosses_abreast(panels[0][0], sorted({x for _, rows in panels for x in rows["_x"]}))
    height = _WORD_POINTS + -(-most // abreast) * _CROSS_POINTS + 8
    share = _make_room([axes for axes, _ in panels], height)
    for (axes, _), rows in zip(panels, failed, strict=True):
        if len(rows):
            zone = {"transform": axes.transAxes, "color": ZONE, "linewidth": 0, "zorder": 0.2}
            axes.add_artist(Rectangle((0, 1 - share), 1, share, **zone))
        for x, there in rows.groupby("_x"):
            words = dict.fromkeys(STATUS_LABELS.get(status, status) for status in there["status"])
            _write(axes, x, (0, -10), "/".join(words), MUTED, size=8)
            for index, color in enumerate(there["_color"]):
                row, column = divmod(index, abreast)
                beside = min(abreast, len(there) - row * abreast)
                shift = (column - (beside - 1) / 2) * _CROSS_POINTS
                _write(axes, x, (shift, -10 - _WORD_POINTS - row * _CROSS_POINTS), "×", color, size=14)


def _crosses_abreast(axes: Axes, places: Sequence[float]) -> int:
    """How many crosses fit beside each other at one tick."""
    pixels = axes.transData.transform([(place, 1) for place in places])[:, 0]
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


def label_lines(axes: Axes, rows: pd.DataFrame, y: str, encoding: Encoding) -> bool:
    """Write each line's name at its right end; False, and nothing written, where a legend reads better.

    Args:
        rows: with `_x`, `_hue`, `_where` and `_color`; of several machines the first one's lines are named.
    """
    if encoding.hue in (None, "where") or len(encoding.colors) > _MOST_LABELS:
        return False
    named = rows[rows["_where"] == next(iter(encoding.looks))].dropna(subset=["_x", y])
    ends = named.sort_values("_x").groupby("_hue").tail(1)
    if len(ends) < len(encoding.colors) or (ends["_x"] < rows["_x"].max()).any():
        return False
    axes.figure.draw_without_rendering()
    points = axes.transData.transform(ends[["_x", y]].to_numpy(float))[:, 1] * 72 / axes.figure.dpi
    moved = spread(points, _LABEL_GAP)
    if np.abs(moved - points).max() > _LABEL_REACH:
        return False
    for (_, row), shift in zip(ends.iterrows(), moved - points, strict=True):
        axes.annotate(
            encoding.label(row["_hue"]), (row["_x"], row[y]), (9, shift), textcoords="offset points",
            color=text_color(row["_color"]), weight="bold", size=10, va="center", annotation_clip=False,
        )  # fmt: skip
    return True


def spread(places: Sequence[float], gap: float) -> np.ndarray:
    """Move places at least `gap` apart, each as little as its neighbours allow, in the same order."""
    places = np.asarray(places, float)
    order = np.argsort(places, kind="stable")
    blocks: list[list[int]] = []  # neighbours that touch stand `gap` apart around their mean
    for index in order:
        blocks.append([index])
        while len(blocks) > 1 and _ends(places, blocks[-2], gap)[1] > _ends(places, blocks[-1], gap)[0] - gap:
            last = blocks.pop()
            blocks[-1] += last
    moved = np.empty_like(places)
    for block in blocks:
        moved[block] = np.linspace(*_ends(places, block, gap), len(block))
    return moved


def _ends(places: np.ndarray, block: list[int], gap: float) -> tuple[float, float]:
    middle, half = places[block].mean(), gap * (len(block) - 1) / 2
    return middle - half, middle + half


def name_points(axes: Axes, points: np.ndarray, names: Sequence[str]) -> None:
    """A name to the right of each point; slanting below it where that would cover another point or name."""
    dots = axes.transData.transform(points) * 72 / axes.figure.dpi
    taken = [(x - 5, y - 5, x + 5, y + 5) for x, y in dots]
    merged: dict[int, list[str]] = {}
    for number, dot in enumerate(dots):  # points on top of each other share their names
        same = next(other for other in range(number + 1) if np.abs(dots[other] - dot).max() < 6)
        merged.setdefault(same, []).append(names[number])
    for number, shared in merged.items():
        (x, y), name = dots[number], ", ".join(shared)
        left, bottom, right, top = x + 8, y - 6, x + 10 + 5.5 * len(name), y + 6
        free = all(right <= a or c <= left or top <= b or d <= bottom for a, b, c, d in taken)
        taken += [(left, bottom, right, top)] if free else []
        beside = {"xytext": (2, -6), "va": "top", "rotation": -35}
        beside = {"xytext": (10, 0), "va": "center"} if free else beside
        axes.annotate(
            name, tuple(points[number]), textcoords="offset points", size=9.5, color=INK, zorder=4, ha="left",
            rotation_mode="anchor", path_effects=[withStroke(linewidth=3, foreground=PAPER)], **beside,
        )  # fmt: skip
