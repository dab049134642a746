"""Rows: every number is in one, in the CSV of its table, `figures/<machine>/<slug>/<table>.csv`.

Tables are declared in the project's `tables.yaml`. Saving is an upsert by key: the file is written anew,
sorted, under a lock, so that neither a kill nor a second process loses a row. What does not fit is refused.
"""

import csv
import io
import math
import numbers
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd

from labbook import runs
from labbook.files import figures_dir, find, locked, make_folder, write_atomically
from labbook.schema import Table, schema

Row = dict[str, Any]

_DIGITS = {"float": 6, "exact": 9}  # significant, that a file keeps
_EXPECTED = {"int": "a whole number, 0 or more", "bool": "true or false", "text": "text"}
_READ = {
    "int": int,
    "float": float,
    "exact": float,
    "bool": {"true": True, "false": False}.__getitem__,
}
_REPAIR = "restore the file from git, or move it away and measure again"


class RowError(ValueError):
    """A row, or a file of rows, that does not fit its table."""


def save_rows(
    rows: Iterable[Mapping[str, Any]] | pd.DataFrame,
    slug: str,
    table: str,
    machine: str,
    run: runs.Run | None = None,
) -> Path:
    """Save rows into `figures/<machine>/<slug>/<table>.csv`: each replaces the one that has its key.

    In a table with groups they replace all rows of their group.

    rows: key and value columns; a missing one is empty, a missing status is "ok". A given run stays.
    slug: of the problem, as in its notebook's name.
    table: one of the project's `tables.yaml`.
    machine: slug of where the rows were measured.
    run: that measured them; by default a new one.
    Raises RowError: a row does not fit; the file is left as it was. ValueError: there is no such table.
    PermissionError: the folder cannot be written to.
    """
    path = figures_dir() / _file(machine, slug, table)
    where = _name(path)
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    batch = [checked(row, table, f"{where}, rows[{i}]", machine) for i, row in enumerate(records)]
    _refuse_duplicates(batch, table, where)
    if not batch:
        return path
    make_folder(path.parent)
    with locked(path.parent.parent):
        before = _read(path, table)
        if any("run" not in row for row in batch):
            run = run or runs.Run(slug, machine)
            run.write()
            batch = [{"run": run.name} | row for row in batch]
        after = _replaced(before, batch, schema().tables[table])
        write_atomically(path, after.to_csv(index=False, lineterminator="\n"))
        runs.remove_unused(machine, set(before["run"]) - set(after["run"]) - {""})
    return path


def _replaced(before: pd.DataFrame, batch: Sequence[Row], table: Table) -> pd.DataFrame:
    """The fields of a file once rows are in it."""
    fields = [{name: _written(value) for name, value in row.items()} for row in batch]
    after = pd.DataFrame(fields, columns=list(table.types), dtype=object).fillna("")
    by = list(table.group or table.keys)
    is_replaced = pd.MultiIndex.from_frame(before[by]).isin(pd.MultiIndex.from_frame(after[by]))
    return _sorted(pd.concat([before[~is_replaced], after]), table)


def _written(value: int | float | str | bool) -> str:
    """A value as a field of a file."""
    if isinstance(value, float):
        return f"{value:.9g}"
    return str(value).lower() if isinstance(value, bool) else str(value)


def load_rows(slug: str, machine: str, table: str) -> pd.DataFrame:
    """Load the rows of one machine, sorted by key; where it has none yet, an empty frame with every column.

    Columns have plain numpy dtypes: whole numbers with gaps are floats; empty text and truth values are None.
    `run` is None for rows from before runs had files; `machine` is the one given.
    Raises RowError: the file is damaged, or a value does not fit; the message names file and line.
    """
    path = find(*_file(machine, slug, table).parts)
    columns = schema().tables[table]
    fields = _sorted(_read(path, table), columns)
    types = columns.types.items()
    frame = pd.DataFrame({name: _typed(fields[name], kind, path) for name, kind in types})
    return frame.assign(machine=pd.Series(machine, frame.index, dtype=object))


def run_counts(slug: str, machine: str) -> Counter[str]:
    """How many rows of a problem each run measured on a machine; "" is an unknown one."""
    counts: Counter[str] = Counter()
    for table in schema().tables:
        counts.update(_read(find(machine, slug, f"{table}.csv"), table)["run"])
    return counts


def published(name: str) -> pd.DataFrame:
    """What public reports measured on other GPUs: `figures/published/<name>.csv`; times as rows have them."""
    return pd.read_csv(find("published", f"{name}.csv"))


# One value, one row.


def checked(record: Mapping[str, Any], table: str, where: str, machine: str) -> Row:
    """The record with each value as its column stores it; empty ones are left out.

    An empty value may be given for a column that the table does not have.
    Raises RowError: one sentence: where, what was given, what is allowed.
    """
    columns = schema().tables[table]
    _check_names(record, columns, where, machine)
    row: Row = {"status": "ok"}
    for name, kind in columns.types.items():
        try:
            value = _stored(name, kind, record.get(name))
        except ValueError as error:
            raise RowError(f"{where}: {name} is {record[name]!r}; {error}") from None
        if value is not None:
            row[name] = value
    _check_status(row, columns, where)
    spread = [row[name] for name in ("p20_ms", "p50_ms", "p80_ms") if name in row]
    if spread != sorted(spread):
        raise RowError(f"{where}: p20_ms, p50_ms, p80_ms are {spread}; allowed: none falls")
    return row


