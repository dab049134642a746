"""A table of text as plain HTML, without colours or fonts of its own: at home on light and dark pages."""

from html import escape
from itertools import groupby

import pandas as pd

from cs336_systems.report.words import STATUS_WORDS

NO_LINES = "no rows yet"


class Table:
    """Shows a frame of text; its index when it has names. Folded, only its caption until that is clicked."""

    def __init__(self, frame: pd.DataFrame, caption: str = "", folded: bool = False) -> None:
        self.frame = frame
        self.caption = caption
        self.folded = folded

    def __repr__(self) -> str:
        text = self.frame.to_string(index=self._named, justify="right") if len(self.frame) else NO_LINES
        return f"{self.caption}\n{text}" if self.caption else text

    def _repr_html_(self) -> str:
        if self.folded:
            unfolded = Table(self.frame)._repr_html_()
            return f"<details><summary>{escape(self.caption)}</summary>\n{unfolded}\n</details>"
        caption = (
            f'<caption style="text-align: left">{escape(self.caption)}</caption>' if self.caption else ""
        )
        if self.frame.empty:
            return f"<table>{caption}<tbody>{_row([_cell('td', NO_LINES, 'left')])}</tbody></table>"
        lines = [
            "<table>",
            caption,
            "<thead>",
            *self._head(),
            "</thead>",
            "<tbody>",
            *self._body(),
            "</tbody>",
        ]
        return "\n".join([line for line in lines if line] + ["</table>"])

    @property
    def _named(self) -> bool:
        return any(name is not None for name in self.frame.index.names)

    @property
    def _sides(self) -> list[str]:
        columns = (self.frame.iloc[:, place] for place in range(self.frame.shape[1]))
        return ["right" if any(map(_is_number, column)) else "left" for column in columns]

    def _head(self) -> list[str]:
        columns, names = self.frame.columns, self.frame.index.names if self._named else []
        *upper, last = (columns.get_level_values(level) for level in range(columns.nlevels))
        lines = []
        for labels in upper:
            spans = [(label, len(list(group))) for label, group in groupby(labels)]
            lines.append(
                _row(
                    [_cell("th", "", "left")] * len(names)
                    + [_cell("th", label, "center", n) for label, n in spans]
                )
            )
        corner = [_cell("th", name, "left") for name in names]
        return [*lines, _row(corner + [_cell("th", *both) for both in zip(last, self._sides, strict=True)])]

    def _body(self) -> list[str]:
        lines, above = [], ()
        for key, row in zip(self.frame.index, self.frame.to_numpy(), strict=True):
            parts = (key if isinstance(key, tuple) else (key,)) if self._named else ()
            heads = [_cell("th", text, "left") for text in _unless_repeated(parts, above)]
            lines.append(_row(heads + [_cell("td", *both) for both in zip(row, self._sides, strict=True)]))
            above = parts
        return lines


def _unless_repeated(parts: tuple, above: tuple) -> list[str]:
    """A line's names, blank as long as they are those of the line above."""
    same = 0
    while same < len(parts) - 1 and parts[: same + 1] == above[: same + 1]:
        same += 1
    return [""] * same + [str(part) for part in parts[same:]]


def _is_number(text: object) -> bool:
    """A number, or the word in its place."""
    if text in STATUS_WORDS.values():
        return True
    try:
        float(str(text).replace(",", "").rstrip("×%"))
    except ValueError:
        return False
    return True


def _row(cells: list[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _cell(tag: str, text: object, side: str, span: int = 1) -> str:
    width = f' colspan="{span}"' if span > 1 else ""
    return f'<{tag}{width} style="text-align: {side}">{escape(str(text))}</{tag}>'
