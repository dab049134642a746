"""One look for every figure: matplotlib's settings, colours, and how lines and bars tell the machine."""

from collections.abc import Hashable, Iterable
from itertools import cycle

import numpy as np
import seaborn as sns
from matplotlib.colors import to_hex

from labbook.labels import family_of, ordered

# Okabe & Ito, "Color Universal Design" (2008), told apart with every kind of colour vision; and three more.
BLUE, SKY, GREEN, ORANGE = "#0072B2", "#56B4E9", "#009E73", "#E69F00"
VERMILLION, PURPLE, BLACK, GREY = "#D55E00", "#CC79A7", "#22272E", "#6B7077"
WINE, BROWN, YELLOW = "#7A1F5C", "#604418", "#F0E442"
COLORS = {
    name.lower(): color for name, color in globals().items() if name.isupper()
}  # as vocabularies say
INK, MUTED, GRID, PAPER = BLACK, "#6B7280", "#E5E7EB", "#FFFFFF"
ZONE = "#F3F4F6"  # where nothing could be measured
_FRAME = "#C4C9D1"
_SPARE = [BLUE, VERMILLION, GREEN, ORANGE, PURPLE, SKY, INK]
_MACHINES = {"reference": GREEN, "this machine": ORANGE, "published": GREY}

# fmt: off
STYLE = {
    "figure.dpi": 160, "savefig.dpi": 160, "font.size": 10.5, "text.color": INK,
    "axes.labelcolor": MUTED, "axes.labelpad": 7.0,
    "axes.titlesize": 11, "axes.titleweight": "bold", "axes.titlelocation": "left", "axes.titlepad": 9.0,
    "axes.edgecolor": _FRAME, "axes.linewidth": 0.9, "axes.spines.top": False, "axes.spines.right": False,
    "axes.spines.left": False, "axes.axisbelow": True,
    "axes.grid": True, "axes.grid.axis": "y", "grid.color": GRID, "grid.linewidth": 0.9,
    "xtick.color": _FRAME, "xtick.labelcolor": MUTED, "xtick.labelsize": 10, "xtick.major.size": 4,
    "ytick.labelcolor": MUTED, "ytick.labelsize": 10, "ytick.major.size": 0,
    "xtick.minor.size": 0, "ytick.minor.size": 0,
    "lines.linewidth": 2.0, "lines.markersize": 6.5, "hatch.linewidth": 0.8,
    "legend.frameon": False, "legend.fontsize": 10,
    "svg.fonttype": "path", "svg.hashsalt": "cs336",
}
# fmt: on


def palette(values: Iterable[Hashable], column: str | None) -> dict[Hashable, str]:
    """A colour for each value of a column: the vocabulary's, a ramp for what is ordered, or a spare one."""
    values = ordered(values, column)
    if column == "where":
        return {where: _MACHINES[where.partition(":")[0]] for where in values}
    family = family_of(values, column)
    numbers = len(values) > 1 and not any(isinstance(value, str) for value in values)
    if numbers or (family and not any(named.color for named in family.values())):
        shades = sns.color_palette("crest", as_cmap=True)(np.linspace(0.08, 1, len(values)))
        return dict(
            zip(values, map(to_hex, shades), strict=True)
        )  # lightness alone tells them apart
    fixed = {value: COLORS.get(family[value].color) for value in values if value in family}
    spare = cycle([color for color in _SPARE if color not in fixed.values()] or _SPARE)
    return {value: fixed.get(value) or next(spare) for value in values}


def machine_looks(places: Iterable[str]) -> dict[str, tuple]:
    """Of each machine the dashes and marker of its lines, and the hatch of its bars."""
    known = {
        "": ("", "o", None),
        "reference": ("", "o", None),
        "this machine": ((3, 1.6), "D", "////"),
    }
    published = cycle([((1, 1.5), "s", "...."), ((1, 1.5), "^", "xxxx"), ((1, 1.5), "v", "----")])
    return {where: known.get(where.partition(":")[0]) or next(published) for where in places}
