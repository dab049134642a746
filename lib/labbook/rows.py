"""Rows: every number is in one, in the CSV of its table, `figures/<machine>/<slug>/<table>.csv`.

Tables are declared in the project's `tables.yaml`. Saving is an upsert by key: the file is written anew,
sorted, under a lock, so that neither a kill nor a second process loses a row. What does not fit is refused.
"""

import csv
import io
import json
import math
import numbers
from collections import Counter
from collections.abc import Iterable, Mapping
from contextlib import suppress

import numpy as np
import pandas as pd

from labbook import runs
from labbook.files import figures_dir, find, locked, make_folder, name_of, write_atomically
from labbook.schema import columns_of, schema

_DIGITS = {"float": 6, "exact": 9}  # significant, that a file keeps
_EXPECTED = {
    "int": "a whole number, 0 or more",
    "bool": "true or false",
    "text": "text",
}


class RowError(ValueError):
    """A row, or a file of rows, that does not fit its table."""


def save_rows(rows: Iterable[Mapping], slug: str, table: str, machine: str, run: runs.Run) -> None:
    """Save rows into `figures/<machine>/<slug>/<table>.csv`: each replaces the one that has its key.

    In a table with groups they replace all rows of their group.

    rows: key and value columns; a missing one is empty, a missing status is "ok".
    slug: of the problem, as in its notebook's name.
    table: one of the project's `tables.yaml`.
    machine: slug of where the rows were measured.
    run: that measured them.
    Raises RowError: a row does not fit; the file is left as it was. ValueError: there is no such table.
    PermissionError: the folder cannot be written to.
    """
    columns = columns_of(table)
    path = figures_dir() / machine / slug / f"{table}.csv"
    batch = _checked(rows, columns, path)
    if not batch:
        return
    make_folder(path.parent)
    with locked(path.parent.parent):
        before = _read(path)
        # Before the rows that name it: a kill leaves no row without its run.
        run.write()
        after = _upserted(before, [row | {"run": run.name} for row in batch], columns)
        write_atomically(
            path,
            after.map(_written, na_action="ignore").to_csv(index=False, lineterminator="\n"),
        )
        runs.remove_unused(machine, set(before["run"].dropna()) - set(after["run"]))


def point_of(record: Mapping, table: str) -> tuple:
    """What a row is about: the values of its keys as a file keeps them, 1/3 as 0.333333.

    Raises ValueError: one does not fit.
    """
    keys = columns_of(table).keys
    return tuple(_stored(name, kind, record.get(name)) for name, kind in keys.items())


def _checked(records, columns, path):
    """The rows of records, no two with one key."""
    rows = {}
    for number, record in enumerate(records):
        try:
            row = _row(record, columns)
            key = ", ".join(f"{name}={row[name]}" for name in columns.keys if name in row)
            if key in rows:
                raise ValueError(f"duplicate key {key}; allowed: once")
        except ValueError as error:
            raise RowError(f"{name_of(path)}, rows[{number}]: {error}") from None
        rows[key] = row
    return list(rows.values())


def _upserted(before, rows, columns):
    """The values of a file once rows are in it, instead of those of their keys or groups."""
    new = pd.DataFrame(rows, columns=list(columns.types), dtype=object)
    by = list(columns.group or columns.keys)
    new_places = pd.MultiIndex.from_frame(new[by])
    is_replaced = pd.MultiIndex.from_frame(before[by]).isin(new_places)
    return _sorted(pd.concat([before[~is_replaced], new]), columns)


def _written(value):
    """A value as a field of a file."""
    if isinstance(value, float):
        return f"{value:.9g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_rows(slug: str, machine: str, table: str) -> pd.DataFrame:
    """Load the rows of one machine, sorted by key; where it has none yet, an empty frame with every column.

    Columns have plain numpy dtypes: whole numbers with gaps are floats; empty text and truth values are None.
    `machine` is the one given.
    Raises RowError: the file is damaged, or a value does not fit; the message names file and line.
    """
    columns = columns_of(table)
    frame = _sorted(_read(find(machine, slug, f"{table}.csv")), columns)
    for name, kind in columns.types.items():
        gaps = frame[name].hasnans
        dtypes = {"int": float if gaps else int, "bool": object if gaps else bool, "text": object}
        frame[name] = frame[name].astype(dtypes.get(kind, float))
    return frame.assign(machine=pd.Series(machine, frame.index, dtype=object))


def run_counts(slug: str, machine: str) -> Counter[tuple[str, str]]:
    """How many rows of each table of a problem each run measured on a machine; "" is an unknown one."""
    counts = Counter()
    for table in schema().tables:
        fields = _fields(find(machine, slug, f"{table}.csv"))
        counts.update((table, run) for run in fields["run"])
    return counts


def published(name: str) -> pd.DataFrame:
    """What public reports measured on other GPUs: `figures/published/<name>.csv`; times as rows have them."""
    return pd.read_csv(find("published", f"{name}.csv"))


