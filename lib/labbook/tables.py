"""Rows laid out as tables: few digits, units in the headers, "OOM" written out; pandas writes the HTML.

And a saved row in a line: "plain, context 512, d = 64, float32, forward: 1.23 ms".
"""

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import Any

import numpy as np
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
from labbook.rows import TABLES

NO_LINES = "no rows yet"
# A number, or the word in its place.
_NUMBER = re.compile(rf"[-+]?[\d,.]+(e[-+]\d+)?[×%]?|{'|'.join(STATUS_LABELS.values())}")


def pivot(
    frame: pd.DataFrame, index: str | Sequence[str], columns: str,
    values: str | Sequence[str] = "p50_ms", *, fmt: str | None = None,
) -> pd.DataFrame:  # fmt: skip
    """A table of text: `index` down, `columns` across, under the name and unit of each of `values`.

    Of the values after the first, columns with nothing in them are left out.

    fmt: format of a number, "{:.2f}"; without it a column has the decimals its smallest number needs.
    Raises ValueError: two rows belong in one cell; the message names their difference.
    """
    if frame.empty:
        return frame
    index, values = ([name] if isinstance(name, str) else list(name) for name in (index, values))
    require_one_row_each(frame, *index, columns)
    keys = [*index, columns]
    wide = (
        frame.assign(**{key: _labelled(frame[key]) for key in keys})
        .set_index(keys)
        .unstack(columns)
    )
    cells = {}
    for value in values:
        header = f"{column_label(value)} by {column_label(columns)}"
        for place in wide[value]:
            own = f"{value.removesuffix('_ms')}_status"  # as the reference's time beside a row has
            status = wide.get((own, place), wide.get(("status", place)))
            column = _cells(wide[value, place], status, fmt)
            if value == values[0] or (column != MISSING).any():
                cells[header, place] = column
    return pd.DataFrame(cells).rename_axis(index=[column_label(name) for name in index])


def _labelled(values: pd.Series) -> pd.Categorical:
    """The labels of a column, which sort as a reader expects."""
    known = dict.fromkeys(value_label(value, values.name) for value in ordered(values, values.name))
    categories = [*known, *([MISSING] if values.isna().any() else [])]
    return pd.Categorical(
        [value_label(value, values.name) for value in values], categories, ordered=True
    )


def _cells(numbers: pd.Series, statuses: Iterable | None, fmt: str | None = None) -> pd.Series:
    """One column of text: numbers, and the word for why there is none.

    Without a format: three significant digits of the smallest, five of the largest, 3 decimals at most.
    """
    if not fmt:
        sizes = [math.floor(math.log10(abs(n))) for n in numbers if n and math.isfinite(n)] or [2]
        fmt = f"{{:,.{max(0, min(2 - min(sizes), 4 - max(sizes), 3))}f}}"
    told = zip(numbers, [None] * len(numbers) if statuses is None else statuses, strict=True)
    texts = [STATUS_LABELS.get(why, MISSING) if pd.isna(n) else fmt.format(n) for n, why in told]
    return pd.Series(texts, numbers.index, dtype=object)


def show(frame: pd.DataFrame, caption: str = "", *, folded: bool = False) -> None:
    """Display a table: HTML in a notebook, text elsewhere. Raw rows get readable headers and digits too.

    folded: show the caption alone, until a reader opens it.
    """
    texts = as_text(frame)
    table = as_html(texts) if len(texts) else f"<p>{NO_LINES}</p>"
    if folded:
        table = f"<details><summary>{escape(caption)}</summary>\n{table}\n</details>"
    elif caption:
        table = f"<p>{escape(caption)}</p>\n{table}"
    plain = (
        texts.to_string(index=any(texts.index.names), justify="right") if len(texts) else NO_LINES
    )
    display.display(
        {"text/html": table, "text/plain": f"{caption}\n{plain}".lstrip("\n")}, raw=True
    )


def as_text(frame: pd.DataFrame) -> pd.DataFrame:
    """Every cell written out and every header with its unit; tables of text stay as they are."""
    if frame.columns.nlevels > 1:
        return frame
    texts = {}
    for name, cells in frame.items():
        status = frame.get(f"{str(name).removesuffix('_ms')}_status", frame.get("status"))
        numbers = cells.dtype.kind == "f"
        text = _cells(cells, status) if numbers else [value_label(value, name) for value in cells]
        texts[column_label(str(name))] = text
    return pd.DataFrame(texts, index=frame.index)


def as_html(texts: pd.DataFrame) -> str:
    """Words and heads of lines are left-aligned; numbers stay right, as pages have them."""
    words = [not any(map(_NUMBER.fullmatch, map(str, column))) for _, column in texts.items()]
    html = texts.map(lambda text: escape(str(text)))
    for place in np.flatnonzero(words):
        html.isetitem(place, html.iloc[:, place].map(_left))
    if html.columns.nlevels == 1:
        html.columns = [
            _left(head) if word else head for head, word in zip(html, words, strict=True)
        ]
    html.index = html.index.map(
        lambda key: tuple(map(_left, key)) if isinstance(key, tuple) else _left(key)
    )
    html.index.names = [name and _left(name) for name in texts.index.names]
    return html.to_html(escape=False, index=any(texts.index.names), border=0)


def _left(text: object) -> str:
    return f'<div style="text-align: left">{text}</div>'


def row_lines(rows: Sequence[Mapping[str, Any]], table: str) -> list[str]:
    """What was measured and what came out: a line for each row, one for all of a recording."""
    schema, lines = TABLES[table], []
    keys = schema.group or schema.keys
    for row in rows[:1] if schema.group else rows:
        told = ", ".join(
            named_value(name, row[name]) for name in keys if not pd.isna(row.get(name))
        )
        name = next((name for name in ("p50_ms", *schema.values) if not pd.isna(row.get(name))), "")
        if row.get("status", "ok") != "ok":
            outcome = row["status"] + (f" ({row['reason']})" if row.get("reason") else "")
        elif schema.group:
            outcome = f"{len(rows)} rows"
        else:
            outcome = row[name] if isinstance(row[name], str) else quantity(row[name], name)
        lines.append(f"{told}: {outcome}")
    return lines
