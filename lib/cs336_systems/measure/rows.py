"""Rows: every number of the workbook, kept in one CSV a table under `figures/<machine>/<slug>/`.

Saving is an upsert by key, atomic and locked: a killed run loses nothing, a rerun replaces its rows, two runs
share a file. What does not fit the vocabulary is refused with a sentence, and the file stays as it was.
"""

import csv
import io
import os
import re
import subprocess
from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

import pandas as pd

from cs336_systems.measure import machine as here
from cs336_systems.measure.files import (
    REPOSITORY_FIGURES,
    figures_dir,
    find,
    locked,
    write_atomically,
)
from cs336_systems.measure.schema import (
    COLUMNS,
    DTYPES,
    KEYS,
    PASSES,
    PROVENANCE,
    STATUSES,
    unknown_column,
)
from cs336_systems.measure.validation import (
    Key,
    Row,
    RowError,
    check_row,
    converted,
    describe,
    key_of,
    pass_order_errors,
)

__all__ = [
    "COLUMNS",
    "DTYPES",
    "KEYS",
    "PASSES",
    "STATUSES",
    "RowError",
    "figures_dir",
    "load_machines",
    "load_rows",
    "pass_order_errors",
    "published",
    "save_rows",
]

_PANDAS_TYPES = {int: "Int64", float: "float64", bool: "boolean", str: "object"}
_REPAIR = "restore the file from git, or move it away and measure again"


def save_rows(
    rows: Iterable[Mapping[str, Any]] | pd.DataFrame,
    slug: str,
    *,
    machine: str | None = None,
    table: str = "rows",
    replacing: Mapping[str, Any] | None = None,
) -> Path:
    """Save rows into `figures/<machine>/<slug>/<table>.csv`; a row replaces the one that has its key.

    Args:
        rows: key and value columns; a missing one is empty, a missing status is "ok". Provenance is added.
        slug: slug of the problem, as in its notebook's name.
        machine: slug of the machine the rows were measured on; by default the one that "auto" means here.
        table: name of the file.
        replacing: drop the rows with these key values first. For tables whose keys come out of a measurement
            (names of kernels): nothing of an older one may stay.

    Returns:
        The path of the file.

    Raises:
        RowError: a row, or what the file already holds, does not fit; the file is left as it was.
        PermissionError: the folder cannot be written to.
    """
    machine = machine or here.machine_card().slug
    path = _path(figures_dir(), machine, slug, table)
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    dropped = converted(replacing or {}, f"{_name(path)}, replacing")
    new: dict[Key, Row] = {}
    for number, record in enumerate(records):
        where = f"{_name(path)}, rows[{number}]"
        row = {"status": "ok"} | converted(record, where)
        if any(row.get(name) is None for name in PROVENANCE):
            given = {name: value for name, value in row.items() if value is not None}
            row |= _provenance(machine, where) | given
        check_row(row, machine, where)
        _add(new, row, where)
    with locked(path.parent.parent):
        merged = {key: row for key, row in _read(path, machine).items() if not _agrees(row, dropped)} | new
        _check_table(merged.values(), machine, _name(path))
        if new:
            write_atomically(path, _to_csv(merged.values()))
    return path


def _agrees(row: Row, values: Row) -> bool:
    return bool(values) and all(row.get(name) == value for name, value in values.items())


def load_rows(slug: str, machine: str, *, table: str = "rows") -> pd.DataFrame:
    """Load the rows of one machine; where it has none yet, an empty frame with every column.

    Whole numbers are nullable Int64, truth values nullable boolean, text is object; empty is NA, NaN or None.

    Raises:
        RowError: the file is damaged or breaks a rule.
    """
    path = find(*_path(Path(), machine, slug, table).parts)
    rows = list(_read(path, machine).values())
    _check_table(rows, machine, _name(path))
    names = _column_names(rows) if rows else list(COLUMNS)
    return pd.DataFrame(
        {
            name: pd.Series([row.get(name) for row in rows], dtype=_PANDAS_TYPES[COLUMNS[name].type])
            for name in names
        }
    )


