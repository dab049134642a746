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
import torch

from labbook import files
from labbook import machine as here
from labbook.files import REPOSITORY_FIGURES, figures_dir, find
from labbook.schema import COLUMNS, TABLES
from labbook.validation import Row, RowError, check_batch, checked

# What runs our attention kernels: these implementations, and these tables.
_WITH_KERNELS = {"flash_compiled", "flash_triton"}
_OF_KERNELS = ("tile_times", "kernel_resources")
_REPAIR = "restore the file from git, or move it away and measure again"


def save_rows(
    rows: Iterable[Mapping[str, Any]] | pd.DataFrame, slug: str, table: str, machine: str | None = None
) -> Path:
    """Save rows into `figures/<machine>/<slug>/<table>.csv`: each replaces the one that has its key.

    In a table with groups (`schema.Table`) they replace all rows of their group.

    Args:
        rows: key and value columns; a missing one is empty, a missing status is "ok". Provenance is added.
        slug: of the problem, as in its notebook's name.
        table: a name in `schema.TABLES`.
        machine: slug of where the rows were measured; by default the machine that "auto" means here.

    Raises:
        RowError: a row does not fit; the file is left as it was. ValueError: there is no such table.
        PermissionError: the folder cannot be written to.
    """
    machine = machine or here.machine_card().slug
    path = _path(figures_dir(), machine, slug, table)
    schema, where = TABLES[table], _name(path)
    records = rows.to_dict("records") if isinstance(rows, pd.DataFrame) else rows
    batch = [checked(row, schema, f"{where}, rows[{number}]") for number, row in enumerate(records)]
    check_batch(batch, schema, where)
    common = _provenance(machine, where)
    batch = [common | _kernels(row, table) | row for row in batch]
    if foreign := {row["machine"] for row in batch} - {machine}:
        raise RowError(f"{where}: machine is {foreign.pop()!r}; allowed in this folder: {machine!r}")
    if not batch:
        return path
    files.make_folder(path.parent)
    with files.locked(path.parent.parent):
        if path.exists() and _header(path) not in ([], list(schema.columns)):
            _rewrite(path, machine)  # its table has columns now that it had not
        fields = ([COLUMNS[name].format(row.get(name)) for name in schema.columns] for row in batch)
        files.append_lines(path, _csv(fields), header=_csv([schema.columns]))
    return path


def load_rows(slug: str, machine: str, table: str) -> pd.DataFrame:
    """Load the rows of one machine, sorted by key; where it has none yet, an empty frame with every column.

    Columns have plain numpy dtypes: whole numbers with gaps are floats; empty text and truth values are None.

    Raises:
        RowError: the file is damaged, or a value does not fit; the message names file and line.
    """
    path = find(*_path(Path(), machine, slug, table).parts)
    return _parsed(_newest(path), path, machine).reset_index(drop=True)


def compact(machine: str) -> list[Path]:
    """Rewrite the tables of a machine sorted by key, without rows that were replaced: small diffs for git.

    Returns the files that changed. Raises RowError as `load_rows` does, files before it rewritten already.
    """
    folder = figures_dir() / machine
    if not folder.is_dir():
        raise RowError(f"{machine!r} has no rows in {figures_dir()}; allowed: {', '.join(here.machines())}")
    with files.locked(folder):
        tables = [path for path in sorted(folder.glob("*/*.csv")) if path.stem in TABLES]
        return [path for path in tables if _rewrite(path, machine)]


def published(name: str) -> pd.DataFrame:
    """What public reports measured on other GPUs: `figures/published/<name>.csv`, its columns as they are.

    Raises:
        ValueError: there is no such table; the message lists those there are.
    """
    path = find("published", f"{name}.csv")
    if not path.is_file():
        tables = sorted(file.stem for file in (REPOSITORY_FIGURES / "published").glob("*.csv"))
        _check_choice("published table", name, tables)
    return pd.read_csv(path)


