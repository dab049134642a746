"""One look for every figure: matplotlib's settings, colours, and how lines and bars tell the machine."""

from collections.abc import Hashable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import seaborn as sns
from matplotlib.colors import LinearSegmentedColormap, to_hex, to_rgb
from matplotlib.typing import ColorType

from cs336_systems.names import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION
from cs336_systems.report.labels import family_of, ordered

INK, MUTED, GRID, PAPER = BLACK, "#6B7280", "#E5E7EB", "#FFFFFF"
ZONE, HATCH = "#F3F4F6", "#C4C9D1"  # where nothing could be measured
_SPARE = [BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, INK]
_MACHINES = {"reference": GREEN, "this machine": ORANGE, "published": GREY}

PALE = LinearSegmentedColormap.from_list("pale", ["#F2F7FB", "#A9CFE8", "#4C9BCB", BLUE, "#08395C"])
DIVERGING = LinearSegmentedColormap.from_list(
    "diverging", ["#7A2E00", VERMILLION, "#F2B48A", "#F4F4F2", "#A9CFE8", BLUE, "#08395C"]
)

# fmt: off
STYLE = {
    "figure.dpi": 160, "savefig.dpi": 160, "figure.facecolor": PAPER, "axes.facecolor": PAPER,
    "font.family": "DejaVu Sans", "font.size": 10.5, "text.color": INK,
    "axes.labelcolor": MUTED, "axes.labelsize": 10.5, "axes.labelpad": 7.0,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlecolor": INK,
    "axes.titlepad": 9.0,
    "axes.edgecolor": HATCH, "axes.linewidth": 0.9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.axisbelow": True,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "grid.linewidth": 0.9,
    "xtick.color": HATCH, "xtick.labelcolor": MUTED, "xtick.labelsize": 10, "xtick.major.size": 4,
    "ytick.labelcolor": MUTED, "ytick.labelsize": 10, "ytick.major.size": 0,
    "xtick.minor.size": 0, "ytick.minor.size": 0,
    "lines.linewidth": 2.0, "lines.markersize": 6, "lines.solid_capstyle": "round", "hatch.linewidth": 0.8,
    "legend.frameon": False, "legend.fontsize": 10,
    "svg.fonttype": "path", "svg.hashsalt": "cs336",
}
# fmt: on


def palette(values: Iterable[Hashable], column: str | None) -> dict[Hashable, str]:
    """A colour for each value of a column: the registry's, a ramp for what is ordered, or a spare one."""
    values = ordered(values, column)
    if column == "where":
        return {where: _MACHINES[where.partition(":")[0]] for where in values}
    if column in ("model_size", "model") or (len(values) > 1 and not any(isinstance(v, str) for v in values)):
        return dict(zip(values, ramp(len(values)), strict=True))
    family = family_of(values, column)
    fixed = {value: family[value].color for value in values if value in family}
    free = [color for color in _SPARE if color not in fixed.values()] or _SPARE
    spare = iter(free * len(values))
    return {value: fixed.get(value) or next(spare) for value in values}


def ramp(steps: int) -> list[str]:
    """Light to dark, for ordered values: lightness alone tells them apart."""
    return [to_hex(color) for color in sns.color_palette("crest", as_cmap=True)(np.linspace(0.08, 1, steps))]


@dataclass(frozen=True)
class MachineStyle:
    """How one machine's lines and bars are drawn, whatever their colour."""

    linestyle: str | tuple = "-"
    marker: str = "o"
    hollow: bool = False
    linewidth: float = 2.0
    hatch: str | None = None
    fade: float = 0.0  # share of grey mixed into the colour

    def color(self, color: str) -> str:
        """The colour as this machine shows it."""
        return mixed(color, "#9AA0A8", self.fade)

    def line(self) -> dict[str, Any]:
        """Of a line with markers, in whatever colour it has."""
        face = PAPER if self.hollow else "auto"
        look = {"linestyle": self.linestyle, "linewidth": self.linewidth, "marker": self.marker}
        return look | {"markerfacecolor": face, "markeredgecolor": "auto", "markeredgewidth": 1}

    def bar(self, color: str) -> dict[str, Any]:
        """Of a bar: full, hatched or hollow, as a line is solid, dashed or hollow."""
        if self.hollow:
            return {"facecolor": PAPER, "edgecolor": color, "linewidth": 1.4, "hatch": self.hatch}
        edge = PAPER if self.hatch else color
        return {"facecolor": color, "edgecolor": edge, "linewidth": 0, "hatch": self.hatch}


_PUBLISHED = (("s", None), ("^", "...."), ("v", "xxxx"), ("P", "----"))  # marker, hatch


def machine_styles(places: Iterable[str]) -> dict[str, MachineStyle]:
    """The reference: solid, dots; this machine: dashed, diamonds; published measurements: hollow, greyish."""
    styles, published = {}, 0
    for where in places:
        if where.startswith("published"):
            marker, hatch = _PUBLISHED[published % len(_PUBLISHED)]
            styles[where] = MachineStyle((0, (1, 2)), marker, True, linewidth=1.5, hatch=hatch, fade=0.5)
            published += 1
        elif where.startswith("this machine"):
            styles[where] = MachineStyle((0, (3, 1.6)), "D", hatch="////")
        else:
            styles[where] = MachineStyle()
    return styles


def mixed(color: ColorType, other: ColorType, share: float) -> str:
    """The colour with a share of another one."""
    return to_hex((1 - share) * np.array(to_rgb(color)) + share * np.array(to_rgb(other)))


def text_color(color: ColorType) -> str:
    """The colour, darkened until it can be read as text on paper (contrast 4 and more)."""
    darker = (mixed(color, INK, share) for share in np.linspace(0, 1, 21))
    return next(color for color in darker if 1.05 / (_luminance(color) + 0.05) >= 4)


def readable_on(background: ColorType) -> str:
    """Dark or light text, whichever has more contrast (WCAG 2.2) with the background."""
    light = _luminance(background) + 0.05
    return INK if light / (_luminance(INK) + 0.05) > 1.05 / light else PAPER


def _luminance(color: ColorType) -> float:
    """Relative luminance, 0 black to 1 white (WCAG 2.2)."""
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in to_rgb(color)]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
