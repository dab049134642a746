"""A figure with sliders, in the output of a cell: Python computes each state, a script shows the one chosen.

It stands below a plot, which is what a page without scripts shows. It loads nothing.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from itertools import product
from pathlib import Path
from typing import Any

from IPython import display

from labbook.labels import column_label, value_label

_SCRIPT = Path(__file__).with_suffix(".js")
_HINT = "<em>With scripts on (a notebook that is trusted, or the site) sliders change this figure here.</em>"


class Sliders:
    """A slider for each control, and the state that they choose.

    kind: how a state is drawn. "bars": a number for each of `labels`; above `limit` in another colour.
        "lines": for each label a list of points (x, y), on logarithmic axes, over the curves of `fixed`.
        "cells": for each label a row of texts; a number that one begins with is its shade.
    controls: the values of each, from left to right; names and values as tables show them.
    state: of one value of each control, given by name.
    start: where the sliders stand at first; else at the left.
    look: labels, and what its kind has of unit, limit, fixed, xlabel and ylabel.
    """

    def __init__(
        self, kind: str, controls: Mapping[str, Sequence], state: Callable[..., Sequence],
        start: Mapping[str, Any] | None = None, **look: Any,
    ) -> None:  # fmt: skip
        states = [
            state(**dict(zip(controls, point, strict=True)))
            for point in product(*controls.values())
        ]
        names = [
            [column_label(c), [value_label(v, c) for v in each]] for c, each in controls.items()
        ]
        at = [list(each).index((start or {}).get(name, each[0])) for name, each in controls.items()]
        self.figure = {
            "kind": kind,
            "controls": names,
            "start": at,
            "fixed": [],
            "states": states,
        } | look

    def html(self) -> str:
        """The script, and the numbers that it shows, to four digits."""
        rounded = json.loads(
            json.dumps(self.figure), parse_float=lambda text: float(f"{float(text):.4g}")
        )
        data = json.dumps(rounded, ensure_ascii=False, separators=(",", ":"))
        data = data.replace("</", "<\\/")
        script = _SCRIPT.read_text(encoding="utf-8").strip()
        start = f"({data}, document.currentScript.previousElementSibling)"
        return f"<div>{_HINT}</div><script>{script}{start}</script>"

    def _ipython_display_(self) -> None:
        display.display({"text/html": self.html(), "text/plain": "<figure with sliders>"}, raw=True)
