"""Where measurements live, and how a file there is written: whole, or not at all."""

import json
import os
import tempfile
from contextlib import suppress
from dataclasses import asdict, fields
from pathlib import Path

import filelock

from labbook.project import project


def figures_dir() -> Path:
    """Where measurements are written: `$LABBOOK_FIGURES`, or the project's `figures`."""
    return Path(os.environ.get("LABBOOK_FIGURES") or project().figures)


def find(folder: str, *parts: str) -> Path:
    """Path of a file to read: under `figures_dir()`, or, of a committed folder, in the project's."""
    path = figures_dir().joinpath(folder, *parts)
    if folder in project().committed and not path.exists():
        return project().figures.joinpath(folder, *parts)
    return path


def name_of(path: Path) -> str:
    """How messages call a file: by its last three parts, "h200/runs/<run>.json", so the same everywhere."""
    return "/".join(path.parts[-3:])


def make_folder(
    folder: Path, way_out: str = "figures may be elsewhere: set LABBOOK_FIGURES"
) -> Path:
    """Create a folder.

    Raises PermissionError: it cannot be created or written to; the message names the way out.
    """
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
    if not (folder.is_dir() and os.access(folder, os.W_OK | os.X_OK)):
        raise PermissionError(f"the folder {folder} cannot be written to; {way_out}")
    return folder


def locked(folder: Path) -> filelock.BaseFileLock:
    """A context that keeps other processes out of the folder. It ends with its process, killed or not.

    Entering raises filelock.Timeout where another process has held it for a minute.
    """
    return filelock.FileLock(make_folder(folder) / ".lock", timeout=60)


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` in one step: a reader, and a run killed at any moment, find the old file or the new."""
    parent = make_folder(path.parent)
    with tempfile.TemporaryDirectory(dir=parent, prefix=".", suffix=".tmp") as folder:
        with open(Path(folder) / "new", "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            # Before the rename: a name that a crash leaves behind must not lead to an empty file.
            os.fsync(file.fileno())
        os.replace(file.name, path)


def write_record(path: Path, record) -> None:
    """Write a dataclass as JSON, as `write_atomically` does."""
    write_atomically(path, json.dumps(asdict(record), indent=1, default=str) + "\n")


def read_record(path: Path, kind: type):
    """The dataclass in a JSON file, without fields that it no longer has.

    Raises ValueError: the file is damaged, in a sentence that names it.
    """
    names = {field.name for field in fields(kind)}
    try:
        written = json.loads(path.read_text(encoding="utf-8"))
        return kind(**{name: written[name] for name in names & set(written)})
    except (ValueError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{name_of(path)} is damaged ({error}); restore it from git, or remove it"
        ) from None
