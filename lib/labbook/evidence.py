"""Rows on record: which are of today's code, and which cases they spare."""

import re
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import pandas as pd

from labbook import code
from labbook.machine import gpu_of, versions
from labbook.rows import point_of, run_counts
from labbook.runs import Record, load_run


class Measurement(NamedTuple):
    """The rows of a table that one run measured.

    code: the part of the run's that concerns the table. changed: what of that is not today's.
    """

    notebook: str
    machine: str
    table: str
    row_count: int
    run: Record
    code: Mapping[str, str]
    changed: list[str]


def measurements(slug: str, machines: Iterable[str]) -> Iterator[Measurement]:
    """What runs measured for a problem on some machines."""
    path = code.notebook_of(slug)
    for machine in machines:
        for (table, name), row_count in run_counts(slug, machine).items():
            run = load_run(machine, name)
            now = code.of_table(path, table)
            # The name of a cell lists its tables.
            part = [
                place for place in run.code if place in now or re.search(rf" {table}[ ,]", place)
            ]
            # No cell names a table whose rows come with another's: all of the run's code counts.
            before = {place: run.code[place] for place in part or run.code}
            yield Measurement(
                path.stem,
                machine,
                table,
                row_count,
                run,
                before,
                code.changed(before, now or code.of_notebook(path)),
            )


def points(rows: pd.DataFrame, table: str, steps: int) -> set[tuple]:
    """What some rows of a table spare to be measured again: their points, as `rows.point_of` has them."""
    rows = rows.query("status == 'ok'")  # memory may be free now, a compiler installed
    if "steps" in rows:
        rows = rows[rows["steps"].fillna(steps) >= steps]
    return {point_of(row, table) for row in rows.to_dict("records")}


def rows_of(now: Mapping[str, str], rows: pd.DataFrame, machine: str) -> pd.DataFrame:
    """The rows of a machine that all of this code measured, with these versions, on its present card."""
    if not now:
        return rows[:0]
    # Cards of one name and another memory or socket share a folder.
    here = versions() | {"gpu": gpu_of(machine)}
    runs = [load_run(machine, name) for name in rows["run"].unique()]
    was_here = [run for run in runs if here.items() <= vars(run).items()]
    of_now = [run.run for run in was_here if not code.changed(now, run.code)]
    return rows[rows["run"].isin(of_now)]
