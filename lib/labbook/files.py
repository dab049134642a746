"""Where measurements live, and how a file there is written: nothing is lost, nothing half-written."""

import os
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import filelock

REPOSITORY_FIGURES = Path(__file__).resolve().parents[2] / "figures"
COMMITTED = ("h200", "published", "ahead_of_time")
_LOCK_TIMEOUT_S = 60


def figures_dir() -> Path:
    """Where measurements are written: `$CS336_FIGURES`, or the repository's `figures`."""
    return Path(os.environ.get("CS336_FIGURES") or REPOSITORY_FIGURES)


def find(folder: str, *parts: str) -> Path:
    """Path of a file to read: under `figures_dir()`, or, of the results that git keeps, in the repository."""
    own = figures_dir().joinpath(folder, *parts)
    committed = REPOSITORY_FIGURES.joinpath(folder, *parts)
    return committed if folder in COMMITTED and committed.exists() and not own.exists() else own


def make_folder(folder: Path, way_out: str = "set CS336_FIGURES to a folder that can") -> Path:
    """Create a folder, under `figures_dir()` if nothing else is said.

    Raises:
        PermissionError: it cannot be created or written to; the message names the way out.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        writable = os.access(folder, os.W_OK | os.X_OK)
    except OSError:
        writable = False
    if not writable:
        raise PermissionError(f"the folder {folder} cannot be written to; {way_out}")
    return folder


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Keep other processes out of the folder. The lock ends with its process, killed or not.

    Raises:
        filelock.Timeout: another process has held it for a minute.
    """
    with filelock.FileLock(make_folder(folder) / ".lock", timeout=_LOCK_TIMEOUT_S):
        yield


def write_atomically(path: Path, content: str | bytes) -> None:
    """Replace `path` in one step: a reader, and a run killed at any moment, find the old file or the new."""
    handle, temporary = tempfile.mkstemp(dir=make_folder(path.parent), prefix=".", suffix=".tmp")
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise


def append_lines(path: Path, lines: str, header: str) -> None:
    """Append whole lines, all or, if this process is killed, none; before the first, a header.

    The size before is noted beside the file until they are on disk. The caller holds the lock.
    """
    note = _size_note(path)
    with open(path, "a+b") as file:
        size = _finished_size(path)
        file.truncate(size)  # what a killed process left
        note.write_text(f"{size} {os.fstat(file.fileno()).st_ino}\n")
        file.seek(max(0, size - 1))
        ended = file.read() in (b"", b"\n")  # else an editor took the last line's end
        file.write(((header if size == 0 else "" if ended else "\n") + lines).encode())
        file.flush()
        os.fsync(file.fileno())
    note.unlink()


def read_lines(path: Path) -> bytes:
    """The lines of all that was appended in full; nothing where there is no file."""
    return path.read_bytes()[: _finished_size(path)] if path.exists() else b""


def replace_lines(path: Path, lines: str) -> None:
    """Replace the file by these lines. The caller holds the lock."""
    write_atomically(path, lines)
    _size_note(path).unlink(missing_ok=True)


def _finished_size(path: Path) -> int:
    """Bytes up to the end of the last append that came to its end."""
    stat = path.stat()
    try:
        size, inode = map(int, _size_note(path).read_text().split())
    except (FileNotFoundError, ValueError):  # nothing is being appended
        return stat.st_size
    return size if inode == stat.st_ino else stat.st_size  # another file may have taken its place since


def _size_note(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")
