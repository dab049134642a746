"""Rows taken apart into a plot's lines or bars: one for each value of the hue and machine, with its look."""

from collections.abc import Hashable
from dataclasses import dataclass, replace

import pandas as pd
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cs336_systems.report.style import (
    COLORS,
    MUTED,
    PAPER,
    MachineStyle,
    faded,
    machine_style,
    palette,
)
from cs336_systems.report.words import named_value, ordered, place_label


@dataclass(frozen=True)
class Series:
    """The rows of one line."""

    hue: Hashable
    where: str
    rows: pd.DataFrame
    plain: str  # colour of the hue
    color: str  # the same, as this machine shows it
    look: MachineStyle
    label: str

    def within(self, facet: str | None, value: Hashable) -> "Series":
        """The same line with the rows of one panel."""
        return self if facet is None else replace(self, rows=self.rows[self.rows[facet] == value])


def series_of(frame: pd.DataFrame, hue: str | None) -> list[Series]:
    """Split rows by hue and by machine (column `where`, see `compare.side_by_side`), references first."""
    places = ordered(frame["where"]) if "where" in frame else [""]
    looks = _looks(places)
    colors = _colors(frame, hue, places)
    found = []
    for value in colors:
        of_hue = frame if hue is None else frame[frame[hue] == value]
        for where in places:
            rows = of_hue[of_hue["where"] == where] if "where" in frame else of_hue
            if len(rows):
                color = faded(colors[value], looks[where].fade)
                label = named_value(hue, value) if hue else ""
                found.append(Series(value, where, rows, colors[value], color, looks[where], label))
    return found


def _looks(places: list[str]) -> dict[str, MachineStyle]:
    published = [where for where in places if where.startswith("published")]
    return {w: machine_style(w, published.index(w) if w in published else 0) for w in places}


def _colors(frame: pd.DataFrame, hue: str | None, places: list[str]) -> dict[Hashable, str]:
    if hue is None:
        return {None: COLORS["implementation"]["eager"]}
    if hue == "where":
        return {where: COLORS["machine"][where.partition(":")[0]] for where in places}
    return palette(frame[hue], hue)


def hue_legend(series: list[Series], *, bars: bool = False) -> list[Line2D | Patch]:
    """One entry for each value of the hue, in its plain colour."""
    entries = {one.label: one for one in series if one.label and one.hue != one.where}
    return [_swatch(one, bars) for one in entries.values()]


def _swatch(one: Series, bars: bool) -> Line2D | Patch:
    if bars:
        return Patch(color=one.plain, label=one.label)
    return Line2D([], [], color=one.plain, label=one.label, linewidth=3)


def machine_legend(series: list[Series], *, bars: bool = False) -> list[Line2D | Patch]:
    """One grey entry for each machine: what solid, dashed and hollow mean."""
    places = {one.where: one for one in series if one.where}
    return [_machine_swatch(one, bars) for one in places.values()]


def _machine_swatch(one: Series, bars: bool) -> Line2D | Patch:
    look, label = one.look, place_label(one.where)
    color = one.color if one.hue == one.where else MUTED
    if bars:
        return Patch(label=label, **bar_look(color, look))
    face = PAPER if look.hollow else color
    return Line2D(
        [],
        [],
        color=color,
        linestyle=look.linestyle,
        linewidth=look.linewidth,
        marker=look.marker,
        markerfacecolor=face,
        label=label,
    )


def bar_look(color: str, look: MachineStyle) -> dict:
    """Full, hatched or hollow: the bar's counterpart of a solid, dashed or hollow line."""
    if look.hollow:
        return {"facecolor": PAPER, "edgecolor": color, "linewidth": 1.4, "hatch": look.hatch}
    return {
        "facecolor": color,
        "edgecolor": PAPER if look.hatch else color,
        "linewidth": 0,
        "hatch": look.hatch,
    }
