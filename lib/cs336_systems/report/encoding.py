"""What colour and look mean in a plot: colour is the value of `hue`, look is the machine (column `where`)."""

from collections.abc import Hashable

import pandas as pd
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.patches import Patch

from cs336_systems.names import BLUE
from cs336_systems.report.labels import machine_label, named_value, ordered
from cs336_systems.report.style import MUTED, MachineStyle, machine_styles, palette

_BAND_ALPHA = 0.16
_VISIBLE = 0.1  # of a value: a narrower band is hidden by its line


class Encoding:
    """The colours and looks of a plot's rows, decided once for all of its panels.

    Attributes:
        colors: of each value of the hue, in order; of "" where there is no hue.
        looks: of each machine, in order; of "" where the rows do not say.
    """

    def __init__(self, frame: pd.DataFrame, hue: str | None) -> None:
        self.hue = hue
        self.colors: dict[Hashable, str] = palette(frame[hue], hue) if hue else {"": BLUE}
        self.looks: dict[str, MachineStyle] = machine_styles(
            ordered(frame["where"]) if "where" in frame else [""]
        )

    def color(self, value: Hashable, where: str = "") -> str:
        """Of one line or bar."""
        return self.looks[where].color(self.colors[value])

    def marked(self, frame: pd.DataFrame) -> pd.DataFrame:
        """The rows with the value of their hue, their machine, their colour: `_hue`, `_where`, `_color`."""
        values = frame[self.hue] if self.hue else [""] * len(frame)
        places = frame["where"] if "where" in frame else [""] * len(frame)
        colors = [self.color(*each) for each in zip(values, places, strict=True)]
        return frame.assign(_hue=values, _where=places, _color=colors)

    def label(self, value: Hashable) -> str:
        """Of a value of the hue, on its own."""
        return named_value(self.hue, value) if self.hue else ""

    def legend(self, *, bars: bool = False) -> tuple[list[Artist], list[Artist]]:
        """An entry for each value of the hue; and, of several machines, one for each: what its look means."""
        by_machine, several = self.hue == "where", len(self.looks) > 1
        hues, machines = [], []
        for value, color in self.colors.items() if self.hue and not by_machine else ():
            label = self.label(value)
            line = Line2D([], [], color=color, label=label, linewidth=3)
            hues.append(Patch(color=color, label=label) if bars else line)
        for where, look in self.looks.items() if several else ():
            color, label = look.color(self.colors[where] if by_machine else MUTED), machine_label(where)
            line = Line2D([], [], color=color, label=label, **look.line())
            machines.append(Patch(label=label, **look.bar(color)) if bars else line)
        return hues, machines


def band_swatch(band: tuple[str, str]) -> Patch:
    """The legend's word for a shaded band: ("p20_ms", "p80_ms") -> "band: 20th to 80th percentile"."""
    edges = [column.partition("_")[0].removeprefix("p") for column in band]
    percentiles = all(edge.isdecimal() for edge in edges)
    label = "band: {}th to {}th percentile".format(*edges) if percentiles else "band: {} to {}".format(*band)
    return Patch(color=MUTED, alpha=2 * _BAND_ALPHA, linewidth=0, label=label)


def draw_band(axes: Axes, rows: pd.DataFrame, band: tuple[str, str]) -> bool:
    """Shade from the lower to the upper edge along each line; whether any of it can be seen."""
    low, high = band
    rows = rows.dropna(subset=["_x", low, high]).sort_values("_x")
    for _, line in rows.groupby(["_hue", "_where"]):
        color = line["_color"].iloc[0]
        axes.fill_between(line["_x"], line[low], line[high], color=color, alpha=_BAND_ALPHA, linewidth=0)
    return bool((rows[high] > (1 + _VISIBLE) * rows[low]).any())
