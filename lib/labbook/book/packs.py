"""Rows of other people's machines, unpacked into `figures/<machine>`: whether they fit here."""

from collections.abc import Iterator

from labbook import code, runs
from labbook.files import find
from labbook.machine import load_card
from labbook.rows import load_rows


def problems(machine: str) -> Iterator[str]:
    """A line for each table, run or card that keeps a machine's rows from standing beside others."""
    try:
        load_card(machine)
    except (OSError, ValueError) as error:
        yield str(error)
    for path in (paths := sorted(find(machine).glob("*/*.csv"))):
        where = f"{path.parent.name}/{path.name}"
        if code.notebook_of(path.parent.name) is None:
            yield f"{where}: there is no notebook of {path.parent.name!r}"
        try:
            named = load_rows(path.parent.name, machine, path.stem)["run"]
            missing = [name for name in named.dropna().unique() if runs.load_run(machine, name) is None]
            if missing or named.isna().any():
                yield f"{where}: runs are missing: {', '.join(missing) or 'some rows name none'}"
        except ValueError as error:
            yield f"{where}: {error}"
    if not paths:
        yield f"{machine} has no rows"
