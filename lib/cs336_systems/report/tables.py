"""Rows laid out as tables: few digits, units in the headers, "OOM" written out."""

import math
from collections.abc import Iterable, Sequence

import pandas as pd

from cs336_systems.report.frames import plain, require_columns, require_one_row_each
from cs336_systems.report.html import Table
from cs336_systems.report.words import MISSING, STATUS_WORDS, column_label, ordered, value_label


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
    frame = plain(frame)
    across = ordered(frame[columns], columns)
    cells = {}
    for value in values:
        header = f"{column_label(value)} by {column_label(columns)}"
        for place in across:
            column = _cells(frame[frame[columns] == place], index, value, fmt)
            if value == values[0] or (column != MISSING).any():
                cells[header, value_label(place, columns)] = column
    return _laid_out(cells, frame, index)


def show(frame: pd.DataFrame, caption: str = "") -> None:
    """Display a table: HTML in a notebook, text elsewhere. Raw rows get readable headers and digits too."""
    from IPython.display import display

    display(Table(as_text(plain(frame)), caption))


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Every cell written out and every header with its unit; tables of text stay as they are."""
    if frame.columns.nlevels > 1:
        return frame
    texts = {}
    for name in frame.columns:
        numbers = frame[name].dtype.kind == "f"
        texts[column_label(str(name))] = (
            _cells(frame, [], name) if numbers else [value_label(value, name) for value in frame[name]]
        )
    return pd.DataFrame(texts, index=frame.index)


def _names(columns: str | Sequence[str]) -> tuple[str, ...]:
    return (columns,) if isinstance(columns, str) else tuple(columns)


def _cells(rows: pd.DataFrame, index: Sequence[str], value: str, fmt: str | None = None) -> pd.Series:
    """One column of text, by the index."""
    fmt = fmt or f"{{:,.{_decimals(rows[value].dropna())}f}}"
    own = f"{value.removesuffix('_ms')}_status"  # what stands beside a row has another status than the row
    statuses = rows[own] if own in rows else rows["status"] if "status" in rows else [None] * len(rows)
    texts = [
        STATUS_WORDS.get(status, MISSING) if pd.isna(number) else fmt.format(number)
        for number, status in zip(rows[value], statuses, strict=True)
    ]
    return pd.Series(texts, index=_keys(rows, index) if index else rows.index, dtype=object)


def _keys(rows: pd.DataFrame, index: Sequence[str]) -> pd.Index:
    return pd.MultiIndex.from_frame(rows[list(index)]) if len(index) > 1 else pd.Index(rows[index[0]])


def _decimals(numbers: Iterable[float]) -> int:
    """Three significant digits of the smallest number, at most five of the largest, at most 3 decimals."""
    sizes = [abs(number) for number in numbers if number and math.isfinite(number)]
    if not sizes:
        return 0
    wanted, most = 2 - math.floor(math.log10(min(sizes))), 4 - math.floor(math.log10(max(sizes)))
    return max(0, min(wanted, most, 3))


def _laid_out(
    cells: dict[tuple[str, str], pd.Series], frame: pd.DataFrame, index: Sequence[str]
) -> pd.DataFrame:
    """Columns of text under two lines of header, lines in the order a reader expects."""
    ranks = {name: {value: rank for rank, value in enumerate(ordered(frame[name], name))} for name in index}
    lines = frame[list(index)].drop_duplicates().sort_values(list(index), key=lambda c: c.map(ranks[c.name]))
    table = pd.DataFrame({key: column.reindex(_keys(lines, index)) for key, column in cells.items()}).fillna(
        MISSING
    )
    names = [[value_label(value, name) for value in lines[name]] for name in index]
    labels = [column_label(name) for name in index]
    table.index = (
        pd.MultiIndex.from_arrays(names, names=labels) if len(index) > 1 else pd.Index(*names, name=labels[0])
    )
    table.columns = pd.MultiIndex.from_tuples(list(cells))
    return table
