"""The release: by which code the committed rows were measured, in the file RELEASE of the project.

Its first line says name, commit and date, and every other one the hash of a measured file, as `labbook.code`
has it. So a clone without history, or an archive without git, knows what has changed since. Rows belong to
the release where all their hashes are its hashes, whatever commit their run names.
"""

from collections.abc import Iterable
from statistics import mode

from labbook import code
from labbook.evidence import measurements
from labbook.files import write_atomically
from labbook.project import project


def provenance(slug: str, machines: Iterable[str]) -> tuple[str, list[str]]:
    """By which code the rows of a problem were measured, in a line, and what has changed since.

    "measured at v1.0 (1a2b3c4d5e, 2026-11-30, h100); no measured files have changed since"; "" without rows.
    """
    measured = list(measurements(slug, machines))
    if not measured:
        return "", []
    changed = sorted({name for each in measured for name in each.changed})
    files = "file has" if len(changed) == 1 else "files have"
    return f"{_origin(measured)}; {len(changed) or 'no'} measured {files} changed since", changed


def _origin(measured):
    """Where rows were measured, and, if all of them are of the release, at which."""
    where = ", ".join(sorted({each.machine for each in measured}))
    if _path().exists():
        name, commit_and_date, hashes = _read()
        if not any(code.changed(each.code, hashes) for each in measured):
            return f"measured at {name} ({commit_and_date}, {where})"
    return f"measured on {where}"


def old_rows() -> list[str]:
    """The committed rows that are not of today's code, and what has changed since, a line a table and run."""
    return [
        f"{each.notebook}: {each.table} of {each.machine}, {each.row_count:,} rows; "
        f"changed since: {', '.join(each.changed)}"
        for each in _committed()
        if each.changed
    ]


def write(name: str, commit: str = "") -> None:
    """Write RELEASE for the committed rows, none of which is old.

    commit: that was measured; by default the one that most of their runs name.
    Raises ValueError: there are no rows.
    """
    measured = list(_committed())
    commit = commit or mode(each.run.commit for each in measured)
    date = max(each.run.measured_at[-1] for each in measured)[:10]
    hashes = {}
    for each in measured:
        hashes |= each.code
    lines = [f"{name} {commit}, {date}"]
    lines += [f"{digest} {file}" for file, digest in sorted(hashes.items())]
    write_atomically(_path(), "\n".join(lines) + "\n")


def _committed():
    """What runs measured for each notebook on the committed machines."""
    for path in sorted(project().notebooks.glob("[0-9][0-9]_*.ipynb")):
        yield from measurements(path.stem[3:], project().committed)


def _path():
    return project().root / "RELEASE"


def _read():
    """The release's name, its commit and date, and its hashes."""
    first, *lines = _path().read_text(encoding="utf-8").splitlines()
    name, _, commit_and_date = first.partition(" ")
    # A line has the hash first.
    return name, commit_and_date, dict(reversed(line.split(" ", 1)) for line in lines)