def _path(root: Path, machine: str, slug: str, table: str) -> Path:
    for what, name in (("machine", machine), ("slug", slug)):
        if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
            raise ValueError(
                f"{what} {name!r} cannot name a folder; allowed: letters, digits, '.', '_' and '-'"
            )
    _check_choice("table", table, TABLES)
    return root / machine / slug / f"{table}.csv"


def _check_choice(what: str, value: str, allowed: Iterable[str]) -> None:
    if value not in allowed:
        raise ValueError(f"{what} {value!r} is unknown; allowed: {', '.join(allowed)}")


def _name(path: Path) -> str:
    """How messages call a file: relative to the figures folder, so the same everywhere."""
    return "/".join(path.parts[-3:])


def _csv(lines: Iterable[Iterable[str]]) -> str:
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows(lines)
    return text.getvalue()


def _header(path: Path) -> list[str]:
    with open(path, "rb") as file:
        line = file.readline().decode(errors="replace").strip()
    return line.split(",") if line else []


def _rewrite(path: Path, machine: str) -> bool:
    """Write the file anew from the rows that count; returns whether that changed it."""
    before, lines = files.read_lines(path), _newest(path)
    lines = lines.loc[_parsed(lines, path, machine).index]
    content = _csv([lines.columns, *lines.itertuples(index=False)])
    if changed := content.encode() != before:
        files.replace_lines(path, content)
    return changed


def _read(path: Path) -> pd.DataFrame:
    """The fields of a file, as text, indexed by the number of their line."""
    name, columns = _name(path), TABLES[path.stem].columns
    try:
        text = io.StringIO(files.read_lines(path).decode(), newline="")
        header, *lines = list(csv.reader(text, strict=True)) or [columns]
    except (ValueError, csv.Error) as error:
        raise RowError(f"{name} is damaged ({error}); {_REPAIR}") from None
    if len(set(header) & set(columns)) < len(header):
        raise RowError(f"{name}, line 1: the columns are {', '.join(header)}; allowed: {', '.join(columns)}")
    for number, fields in enumerate(lines, start=2):
        if len(fields) != len(header):
            told = f"{len(fields)} fields for {len(header)} columns"
            raise RowError(f"{name}, line {number} is damaged ({told}); {_REPAIR}")
    frame = pd.DataFrame(lines, range(2, len(lines) + 2), columns=list(header), dtype=object)
    return frame.reindex(columns=list(columns), fill_value="")  # an older file may lack a newer column


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
        values = {}
        for text in lines[column].unique():
            try:
                values[text] = COLUMNS[column].parse(text)
                if column == "machine" and text != machine:
                    raise ValueError(f"allowed in this folder: {machine!r}")
            except ValueError as error:
                line = (lines[column] == text).idxmax()
                raise RowError(f"{name}, line {line}: {column} is {text!r}; {error}") from None
        columns[column] = COLUMNS[column].series([values[text] for text in lines[column]], lines.index)
    frame = pd.DataFrame(columns, index=lines.index)
    if frame["gpu"].nunique() > 1:
        gpus = ", ".join(sorted(frame["gpu"].unique()))
        raise RowError(f"{name}: rows of several GPUs ({gpus}); allowed: one machine a folder")
    order = pd.DataFrame({key: COLUMNS[key].order(frame[key]) for key in schema.keys}, index=frame.index)
    return frame.loc[order.sort_values(list(schema.keys), na_position="first", kind="stable").index]


def _provenance(machine: str, where: str) -> Row:
    """Where rows come from that are saved now, unless they say otherwise themselves."""
    gpus = here.gpu_names()
    gpu = here.load_card(machine).gpu if here.card_path(machine).exists() else gpus[0]
    if gpu not in gpus:
        raise RowError(f"{where}: {machine!r} has the GPU {gpu!r}; allowed here: {', '.join(gpus)}")
    return {
        "machine": machine,
        "gpu": gpu,
        "torch": torch.__version__,
        "triton": here.triton_version(),
        "measured_at": datetime.now(UTC).isoformat(timespec="microseconds").replace("+00:00", "Z"),
        "commit": os.environ.get("CS336_COMMIT") or _git_commit(REPOSITORY_FIGURES.parent),
    }


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
