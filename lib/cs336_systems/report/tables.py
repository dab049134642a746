"""Rows laid out as tables: few digits, units in the headers, "OOM" written out; pandas writes the HTML."""

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

import pandas as pd

from cs336_systems.report.frames import require_columns, require_one_row_each
from cs336_systems.report.labels import MISSING, STATUS_LABELS, column_label, ordered, value_label

NO_LINES = "no rows yet"


def pivot(
    frame: pd.DataFrame,
    index: str | Sequence[str],
    columns: str,
    values: str | Sequence[str] = "p50_ms",
    *,
    fmt: str | None = None,
) -> pd.DataFrame:
    """A table of text: `index` down, `columns` across, under the name and unit of each of `values`.

    Of the values after the first, columns with nothing in them are left out.

    Args:
        fmt: format of a number, "{:.2f}"; without it a column has the decimals its smallest number needs.

    Raises:
        ValueError: a column is missing, or two rows belong in one cell; the message names their difference.
    """
    index, values = _names(index), _names(values)
    require_columns(frame, *index, columns, *values)
    if frame.empty:
        return frame
    require_one_row_each(frame, *index, columns)
    frame = frame.reset_index(drop=True)  # frames put together repeat their labels
    keys = [_labelled(frame[name], name) for name in (*index, columns)]
    cells = {}
    for value in values:
        header = f"{column_label(value)} by {column_label(columns)}"
        for place, rows in frame.groupby(keys[-1], observed=True):
            column = _cells(rows, value, fmt)
            if value == values[0] or (column != MISSING).any():
                cells[header, place] = column.set_axis(_index([key[rows.index] for key in keys[:-1]]))
    lines = _index(keys[:-1]).drop_duplicates().sort_values()
    table = pd.DataFrame({key: column.reindex(lines) for key, column in cells.items()}).fillna(MISSING)
    table.columns = pd.MultiIndex.from_tuples(cells)
    table.index = _index([lines.get_level_values(i).astype(object) for i in range(len(index))])
    return table.rename_axis(index=[column_label(name) for name in index])


def _labelled(values: pd.Series, column: str) -> pd.Series:
    """The column's labels, which sort as a reader expects."""
    labels = dict.fromkeys(value_label(value, column) for value in ordered(values, column))
    order = [*labels, *([MISSING] if values.isna().any() else [])]
    texts = [value_label(value, column) for value in values]
    return pd.Series(pd.Categorical(texts, categories=order, ordered=True), values.index, name=column)


def _index(keys: Sequence) -> pd.Index:
    return pd.MultiIndex.from_arrays(keys) if len(keys) > 1 else pd.Index(keys[0])


def _names(columns: str | Sequence[str]) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else tuple(columns)


def _cells(rows: pd.DataFrame, value: str, fmt: str | None = None) -> pd.Series:
    """One column of text: numbers, and the word for why there is none."""
    fmt = fmt or f"{{:,.{_decimals(rows[value].dropna())}f}}"
    own = f"{value.removesuffix('_ms')}_status"  # what stands beside a row has another status than the row
    statuses = rows[own] if own in rows else rows["status"] if "status" in rows else [None] * len(rows)
    texts = [
        STATUS_LABELS.get(status, MISSING) if pd.isna(number) else fmt.format(number)
        for number, status in zip(rows[value], statuses, strict=True)
    ]
    return pd.Series(texts, index=rows.index, dtype=object)


def _decimals(numbers: Iterable[float]) -> int:
    """Three significant digits of the smallest number, at most five of the largest, at most 3 decimals."""
    sizes = [abs(number) for number in numbers if number and math.isfinite(number)]
    if not sizes:
        return 0
    wanted, most = 2 - math.floor(math.log10(min(sizes))), 4 - math.floor(math.log10(max(sizes)))
    return max(0, min(wanted, most, 3))


class Table:
    """A frame of text, shown as HTML or as text; its index when it has names.

    Folded, only its caption until that is clicked.
    """

    def __init__(self, frame: pd.DataFrame, caption: str = "", folded: bool = False) -> None:
        self.frame = frame
        self.caption = caption
        self.folded = folded

    @property
    def _has_index(self) -> bool:
        return any(name is not None for name in self.frame.index.names)

    def __repr__(self) -> str:
        text = self.frame.to_string(index=self._has_index, justify="right") if len(self.frame) else NO_LINES
        return f"{self.caption}\n{text}" if self.caption else text

    def _repr_html_(self) -> str:
        table = self._html() if len(self.frame) else f"<p>{NO_LINES}</p>"
        if self.folded:
            return f"<details><summary>{escape(self.caption)}</summary>\n{table}\n</details>"
        return f"<p>{escape(self.caption)}</p>\n{table}" if self.caption else table

    def _html(self) -> str:
        """Words and heads of lines are left-aligned; numbers stay right, as pages have them."""
        write = [_right if any(map(_is_number, column)) else _left for _, column in self.frame.items()]
        columns = [_last(key, each) for key, each in zip(self.frame.columns, write, strict=True)]
        frame = self.frame.set_axis(pd.Index(columns), axis=1)
        if self._has_index:
            keys = [
                self.frame.index.get_level_values(level).map(_left) for level in range(frame.index.nlevels)
            ]
            frame.index = _index(keys).set_names([_left(name) for name in frame.index.names])
        return frame.to_html(escape=False, index=self._has_index, border=0, formatters=write)


def _last(key: object, write: Callable[[object], str]) -> object:
    """A column's head, its lowest line written as its cells are."""
    return (*map(_right, key[:-1]), write(key[-1])) if isinstance(key, tuple) else write(key)


def show(frame: pd.DataFrame, caption: str = "", *, folded: bool = False) -> None:
    """Display a table: HTML in a notebook, text elsewhere. Raw rows get readable headers and digits too.

    Args:
        folded: show the caption alone, until a reader opens it.
    """
    from IPython.display import display

    display(Table(as_text(frame), caption, folded))


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Every cell written out and every header with its unit; tables of text stay as they are."""
    if frame.columns.nlevels > 1:
        return frame
    texts = {}
    for name in frame.columns:
        numbers = frame[name].dtype.kind == "f"
        texts[column_label(str(name))] = (
            _cells(frame, name) if numbers else [value_label(value, name) for value in frame[name]]
        )
    return pd.DataFrame(texts, index=frame.index)


def _is_number(text: object) -> bool:
    """A number, or the word in its place."""
    if text in STATUS_LABELS.values():
        return True
    try:
        float(str(text).replace(",", "").rstrip("×%"))
    except ValueError:
        return False
    return True


def _left(text: object) -> str:
    return f'<div style="text-align: left">{_right(text)}</div>'


def _right(text: object) -> str:
    return escape(str(text))
