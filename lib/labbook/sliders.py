"""A figure with sliders, in the output of a cell: Python computes each state, a script shows the one chosen.

It stands below a plot, which is what a page without scripts shows. It loads nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from labbook.bench import grid
from labbook.labels import column_label, value_label
from labbook.tables import show_html

_SCRIPT = Path(__file__).with_suffix(".js")
_HINT = "<em>With scripts on (a notebook that is trusted, or the site) sliders change this figure here.</em>"


class Sliders:
    """A slider for each control, and a bar for each number of the state that they choose.

    controls: the values of each, from left to right; names and values as tables show them.
    state: the numbers at one value of each control, which are given by name.
    start: where the sliders stand at first.
    labels: of the bars. unit: of the numbers.
    limit: above it a bar has another colour.
    """

    def __init__(
        self,
        controls: Mapping[str, Sequence],
        state: Callable,
        start: Mapping,
        *,
        labels: Sequence[str],
        limit: float,
        unit: str = "",
    ) -> None:
        sliders = []
        places = []
        for column, values in controls.items():
            names = [value_label(value, column) for value in values]
            sliders.append((column_label(column), names))
            places.append(list(values).index(start[column]))
        self.figure = {
            "states": [state(**point) for point in grid(**controls)],
            "labels": labels,
            "unit": unit,
            "limit": limit,
            "controls": sliders,
            "start": places,
        }

    def html(self) -> str:
        """The script, and the numbers that it shows, to four digits."""
        rounded = json.loads(
            json.dumps(self.figure), parse_float=lambda text: float(f"{float(text):.4g}")
        )
        data = json.dumps(rounded, ensure_ascii=False, separators=(",", ":"))
        data = data.replace("</", "<\\/")  # it must not end the script
        script = _SCRIPT.read_text(encoding="utf-8").strip()
        start = f"({data}, document.currentScript.previousElementSibling)"
        return f"<div>{_HINT}</div><script>{script}{start}</script>"

    def _ipython_display_(self):
        show_html(self.html(), "<figure with sliders>")