def _check_names(record: Mapping[str, Any], columns: Table, where: str, machine: str) -> None:
    """Refuse a row of another machine, and values of columns that the table does not have."""
    measured_on = record.get("machine", machine)
    if measured_on != machine:
        message = f"machine is {measured_on!r}; allowed in this folder: {machine!r}"
        raise RowError(f"{where}: {message}")
    for name in [name for name in record if name not in columns.types and name != "machine"]:
        value = record[name]
        if value not in (None, "") and not pd.isna(value):  # of a frame with more columns
            allowed = ", ".join(list(columns.types)[:-1])
            raise RowError(f"{where}: there is no column {name!r}; allowed: {allowed}")


def _check_status(row: Row, columns: Table, where: str) -> None:
    """Refuse a row that is ok and says nothing, and times of what ran out of memory, say."""
    values = [name for name in columns.values if name in row]
    times = [name for name in values if name.endswith("_ms")]
    status = row["status"]
    if status == "ok" and not values:
        allowed = ", ".join(columns.values)
        raise RowError(f"{where}: there is no value; allowed with status 'ok': some of {allowed}")
    if status != "ok" and times:
        message = f"{times[0]} is {row[times[0]]}; allowed with status {status!r}: no time"
        raise RowError(f"{where}: {message}")


def _stored(column: str, kind: str, value: Any) -> int | float | str | bool | None:
    """The value as the column stores it; None, NaN and pandas' NA are empty. ValueError: what is allowed."""
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    if kind == "text" and isinstance(value, str):
        text = " ".join(value.split())  # a row is one line
        allowed = schema().allowed.get(column)
        if text and allowed and text not in allowed:
            raise ValueError(f"allowed: {', '.join(allowed)}")
        return text or None
    if isinstance(value, bool | np.bool_):
        if kind == "bool":
            return bool(value)
    elif isinstance(value, numbers.Real) and math.isfinite(value):
        if kind in _DIGITS:
            return float(f"{value:.{_DIGITS[kind]}g}")
        if kind == "int" and value >= 0 and float(value).is_integer():
            return int(value)
    raise ValueError(f"allowed: {_EXPECTED.get(kind, 'a finite number')}")


def _refuse_duplicates(batch: Sequence[Row], table: str, where: str) -> None:
    seen = set()
    for number, row in enumerate(batch):
        keys = [f"{name}={row[name]}" for name in schema().tables[table].keys if name in row]
        key = ", ".join(keys)
        if key in seen:
            raise RowError(f"{where}, rows[{number}]: duplicate key {key}; allowed: once")
        seen.add(key)


# The file.


def _file(machine: str, slug: str, table: str) -> Path:
    """The file of a table, in a folder of figures."""
    for folder, name in (("machine", machine), ("slug", slug)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            allowed = "letters, digits, '.', '_' and '-'"
            raise ValueError(f"{folder} {name!r} cannot name a folder; allowed: {allowed}")
    tables = schema().tables
    if table not in tables:
        raise ValueError(f"unknown table {table!r}; allowed: {', '.join(tables)}")
    return Path(machine, slug, f"{table}.csv")


def _name(path: Path) -> str:
    """How messages call a file: relative to the figures folder, so the same everywhere."""
    return "/".join(path.parts[-3:])


def _read(path: Path, table: str) -> pd.DataFrame:
    """The fields of a file, as text, by the number of their line; of several rows with one key the last."""
    columns = schema().tables[table]
    types = list(columns.types)
    if not path.exists():
        return pd.DataFrame(columns=types, dtype=object)
    try:
        text = io.StringIO(path.read_bytes().decode(), newline="")
        header, *lines = list(csv.reader(text, strict=True))
    except (ValueError, csv.Error) as error:
        reason = f"is damaged ({error or 'it is empty'})"
        raise RowError(f"{_name(path)} {reason}; {_REPAIR}") from None
    strange = set(header) - set(types)
    missing = set(columns.keys) - set(header)
    if strange or missing or len(set(header)) < len(header):
        message = f"the columns are {', '.join(header)}; allowed: {', '.join(types)}"
        raise RowError(f"{_name(path)}, line 1: {message}; {_REPAIR}")
    for number, fields in enumerate(lines, start=2):
        if len(fields) != len(header):
            message = f"{len(fields)} fields for {len(header)} columns"
            raise RowError(f"{_name(path)}, line {number} is damaged ({message}); {_REPAIR}")
    frame = pd.DataFrame(lines, range(2, len(lines) + 2), header, dtype=object)
    frame = frame.drop_duplicates(list(columns.keys), keep="last")
    return frame.reindex(columns=types, fill_value="")


def _typed(fields: pd.Series, kind: str, path: Path) -> pd.Series:
    """The values of a column of a file."""
    values: dict[str, Any] = {}
    for text in fields.unique():
        value = text or None
        # Text is as it is; what cannot be read is refused as it is.
        with suppress(KeyError, ValueError):
            value = _READ[kind](text)
        try:
            values[text] = _stored(fields.name, kind, value)
        except ValueError as error:
            message = f"line {(fields == text).idxmax()}: {fields.name} is {text!r}; {error}"
            raise RowError(f"{_name(path)}, {message}") from None
    gaps = None in values.values()
    dtypes = {"int": float if gaps else int, "bool": object if gaps else bool, "text": object}
    return pd.Series([values[text] for text in fields], dtype=dtypes.get(kind, float))


def _sorted(fields: pd.DataFrame, columns: Table) -> pd.DataFrame:
    """Rows sorted by their keys: empty first, numbers by size, listed values as listed."""

    def places(column: pd.Series) -> pd.Series:
        listed = schema().allowed.get(column.name)
        if listed:
            return column.map({value: place for place, value in enumerate(listed)}).fillna(-1)
        if columns.keys[column.name] in ("text", "bool"):
            return column
        return pd.to_numeric(column, errors="coerce").fillna(-math.inf)

    return fields.sort_values(list(columns.keys), key=places, kind="stable")
