"""One look for every figure: matplotlib's settings, and colours."""

from collections.abc import Hashable, Iterable
from contextlib import AbstractContextManager
from itertools import cycle
from pathlib import Path

import matplotlib as mpl
import matplotlib.style
import numpy as np
import seaborn as sns
from matplotlib.colors import to_hex

from labbook.labels import family_of, is_text, ordered

# By name, as vocabularies say them. The first six, and yellow, are Okabe & Ito's, "Color Universal Design"
# (2008), told apart with every kind of colour vision.
_NAMED = """\
blue #0072B2
vermillion #D55E00
green #009E73
orange #E69F00
purple #CC79A7
sky #56B4E9
black #22272E
grey #6B7077
silver #CBD2DB
wine #7A1F5C
brown #604418
yellow #F0E442
"""
COLORS = dict(line.split() for line in _NAMED.splitlines())
BLUE = COLORS["blue"]
GREEN = COLORS["green"]
INK = COLORS["black"]
SILVER = COLORS["silver"]
SKY = COLORS["sky"]
VERMILLION = COLORS["vermillion"]
MUTED = "#6B7280"
PAPER = "#FFFFFF"
ZONE = "#F3F4F6"  # where nothing could be measured
_SPARE = list(COLORS.values())[:7]  # the first come first


def in_style() -> AbstractContextManager:
    """Matplotlib's defaults and our settings, whatever the user's are."""
    return mpl.style.context(["default", Path(__file__).with_name("labbook.mplstyle")])


def palette(values: Iterable[Hashable], column: str | None) -> dict[Hashable, str]:
    """A colour for each value of a column: the vocabulary's, a ramp for what is ordered, or a spare one."""
    values = ordered(values, column)
    family = family_of(values, column)
    colors = {value: COLORS[named.color] for value, named in family.items() if named.color}
    are_numbers = len(values) > 1 and not is_text(values)
    # What has an order and no colours.
    if are_numbers or (family and not colors):
        return _ramp(values)
    fixed = {value: colors[value] for value in values if value in colors}
    unused = [color for color in _SPARE if color not in fixed.values()]
    spare = cycle(unused or _SPARE)
    return {value: fixed.get(value) or next(spare) for value in values}


def _ramp(values):
    """Colours from light to dark: lightness alone tells them apart."""
    shades = sns.color_palette("crest", as_cmap=True)(np.linspace(0.08, 1, len(values)))
    return dict(zip(values, map(to_hex, shades), strict=True))
