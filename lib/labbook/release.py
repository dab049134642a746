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
    where = ", ".join(sorted({rows.machine for rows in measured}))
    line = f"measured on {where}"
    if _path().exists():
        name, commit_and_date, hashes = _read()
        if not any(code.changed(rows.run.code, hashes) for rows in measured):
            line = f"measured at {name} ({commit_and_date}, {where})"
    changed = sorted({name for rows in measured for name in rows.changed})
    files = "file has" if len(changed) == 1 else "files have"
    return f"{line}; {len(changed) or 'no'} measured {files} changed since", changed


def old_rows() -> list[str]:
    """The committed rows that are not of today's code, and what has changed since, a line a table and run."""
    return [
        f"{notebook}: {rows.table} of {rows.machine}, {rows.number:,} rows; "
        f"changed since: {', '.join(rows.changed)}"
        for notebook, rows in _committed()
        if rows.changed
    ]


def write(name: str, commit: str = "") -> None:
    """Write RELEASE for the committed rows, none of which is old.

    commit: that was measured; by default the one that most of their runs name.
    Raises ValueError: there are no rows.
    """
    runs = [rows.run for _, rows in _committed()]
    commit = commit or mode(run.commit for run in runs)
    date = max(run.measured_at[-1] for run in runs)[:10]
    hashes = {file: digest for run in runs for file, digest in run.code.items()}
    lines = [f"{digest} {file}" for file, digest in sorted(hashes.items())]
    write_atomically(_path(), "\n".join([f"{name} {commit}, {date}"] + lines) + "\n")


def _committed():
    """What runs measured for each notebook on the committed machines."""
    for path in sorted(project().notebooks.glob("[0-9][0-9]_*.ipynb")):
        for rows in measurements(path.stem[3:], project().committed):
            yield path.stem, rows


def _path():
    return project().root / "RELEASE"


def _read():
    """The release's name, its commit and date, and its hashes."""
    first, *lines = _path().read_text(encoding="utf-8").splitlines()
    name, _, commit_and_date = first.partition(" ")
    parts = [line.partition(" ") for line in lines]
    return name, commit_and_date, {file: digest for digest, _, file in parts}
