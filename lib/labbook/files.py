"""Where measurements live, and how a file there is written: whole, or not at all."""

import json
import os
import re
import tempfile
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from functools import cache
from pathlib import Path
from typing import Any

import filelock

PROJECT = Path(__file__).resolve().parents[2]
REPOSITORY_FIGURES = PROJECT / "figures"
NOTEBOOKS = PROJECT / "notebooks"


@cache
def committed() -> tuple[str, ...]:
    """The folders of `figures` that git keeps, as .gitignore says; all others are everybody's own."""
    ignored = PROJECT / ".gitignore"
    text = ignored.read_text(encoding="utf-8") if ignored.exists() else ""
    return tuple(re.findall(r"^!figures/([^/\n]+)/$", text, re.MULTILINE))


def figures_dir() -> Path:
    """Where measurements are written: `$LABBOOK_FIGURES`, or the repository's `figures`."""
    return Path(os.environ.get("LABBOOK_FIGURES") or REPOSITORY_FIGURES)


def find(folder: str, *parts: str) -> Path:
    """Path of a file to read: under `figures_dir()`, or, of the results that git keeps, in the repository."""
    own = figures_dir().joinpath(folder, *parts)
    kept = REPOSITORY_FIGURES.joinpath(folder, *parts)
    return kept if folder in committed() and kept.exists() and not own.exists() else own


def make_folder(folder: Path, way_out: str = "set LABBOOK_FIGURES to a folder that can") -> Path:
    """Create a folder, under `figures_dir()` if nothing else is said.

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
    with tempfile.TemporaryDirectory(
        dir=make_folder(path.parent), prefix=".", suffix=".tmp"
    ) as folder:
        with open(Path(folder) / "new", "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(file.name, path)


def write_record(path: Path, record: Any) -> None:
    """Write a dataclass as JSON, as `write_atomically` does."""
    write_atomically(path, json.dumps(asdict(record), indent=1, default=str) + "\n")


def read_record(path: Path, kind: Callable[..., Any]) -> Any:
    """The dataclass in a JSON file. Raises ValueError: the file is damaged, in a sentence that names it."""
    try:
        return kind(**json.loads(path.read_text(encoding="utf-8")))
    except (ValueError, TypeError, AttributeError) as error:
        name = "/".join(path.parts[-3:])
        raise ValueError(
            f"{name} is damaged ({error}); restore it from git, or remove it"
        ) from None
