"""Rows of other people's machines: packed with the runs that measured them; checked, and added."""

import os
import shutil
import tempfile
import zipfile
from collections.abc import Iterator
from pathlib import Path
from unittest import mock

from labbook import code, runs
from labbook.book.notebooks import BatchError
from labbook.files import figures_dir, make_folder
from labbook.machine import load_card
from labbook.rows import load_rows

_PACKED = ("machine.json", "runs/*.json", "*/*.csv")


def pack(machine: str) -> Path:
    """Write `<machine>.zip` where one is: its card, its rows, and the runs that measured them.

    Raises:
        BatchError: what `add` would refuse.
    """
    root = figures_dir() / machine
    _check(root)
    target = Path(f"{machine}.zip").resolve()
    with zipfile.ZipFile(target, "w", zipfile.ZIP_DEFLATED) as file:
        for path in _files(root):
            file.write(path, path.relative_to(root.parent))
    return target


def add(source: Path) -> Path:
    """Put packed rows into `figures/<machine>`, in place of those that an earlier pack of it brought.

    Raises:
        BatchError: it is no pack; a sentence for each row, table and run that does not fit; or a machine of
            that name, with another card, is here already.
    """
    with tempfile.TemporaryDirectory() as scratch:
        try:
            shutil.unpack_archive(source, scratch, "zip")
        except (OSError, zipfile.BadZipFile) as error:
            raise BatchError(f"{source} is no pack of rows: {error}") from None
        packed = next(iter(Path(scratch).iterdir()), Path(scratch))
        if {path for path in Path(scratch).rglob("*") if path.is_file()} != {*_files(packed)}:
            raise BatchError(f"{source.name} holds other things than {', '.join(_PACKED)} of one machine")
        _check(packed)
        target = figures_dir() / packed.name
        here = target / "machine.json"
        if here.exists() and here.read_bytes() != (packed / "machine.json").read_bytes():
            raise BatchError(f"there is another {packed.name} here, with its own card; allowed: another name")
        shutil.copytree(packed, make_folder(target), dirs_exist_ok=True)
    return target


def _files(root: Path) -> list[Path]:
    """Those of a machine that a pack has."""
    return sorted(path for pattern in _PACKED for path in root.glob(pattern))


def _check(root: Path) -> None:
    """Raises BatchError: a line for everything that keeps a machine's rows from being added."""
    with mock.patch.dict(os.environ, LABBOOK_FIGURES=str(root.parent)):
        if problems := [*_problems(root)]:
            raise BatchError("\n".join(problems))


def _problems(root: Path) -> Iterator[str]:
    try:
        load_card(root.name)
    except (OSError, ValueError) as error:
        yield str(error)
    for path in (paths := sorted(root.glob("*/*.csv"))):
        where, table = f"{path.parent.name}/{path.name}", path.stem
        if code.notebook_of(path.parent.name) is None:
            yield f"{where}: there is no notebook of {path.parent.name!r}"
        try:
            named = load_rows(path.parent.name, root.name, table)["run"]
            missing = [name for name in named.dropna().unique() if runs.load_run(root.name, name) is None]
            if missing or named.isna().any():
                yield f"{where}: runs are missing: {', '.join(missing) or 'some rows name none'}"
        except ValueError as error:
            yield f"{where}: {error}"
    if not paths:
        yield f"{root.name} has no rows"
