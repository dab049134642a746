"""Rows: every number of the workbook, one CSV a table (see `schema`) under `figures/<machine>/<slug>/`.

Saving appends, so its cost does not grow with what is on record; of two rows with one key the later counts.
It is locked, and safe against being killed. What does not fit is refused, and the file stays as it was.
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
    append_lines,
    figures_dir,
    find,
    locked,
    make_folder,
    read_lines,
    replace_lines,
)
from cs336_systems.measure.schema import COLUMNS, TABLES, Table
from cs336_systems.measure.validation import Row, RowError, check_batch, checked
from cs336_systems.names import ATTENTION, TRITON, check_choice

# What runs our attention kernels: these implementations, and these tables.
_WITH_KERNELS = {name for name, implementation in ATTENTION.items() if TRITON in implementation.needs}
_OF_KERNELS = ("tile_times", "kernel_resources")


def save_rows(
    rows: Iterable[Mapping[str, Any]] | pd.DataFrame, slug: str, table: str, machine: str | None = None
) -> Path:
    """Save rows into `figures/<machine>/<slug>/<table>.csv`: each replaces the one that has its key.

    In a table with groups (`schema.Table`) they replace all rows of their group.

    Args:
        rows: key and value columns; a missing one is empty, a missing status is "ok". Provenance is added.
        slug: slug of the problem, as in its notebook's name.
        table: name of a table in `schema.TABLES`.
        machine: slug of the machine the rows were measured on; by default the one that "auto" means here.

    Returns:
        The path of the file.

    Raises:
        RowError: a row does not fit; the file is left as it was.
        ValueError: there is no such table. PermissionError: the folder cannot be written to.
    """
    machine = machine or here.machine_card().slug
    path = _path(figures_dir(), machine, slug, table)
    schema, where = TABLES[table], _name(path)
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    batch = [checked(row, schema, f"{where}, rows[{number}]") for number, row in enumerate(records)]
    check_batch(batch, schema, where)
    batch = _with_provenance(batch, machine, table, where)
    if not batch:
        return path
    make_folder(path.parent)
    with locked(path.parent.parent):
        if path.exists() and _header(path) not in ([], list(schema.columns)):
            _rewrite(path, machine)  # its table has columns now that it had not
        append_lines(path, _csv(_fields(row, schema) for row in batch), header=_csv([schema.columns]))
    return path


def load_rows(slug: str, machine: str, table: str) -> pd.DataFrame:
    """Load the rows of one machine, sorted by key; where it has none yet, an empty frame with every column.

    Columns have plain numpy dtypes: whole numbers with gaps are floats; empty text and truth values are None.

    Raises:
        RowError: the file is damaged, or a value does not fit; the message names file and line.
    """
    path = find(*_path(Path(), machine, slug, table).parts)
    return _parsed(_newest(path), path, machine).reset_index(drop=True)


def load_machines(slug: str, machines: Iterable[str], table: str) -> pd.DataFrame:
    """Load the rows of several machines, one under the other: the column `machine` tells them apart.

    A machine named twice (this one may be the reference) counts once. Errors as in `load_rows`.
    """
    frames = [load_rows(slug, machine, table) for machine in dict.fromkeys(machines)]
    if not frames:
        raise ValueError("machines is empty; allowed: one name or more")
    return pd.concat([frame for frame in frames if len(frame)] or frames[:1], ignore_index=True)


def compact(machine: str) -> list[Path]:
    """Rewrite the tables of a machine sorted by key, without rows that were replaced: small diffs for git.

    Returns:
        The files that changed.

    Raises:
        RowError: as in `load_rows`; files before the one at fault are rewritten already.
    """
    folder = figures_dir() / machine
    with locked(folder):
        files = [path for path in sorted(folder.glob("*/*.csv")) if path.stem in TABLES]
        return [path for path in files if _rewrite(path, machine)]


def published(name: str) -> pd.DataFrame:
    """What public reports measured on other GPUs: `figures/published/<name>.csv`, its columns as they are.

    Raises:
        ValueError: there is no such table; the message lists those there are.
    """
    path = find("published", f"{name}.csv")
    if not path.is_file():
        tables = sorted(file.stem for file in (REPOSITORY_FIGURES / "published").glob("*.csv"))
        check_choice("published table", name, tables)
    return pd.read_csv(path)


def _path(root: Path, machine: str, slug: str, table: str) -> Path:
    for what, name in (("machine", machine), ("slug", slug)):
        if not isinstance(name, str) or not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{what} {name!r} cannot name a folder; allowed: letters, digits, '.', '_' and '-'"
            )
    check_choice("table", table, TABLES)
    return root / machine / slug / f"{table}.csv"


def _name(path: Path) -> str:
    """How messages call a file: relative to the figures folder, so the same everywhere."""
    return "/".join(path.parts[-3:])


def _csv(lines: Iterable[Iterable[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _fields(row: Row, schema: Table) -> list[str]:
    return [COLUMNS[name].format(row.get(name)) for name in schema.columns]


def _header(path: Path) -> list[str]:
    with open(path, "rb") as file:
        line = file.readline().decode(errors="replace").strip()
    return line.split(",") if line else []


def _rewrite(path: Path, machine: str) -> bool:
    """Write the file anew from the rows that count; returns whether that changed it."""
    before, lines = read_lines(path), _newest(path)
    lines = lines.loc[_parsed(lines, path, machine).index]
    content = _csv([lines.columns, *lines.itertuples(index=False)])
    if changed := content.encode() != before:
        replace_lines(path, content)
    return changed


def _read(path: Path) -> pd.DataFrame:
    """The fields of a file, as text, indexed by the number of their line."""
    name, schema = _name(path), TABLES[path.stem]
    repair = "restore the file from git, or move it away and measure again"
    try:
        text = read_lines(path).decode()
        if "\0" in text:
            raise ValueError("not text")
        header, *lines = list(csv.reader(io.StringIO(text, newline=""), strict=True)) or [schema.columns]
    except (ValueError, csv.Error) as error:
        raise RowError(f"{name} is damaged ({error}); {repair}") from None
    for column in header:
        if column not in schema.columns:
            raise RowError(f"{name}, line 1: {schema.unknown(column)}")
        if header.count(column) > 1:
            raise RowError(f"{name}, line 1: column {column!r} is there twice; allowed: once")
    for number, fields in enumerate(lines, start=2):
        if len(fields) != len(header):
            raise RowError(
                f"{name}, line {number} is damaged ({len(fields)} fields for {len(header)} columns); {repair}"
            )
    frame = pd.DataFrame(lines, range(2, len(lines) + 2), columns=list(header), dtype=object)
    return frame.reindex(columns=list(schema.columns), fill_value="")


def _newest(path: Path) -> pd.DataFrame:
    """The lines that count: of each group those of its last save, of each key the last."""
    schema, lines = TABLES[path.stem], _read(path)
    if schema.group and len(lines):
        last = lines.groupby(list(schema.group), sort=False)["measured_at"].transform("last")
        lines = lines[lines["measured_at"] == last]
    return lines.drop_duplicates(list(schema.keys), keep="last")


def _parsed(lines: pd.DataFrame, path: Path, machine: str) -> pd.DataFrame:
    """The values of these lines, sorted by key, still indexed by their line."""
    schema, name = TABLES[path.stem], _name(path)
    columns = {}
    for column in schema.columns:
        try:
            columns[column] = COLUMNS[column].parse(lines[column])
        except ValueError as error:
            allowed, line = error.args
            given = lines.at[line, column]
            raise RowError(f"{name}, line {line}: {column} is {given!r}; {allowed}") from None
    frame = pd.DataFrame(columns, index=lines.index)
    foreign = frame.index[frame["machine"] != machine]
    if len(foreign):
        given = frame.at[foreign[0], "machine"]
        raise RowError(
            f"{name}, line {foreign[0]}: machine is {given!r}; allowed in this folder: {machine!r}"
        )
    if frame["gpu"].nunique() > 1:
        gpus = ", ".join(sorted(frame["gpu"].unique()))
        raise RowError(f"{name}: rows of several GPUs ({gpus}); allowed: one machine a folder")
    order = pd.DataFrame({key: COLUMNS[key].order(frame[key]) for key in schema.keys}, index=frame.index)
    return frame.loc[order.sort_values(list(schema.keys), na_position="first", kind="stable").index]


def _with_provenance(rows: list[Row], machine: str, table: str, where: str) -> list[Row]:
    """The rows with where they come from, looked up once; what a row says itself counts."""
    card = here.load_card(machine) if here.card_path(machine).exists() else None
    gpus = here.gpu_names()
    common = {
        "machine": machine,
        "gpu": card.gpu if card else gpus[0],
        "torch": here.torch_version(),
        "triton": here.triton_version(),
        "measured_at": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "commit": os.environ.get("CS336_COMMIT") or _git_commit(REPOSITORY_FIGURES.parent),
    }
    complete = []
    for row in rows:
        if row.get("machine", machine) != machine:
            raise RowError(f"{where}: machine is {row['machine']!r}; allowed in this folder: {machine!r}")
        if card and row.get("gpu", card.gpu) != card.gpu:
            raise RowError(
                f"{where}: gpu is {row['gpu']!r}; allowed by the card of {machine!r}: {card.gpu!r}"
            )
        if "gpu" not in row and common["gpu"] not in gpus:
            raise RowError(f"{where}: {machine!r} has the GPU {card.gpu!r}; allowed here: {', '.join(gpus)}")
        complete.append(common | _kernels(row, table) | row)
    return complete


def _kernels(row: Row, table: str) -> Row:
    """The digest of our attention kernels, if they ran."""
    if table in _OF_KERNELS or _WITH_KERNELS & {row.get("implementation"), row.get("attention")}:
        from cs336_systems.attention import kernel_digest  # not above: it imports triton

        return {"kernels": kernel_digest()}
    return {}


@cache
def _git_commit(repository: Path) -> str:
    """What git says of the library when this process first saves, or "unknown"; + for uncommitted changes."""

    def git(*arguments: str) -> str:
        command = ["git", "-C", str(repository), *arguments]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=10).stdout.strip()

    try:
        return git("rev-parse", "--short=10", "HEAD") + "+" * bool(git("status", "--porcelain", "--", "lib"))
    except (OSError, subprocess.SubprocessError):
        return "unknown"