def load_machines(slug: str, machines: Iterable[str], *, table: str = "rows") -> pd.DataFrame:
    """Load the rows of several machines, one under the other: the column `machine` tells them apart.

    A machine named twice (this one may be the reference) counts once. Errors as in `load_rows`.
    """
    frames = [load_rows(slug, machine, table=table) for machine in dict.fromkeys(machines)]
    if not frames:
        raise ValueError("machines is empty; allowed: one name or more")
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def published(name: str) -> pd.DataFrame:
    """What public reports measured on other GPUs: `figures/published/<name>.csv`, its columns as they are.

    Raises:
        ValueError: there is no such table; the message lists those there are.
    """
    path = find("published", f"{name}.csv")
    if not path.is_file():
        names = sorted(file.stem for file in (REPOSITORY_FIGURES / "published").glob("*.csv"))
        raise ValueError(f"published table {name!r} is unknown; allowed: {', '.join(names)}")
    return pd.read_csv(path)


def _path(root: Path, machine: str, slug: str, table: str) -> Path:
    for what, name in (("machine", machine), ("slug", slug), ("table", table)):
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{what} {name!r} cannot name a file; allowed: letters, digits, '.', '_' and '-'"
            )
    return root / machine / slug / f"{table}.csv"


def _name(path: Path) -> str:
    """How messages call a file: relative to the figures folder, so the same everywhere."""
    return "/".join(path.parts[-3:])


def _add(rows: dict[Key, Row], row: Row, where: str) -> None:
    if key_of(row) in rows:
        raise RowError(f"{where}: duplicate key {describe(row)}; allowed: each key once")
    rows[key_of(row)] = row


def _check_table(rows: Iterable[Row], machine: str, where: str) -> None:
    """Refuse rows that contradict each other, or the card of their machine."""
    rows = list(rows)
    gpus = {str(row.get("gpu")) for row in rows}
    if rows and here.card_path(machine).exists():
        gpus.add(here.load_card(machine).gpu)
    if len(gpus) > 1:
        raise RowError(
            f"{where}: rows of several GPUs ({', '.join(sorted(gpus))}); allowed: one machine a folder"
        )
    for error in pass_order_errors(rows):
        raise RowError(f"{where}: {error}")


def _read(path: Path, machine: str) -> dict[Key, Row]:
    """The rows of a file by key, each one checked; none where there is no file."""
    if not path.exists():
        return {}
    name = _name(path)
    try:
        text = path.read_bytes().decode("utf-8")
        if "\0" in text or not text.endswith("\n"):
            raise ValueError("cut off, or not text")
        header, *lines = csv.reader(io.StringIO(text, newline=""), strict=True)
    except (ValueError, csv.Error) as error:
        raise RowError(f"{name} is damaged ({error}); {_REPAIR}") from None
    for column in header:
        if column not in COLUMNS:
            raise RowError(f"{name}, line 1: {unknown_column(column)}")
    if len(set(header)) < len(header):
        raise RowError(f"{name}, line 1: a column is there twice in {header}; allowed: each column once")
    rows: dict[Key, Row] = {}
    for number, fields in enumerate(lines, start=2):
        where = f"{name}, line {number}"
        if len(fields) != len(header):
            raise RowError(f"{where} is damaged ({len(fields)} fields for {len(header)} columns); {_REPAIR}")
        row = converted(dict(zip(header, fields, strict=True)), where, from_text=True)
        check_row(row, machine, where)
        _add(rows, row, where)
    return rows


def _column_names(rows: Iterable[Row]) -> list[str]:
    used = {name for row in rows for name in row}
    return [name for name in COLUMNS if name in used]


def _to_csv(rows: Iterable[Row]) -> str:
    """The file's text: columns as in the vocabulary, rows sorted by key, so that a rerun is a small diff."""
    rows = sorted(rows, key=lambda row: [COLUMNS[name].order(row.get(name)) for name in KEYS])
    names = _column_names(rows)
    text = io.StringIO(newline="")
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(names)
    writer.writerows([COLUMNS[name].format(row.get(name)) for name in names] for row in rows)
    return text.getvalue()


def _provenance(machine: str, where: str) -> Row:
    """Where rows that this process measures come from."""
    gpus = here.gpu_names()
    gpu = here.load_card(machine).gpu if here.card_path(machine).exists() else gpus[0]
    if gpu not in gpus:
        raise RowError(f"{where}: machine {machine!r} has the GPU {gpu!r}; allowed here: {', '.join(gpus)}")
    return {
        "machine": machine,
        "gpu": gpu,
        "torch": here.torch_version(),
        "triton": here.triton_version(),
        "measured_at": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
        "commit": os.environ.get("CS336_COMMIT") or _git_commit(),
    }


@cache
def _git_commit() -> str:
    """What git says of this repository, or "unknown"."""
    command = ["git", "-C", str(REPOSITORY_FIGURES.parent), "rev-parse", "--short=10", "HEAD"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return "unknown"
