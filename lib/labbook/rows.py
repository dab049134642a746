"""Rows: every number is in one, in the CSV of its table, `figures/<machine>/<slug>/<table>.csv`.

Tables are declared in `notebooks/tables.yaml`. Saving is an upsert by key: the file is written anew, sorted,
under a lock, so that neither a kill nor a second process loses a row. What does not fit is refused.
"""

import csv
import io
import math
import numbers
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import yaml

from labbook import machine as here
from labbook import runs
from labbook.files import NOTEBOOKS, figures_dir, find, locked, make_folder, write_atomically

Row = dict[str, Any]

STATUSES = ("ok", "oom", "skipped", "error")
_DIGITS = {"float": 6, "exact": 9}  # significant, that a file keeps
_EXPECTED = {"int": "a whole number, 0 or more", "bool": "true or false", "text": "text"}
_READ = {
    "int": int,
    "float": float,
    "exact": float,
    "bool": {"true": True, "false": False}.__getitem__,
}
_WRITTEN = {float: "{:.9g}".format, bool: lambda value: str(value).lower()}
_REPAIR = "restore the file from git, or move it away and measure again"


class RowError(ValueError):
    """A row, or a file of rows, that does not fit its table."""


@dataclass(frozen=True)
class Table:
    """The columns of a table by name, each with its type, and the keys of one recording, if it has such."""

    keys: dict[str, str]
    values: dict[str, str]
    group: tuple[str, ...]

    @property
    def types(self) -> dict[str, str]:
        """Every column of the file, in its order."""
        return {**self.keys, **self.values, **dict.fromkeys(("status", "reason", "run"), "text")}


def columns(text: str, default: str = "text") -> dict[str, str]:
    """The types of declared columns, "name name:int $several", by name."""
    found: dict[str, str] = {}
    for word in text.split():
        name, _, type_ = word.partition(":")
        several = columns(DECLARED["shared"][name[1:]], default) if name[0] == "$" else {}
        found |= several or {name: type_ or default}
    return found


_LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # the first where libyaml is there
DECLARED = yaml.load((NOTEBOOKS / "tables.yaml").read_text(encoding="utf-8"), _LOADER)
TABLES = {
    name: Table(
        columns(each["keys"]), columns(each["values"], "float"), (*columns(each.get("group", "")),)
    )
    for name, each in DECLARED["tables"].items()
}
ALLOWED: dict[str, Sequence[str]] = {"status": STATUSES, **DECLARED["allowed"]}
KEYS = tuple(dict.fromkeys(name for table in TABLES.values() for name in table.keys))
VALUES = tuple(dict.fromkeys(name for table in TABLES.values() for name in table.values))


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
    table: one of `notebooks/tables.yaml`.
    machine: slug of where the rows were measured.
    run: that measured them; by default a new one.
    Raises RowError: a row does not fit; the file is left as it was. ValueError: there is no such table.
    PermissionError: the folder cannot be written to.
    """
    path = _path(figures_dir(), machine, slug, table)
    schema, where = TABLES[table], _name(path)
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    batch = [checked(row, table, f"{where}, rows[{i}]", machine) for i, row in enumerate(records)]
    keys = [
        ", ".join(f"{name}={row[name]}" for name in schema.keys if name in row) for row in batch
    ]
    for number in pd.Index(keys, dtype=object).duplicated().nonzero()[0]:
        raise RowError(f"{where}, rows[{number}]: duplicate key {keys[number]}; allowed: once")
    gpus, gpu = here.gpu_names(), here.gpu_of(machine)
    if gpu not in gpus:
        raise RowError(f"{where}: {machine!r} has the GPU {gpu!r}; allowed here: {', '.join(gpus)}")
    if not batch:
        return path
    make_folder(path.parent)
    with locked(path.parent.parent):
        before = _read(path, table)
        run = run or runs.Run(slug, machine)
        if any("run" not in row for row in batch):
            run.write()
            batch = [{"run": run.name} | row for row in batch]
        fields = [
            {name: _WRITTEN.get(type(each), str)(each) for name, each in row.items()}
            for row in batch
        ]
        after = pd.DataFrame(fields, columns=[*schema.types], dtype=object).fillna("")
        by = [*(schema.group or schema.keys)]
        replaced = pd.MultiIndex.from_frame(before[by]).isin(pd.MultiIndex.from_frame(after[by]))
        after = _sorted(pd.concat([before[~replaced], after]), schema)
        write_atomically(path, after.to_csv(index=False, lineterminator="\n"))
        runs.remove_unused(machine, {*before["run"]} - {*after["run"], ""})
    return path


def load_rows(slug: str, machine: str, table: str) -> pd.DataFrame:
    """Load the rows of one machine, sorted by key; where it has none yet, an empty frame with every column.

    Columns have plain numpy dtypes: whole numbers with gaps are floats; empty text and truth values are None.
    `run` is None for rows from before runs had files; `machine` is the one given.
    Raises RowError: the file is damaged, or a value does not fit; the message names file and line.
    """
    path, schema = find(*_path(Path(), machine, slug, table).parts), TABLES[table]
    text = _sorted(_read(path, table), schema)
    frame = pd.DataFrame(
        {name: _typed(text[name], kind, path) for name, kind in schema.types.items()}
    )
    return frame.assign(machine=pd.Series(machine, frame.index, dtype=object))


def run_counts(slug: str, machine: str) -> Counter[str]:
    """How many rows of a problem each run measured on a machine; "" is an unknown one."""
    tables = (_read(find(machine, slug, f"{table}.csv"), table) for table in sorted(TABLES))
    return Counter(name for rows in tables for name in rows["run"])


def published(name: str) -> pd.DataFrame:
    """What public reports measured on other GPUs: `figures/published/<name>.csv`; times as rows have them."""
    return pd.read_csv(find("published", f"{name}.csv"))


# One value, one row.


def _check(column: str, kind: str, value: Any) -> int | float | str | bool | None:
    """The value as the column stores it; None, NaN and pandas' NA are empty. ValueError: what is allowed."""
    if pd.api.types.is_scalar(value) and pd.isna(value):
        return None
    if kind == "text" and isinstance(value, str):
        text = " ".join(value.split())  # a row is one line
        if text and text not in ALLOWED.get(column, [text]):
            raise ValueError(f"allowed: {', '.join(ALLOWED[column])}")
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


