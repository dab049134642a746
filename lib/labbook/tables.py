"""Rows laid out as tables: few digits, units in the headers, "OOM" written out; pandas writes the HTML.

And a saved row in a line: "plain, context 512, d = 64, float32, forward: 1.23 ms".
"""

import math
import re
from collections.abc import Mapping, Sequence
from functools import partial
from html import escape

import pandas as pd
from IPython import display

from labbook.compare import require_one_row_each
from labbook.labels import (
    MISSING,
    STATUS_LABELS,
    column_label,
    named_value,
    ordered,
    quantity,
    value_label,
)
from labbook.schema import columns_of

NO_LINES = "no rows yet"
# A number, or the word in its place.
_NUMBER = re.compile(rf"[-+]?[\d,.]+(e[-+]\d+)?[×%]?|{'|'.join(STATUS_LABELS.values())}")


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

    fmt: format of a number, "{:.2f}"; without it a column has the decimals its smallest number needs.
    Raises ValueError: two rows belong in one cell; the message names their difference.
    """
    if frame.empty:
        return frame
    index = [index] if isinstance(index, str) else list(index)
    values = [values] if isinstance(values, str) else list(values)
    keys = index + [columns]
    require_one_row_each(frame, *keys)
    labelled = frame.assign(**{key: _labelled(frame[key]) for key in keys})
    wide = labelled.set_index(keys).unstack(columns)
    cells = {}
    for value in values:
        header = f"{column_label(value)} by {column_label(columns)}"
        for place in wide[value]:
            column = _cells(wide[value, place], wide.get(("status", place)), fmt)
            if value == values[0] or (column != MISSING).any():
                cells[header, place] = column
    return pd.DataFrame(cells).rename_axis(index=[column_label(name) for name in index])


def _labelled(values):
    """The labels of a column, which sort as a reader expects."""
    label = partial(value_label, column=values.name)
    distinct = ordered(values.dropna(), values.name)
    if values.hasnans:
        distinct.append(None)
    categories = dict.fromkeys(map(label, distinct))
    return pd.Categorical(values.map(label), list(categories), ordered=True)


def _cells(numbers, statuses, fmt=None):
    """One column of text: numbers, and the word for why there is none."""
    write = fmt.format if fmt else partial(_written, _format(numbers))
    texts = numbers.map(write, na_action="ignore").astype(object)
    if statuses is not None:
        texts = texts.fillna(statuses.map(STATUS_LABELS))
    return texts.fillna(MISSING)


def _written(fmt, number):
    """A number in a format; as a power of ten where it would be shown as zero."""
    text = fmt.format(number)
    return f"{number:.1e}" if number and not re.search("[1-9]", text) else text


def _format(numbers):
    """The format of a column: as many decimals as its smallest number needs for three significant digits.

    They are fewer where the largest would have more than five digits, but not so few that the smallest is
    shown as 0; and 3 at most, which `_written` makes good where even that is a 0.
    """
    measured = (number for number in numbers if number and math.isfinite(number))
    exponents = [math.floor(math.log10(abs(number))) for number in measured] or [2]
    smallest = min(exponents)
    for_largest = max(4 - max(exponents), -smallest)
    decimals = max(0, min(2 - smallest, for_largest, 3))
    return f"{{:,.{decimals}f}}"


def show(frame: pd.DataFrame, caption: str = "", *, folded: bool = False) -> None:
    """Display a table: HTML in a notebook, text elsewhere. Raw rows get readable headers and digits too.

    folded: show the caption alone, until a reader opens it.
    """
    texts = as_text(frame)
    html = f"<p>{NO_LINES}</p>"
    plain = NO_LINES
    if len(texts):
        html = as_html(texts)
        plain = texts.to_string(index=any(texts.index.names), justify="right")
    if folded:
        html = f"<details><summary>{escape(caption)}</summary>\n{html}\n</details>"
    elif caption:
        html = f"<p>{escape(caption)}</p>\n{html}"
    show_html(html, f"{caption}\n{plain}".lstrip("\n"))


def show_html(html: str, plain: str) -> None:
    """HTML in a notebook, text elsewhere."""
    display.display({"text/html": html, "text/plain": plain}, raw=True)


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Every cell written out and every header with its unit; tables of text stay as they are."""
    if frame.columns.nlevels > 1:
        return frame
    texts = {}
    for name, cells in frame.items():
        if cells.dtype.kind == "f":
            text = _cells(cells, frame.get("status"))
        else:
            text = [value_label(value, name) for value in cells]
        texts[column_label(str(name))] = text
    return pd.DataFrame(texts, index=frame.index)


def as_html(texts: pd.DataFrame) -> str:
    """Words and heads of lines are left-aligned; numbers stay right, as pages have them."""
    html = texts.map(lambda text: escape(str(text)))
    heads = list(html.columns)
    for place, (head, cells) in enumerate(html.items()):
        if not any(map(_NUMBER.fullmatch, cells)):
            html.isetitem(place, cells.map(_left))
            heads[place] = _left(head)
    if html.columns.nlevels == 1:
        html.columns = heads
    html = html.rename(index=_left).rename_axis(index=_left)
    return html.to_html(escape=False, index=any(texts.index.names), border=0)


def _left(text):
    return f'<div style="text-align: left">{text}</div>'


def row_lines(rows: Sequence[Mapping], table: str) -> list[str]:
    """What was measured and what came out: a line for each row, one for all of a recording."""
    columns = columns_of(table)
    if not columns.group or not rows:
        return [f"{_named(row, columns.keys)}: {_outcome(row, columns.values)}" for row in rows]
    first = rows[0]
    is_ok = first.get("status", "ok") == "ok"
    outcome = f"{len(rows)} rows" if is_ok else _outcome(first, columns.values)
    return [f"{_named(first, columns.group)}: {outcome}"]


def _named(row, keys):
    return ", ".join(named_value(key, row[key]) for key in keys if not pd.isna(row.get(key)))


def _outcome(row, values):
    """The median time, or the first value that a row has; else its status with the reason."""
    if row.get("status", "ok") != "ok":
        reason = f" ({row['reason']})" if row.get("reason") else ""
        return row["status"] + reason
    column = next(name for name in ["p50_ms"] + list(values) if not pd.isna(row.get(name)))
    value = row[column]
    return value if isinstance(value, str) else quantity(value, column)