# One value, one row.


def _row(record, columns):
    """The record with each value as its column stores it, without empty ones; these may be of other tables.

    Raises ValueError: what was given, what is allowed.
    """
    for name, value in record.items():
        is_known = name == "machine" or name in columns.types
        if not (is_known or value == "" or pd.isna(value)):  # of a frame with more columns
            raise ValueError(
                f"there is no column {name!r}; allowed: {', '.join(columns.keys | columns.values)}"
            )
    row = {"status": "ok"}
    for name, kind in columns.types.items():
        value = _stored(name, kind, record.get(name))
        if value is not None:
            row[name] = value
    _refuse_impossible_times(row, columns)
    return row


def _refuse_impossible_times(row, columns):
    status = row["status"]
    times = [name for name in columns.values if name in row and name.endswith("_ms")]
    if status != "ok" and times:
        name = times[0]
        raise ValueError(f"{name} is {row[name]}; allowed with status {status!r}: no time")
    spread = [0] + [row[name] for name in ("p20_ms", "p50_ms", "p80_ms") if name in row]
    if spread != sorted(spread):
        raise ValueError(f"0, p20_ms, p50_ms, p80_ms are {spread}; allowed: none falls")


def _stored(column, kind, value):
    """The value as the column stores it; None, NaN and pandas' NA are empty.

    Raises ValueError: what was given, what is allowed.
    """
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    is_truth_value = isinstance(value, bool | np.bool_)
    is_number = isinstance(value, numbers.Real) and not is_truth_value and abs(value) < math.inf
    match kind:
        case "text" if isinstance(value, str):
            return _stored_text(column, value)
        case "bool" if is_truth_value:
            return bool(value)
        case "int" if is_number and 0 <= value < 2**63 and float(value).is_integer():
            return int(value)
        case "float" | "exact" if is_number:
            return float(f"{value:.{_DIGITS[kind]}g}")
    raise ValueError(f"{column} is {value!r}; allowed: {_EXPECTED.get(kind, 'a finite number')}")


def _stored_text(column, value):
    text = " ".join(value.split())  # a row is one line
    allowed = schema().allowed.get(column)
    if text and allowed and text not in allowed:
        raise ValueError(f"{column} is {value!r}; allowed: {', '.join(allowed)}")
    return text or None


# The file.


def _read(path):
    """The values of a file; of several rows with one key the last."""
    columns = columns_of(path.stem)
    rows = _fields(path)
    for name, kind in columns.types.items():
        rows[name] = _values(rows[name], kind, path)
    return rows.drop_duplicates(list(columns.keys), keep="last")


def _fields(path):
    """The fields of a file, as text, by the number of their line; nothing where there is none."""
    columns = columns_of(path.stem)
    types = list(columns.types)
    if not path.exists():
        return pd.DataFrame(columns=types, dtype=object)
    try:
        frame = _lines(path, columns)
    except (ValueError, csv.Error) as error:
        raise RowError(
            f"{name_of(path)} is damaged: {error}; restore the file from git, or move it away and "
            "measure again"
        ) from None
    return frame.reindex(columns=types, fill_value="")


def _lines(path, columns):
    """The fields of each line of a file, by its number. Raises ValueError: one does not fit."""
    text = io.StringIO(path.read_bytes().decode("utf-8-sig"), newline="")
    header, *lines = csv.reader(text, strict=True)
    names = set(header)
    are_known = set(columns.keys) <= names <= set(columns.types)
    if not are_known or len(names) < len(header):
        raise ValueError(
            f"line 1 has the columns {', '.join(header)}; allowed: {', '.join(columns.types)}"
        )
    for number, fields in enumerate(lines, start=2):
        if len(fields) != len(header):
            raise ValueError(f"line {number} has {len(fields)} fields for {len(header)} columns")
    return pd.DataFrame(lines, range(2, len(lines) + 2), header, dtype=object)


def _values(fields, kind, path):
    """The values of a column of a file."""
    values = {}
    for text in fields.unique():
        try:
            values[text] = _stored(fields.name, kind, _parsed(text, kind))
        except ValueError as error:
            raise RowError(f"{name_of(path)}, line {(fields == text).idxmax()}: {error}") from None
    return pd.Series([values[text] for text in fields], fields.index, object)


def _parsed(text, kind):
    """The value in a field; what cannot be read stays text, which is then refused as it stands there."""
    with suppress(ValueError):
        if kind != "text":
            return json.loads(text)
    return text or None


def _sorted(rows, columns):
    """Rows sorted by their keys: empty first, numbers by size, listed values as listed."""

    def places(column):
        listed = schema().allowed.get(column.name)
        if listed:
            return column.map({value: place for place, value in enumerate(listed)}).fillna(-1)
        if columns.keys[column.name] == "text":
            return column.fillna("")
        return column.astype(float).fillna(-math.inf)

    return rows.sort_values(list(columns.keys), key=places, kind="stable", ignore_index=True)