def checked(record: Mapping[str, Any], table: str, where: str, machine: str) -> Row:
    """The record with each value as its column stores it; empty ones are left out.

    An empty value may be given for a column that only other tables have.
    Raises RowError: one sentence: where, what was given, what is allowed.
    """
    schema, row = TABLES[table], {"status": "ok"}
    types = schema.types
    if (given := record.get("machine", machine)) != machine:
        raise RowError(f"{where}: machine is {given!r}; allowed in this folder: {machine!r}")
    for name, given in record.items():
        if name in types:
            try:
                value = _check(name, types[name], given)
            except ValueError as error:
                raise RowError(f"{where}: {name} is {given!r}; {error}") from None
            if value is not None:
                row[name] = value
        elif name != "machine" and not (
            (name in (*KEYS, *VALUES) and given in (None, "")) or given != given
        ):
            raise RowError(
                f"{where}: there is no column {name!r}; allowed: {', '.join(list(types)[:-1])}"
            )
    got, status = [name for name in schema.values if name in row], row["status"]
    spread = [row[name] for name in ("p20_ms", "p50_ms", "p80_ms") if name in row]
    if status == "ok" and not got:
        allowed = ", ".join(schema.values)
        raise RowError(f"{where}: there is no value; allowed with status 'ok': some of {allowed}")
    if status != "ok" and (times := [name for name in got if name.endswith("_ms")]):
        raise RowError(
            f"{where}: {times[0]} is {row[times[0]]}; allowed with status {status!r}: no time"
        )
    if spread != sorted(spread):
        raise RowError(f"{where}: p20_ms, p50_ms, p80_ms are {spread}; allowed: none falls")
    return row


# The file.


def _path(root: Path, machine: str, slug: str, table: str) -> Path:
    for what, name in (("machine", machine), ("slug", slug)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            allowed = "letters, digits, '.', '_' and '-'"
            raise ValueError(f"{what} {name!r} cannot name a folder; allowed: {allowed}")
    if table not in TABLES:
        raise ValueError(f"unknown table {table!r}; allowed: {', '.join(TABLES)}")
    return root / machine / slug / f"{table}.csv"


def _name(path: Path) -> str:
    """How messages call a file: relative to the figures folder, so the same everywhere."""
    return "/".join(path.parts[-3:])


def _read(path: Path, table: str) -> pd.DataFrame:
    """The fields of a file, as text, by the number of their line; of several rows with one key the last."""
    name, schema = _name(path), TABLES[table]
    if not path.exists():
        return pd.DataFrame(columns=[*schema.types], dtype=object)
    try:
        header, *lines = list(
            csv.reader(io.StringIO(path.read_bytes().decode(), newline=""), strict=True)
        )
    except (ValueError, csv.Error) as error:
        raise RowError(f"{name} is damaged ({error or 'it is empty'}); {_REPAIR}") from None
    if len(set(header) & {*schema.types}) < len(header) or not set(header) >= set(schema.keys):
        allowed = ", ".join(schema.types)
        raise RowError(
            f"{name}, line 1: the columns are {', '.join(header)}; allowed: {allowed}; {_REPAIR}"
        )
    for number, fields in enumerate(lines, start=2):
        if len(fields) != len(header):
            told = f"{len(fields)} fields for {len(header)} columns"
            raise RowError(f"{name}, line {number} is damaged ({told}); {_REPAIR}")
    frame = pd.DataFrame(lines, range(2, len(lines) + 2), header, dtype=object)
    frame = frame.drop_duplicates([*schema.keys], keep="last")
    return frame.reindex(columns=[*schema.types], fill_value="")


def _typed(text: pd.Series, kind: str, path: Path) -> pd.Series:
    """The values of a column of a file."""
    values: dict[str, Any] = {}
    for field in text.unique():
        value = field or None
        with suppress(
            KeyError, ValueError
        ):  # text is as it is; what cannot be read is refused as it is
            value = _READ[kind](field)
        try:
            values[field] = _check(text.name, kind, value)
        except ValueError as error:
            line = (text == field).idxmax()
            raise RowError(
                f"{_name(path)}, line {line}: {text.name} is {field!r}; {error}"
            ) from None
    gaps = None in values.values()
    dtypes = {"int": float if gaps else int, "bool": object if gaps else bool, "text": object}
    return pd.Series([values[field] for field in text], dtype=dtypes.get(kind, float))


def _sorted(text: pd.DataFrame, schema: Table) -> pd.DataFrame:
    """Rows sorted by their keys: empty first, numbers by size, listed values as listed."""

    def places(fields: pd.Series) -> pd.Series:
        if listed := ALLOWED.get(fields.name):
            return fields.map({value: place for place, value in enumerate(listed)}).fillna(-1)
        is_text = schema.keys[fields.name] in ("text", "bool")
        return fields if is_text else pd.to_numeric(fields, errors="coerce").fillna(-math.inf)

    return text.sort_values([*schema.keys], key=places, kind="stable")
