"""A table of text as plain HTML, without colours or fonts of its own: at home on light and dark pages."""

from html import escape
from itertools import groupby

import pandas as pd

NO_LINES = "no rows yet"


class Table:
    """Shows a frame of text; its index when it has a name."""

    def __init__(self, frame: pd.DataFrame, caption: str = "") -> None:
        self.frame = frame
        self.caption = caption

    def __repr__(self) -> str:
        text = self.frame.to_string(index=self._named, justify="right") if len(self.frame) else NO_LINES
        return f"{self.caption}\n{text}" if self.caption else text

    def _repr_html_(self) -> str:
        caption = [f"<caption>{escape(self.caption)}</caption>"] if self.caption else []
        body = [
            self._line(key, row) for key, row in zip(self.frame.index, self.frame.to_numpy(), strict=True)
        ]
        return "\n".join(
            [
                "<table>",
                *caption,
                *self._head(),
                "<tbody>",
                *(body or [_row([_td(NO_LINES)])]),
                "</tbody>",
                "</table>",
            ]
        )

    @property
    def _named(self) -> bool:
        return any(name is not None for name in self.frame.index.names)

    def _head(self) -> list[str]:
        columns, names = self.frame.columns, self.frame.index.names if self._named else []
        lines = []
        for level in range(columns.nlevels):
            last = level == columns.nlevels - 1
            corner = [_th(name if last else "", "left") for name in names]
            labels = columns.get_level_values(level)
            if last:
                lines.append(_row(corner + [_th(label, "right") for label in labels]))
            else:
                spans = [(label, len(list(group))) for label, group in groupby(labels)]
                lines.append(_row(corner + [_th(label, "center", span) for label, span in spans]))
        return ["<thead>", *lines, "</thead>"] if len(columns) else []

    def _line(self, key: object, row: list[str]) -> str:
        parts = key if isinstance(key, tuple) else (key,)
        heads = [_th(part, "left") for part in parts] if self._named else []
        return _row(heads + [_td(text) for text in row])


def _row(cells: list[str]) -> str:
    return f"<tr>{''.join(cells)}</tr>"


def _th(text: object, align: str, span: int = 1) -> str:
    width = f' colspan="{span}"' if span > 1 else ""
    return f'<th{width} style="text-align: {align}">{escape(str(text))}</th>'


def _td(text: object) -> str:
    return f'<td style="text-align: right">{escape(str(text))}</td>'
