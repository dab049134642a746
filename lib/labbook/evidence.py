"""What stands behind a notebook's rows: the code of its running cell, its run, and the runs on record."""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import pandas as pd
import torch

from labbook import code
from labbook.machine import gpu_of
from labbook.rows import load_rows, run_counts
from labbook.runs import Record, Run, load_run
from labbook.schema import schema


class Evidence:
    """Asked once a cell which rows it need not measure again, and by each save which code measured.

    slug, machine: of the problem, of this machine. namespace: `globals()` of the notebook.
    """

    def __init__(self, slug: str, machine: str, namespace: Mapping[str, Any]) -> None:
        self._slug = slug
        self._machine = machine
        self._cells: list[str] = namespace.get("In", [])  # IPython's; it grows with every cell
        _, self._names = code.code_cells(code.notebook_of(slug))
        parameters = {name: namespace[name] for name in sorted(self._names) if name in namespace}
        self.run = Run(slug, machine, parameters, self.code)

    def code(self) -> dict[str, str]:
        """The hashes of what the running cell saves (see `labbook.code`); none outside of IPython."""
        return code.of_cells(self._cells, self._names) if self._cells else {}

    def rows(self, table: str) -> pd.DataFrame:
        """This machine's rows that the code of the running cell measured."""
        return rows_of(self.code(), load_rows(self._slug, self._machine, table), self._machine)

    def measured(self, table: str, steps: int) -> Callable[[Mapping[str, Any]], bool]:
        """Tells of a case whether it need not be measured again; none with $LABBOOK_AGAIN set."""
        if os.environ.get("LABBOOK_AGAIN"):
            return lambda case: False
        keys = schema().tables[table].keys
        rows = self.rows(table)
        rows = rows[rows["status"] == "ok"]  # memory may be free now, a compiler installed
        if "steps" in rows:
            rows = rows[rows["steps"].fillna(steps) >= steps]
        points = {_point(row, keys) for row in rows.to_dict("records")}
        return lambda case: _point(case, keys) in points

    def age(self, machine: str) -> str:
        """How many of a machine's rows are of today's code, and what the others are; "" without rows."""
        counts: Counter[str] = Counter()
        for name, count in run_counts(self._slug, machine).items():
            reason = reason_old(load_run(machine, name))
            counts[reason or "of today's code"] += count
        parts = [f"{count:,} {reason}" for reason, count in counts.most_common()]
        return f"rows of {machine}: {'; '.join(parts)}" if parts else ""


def _point(row: Mapping[str, Any], keys: Iterable[str]) -> tuple:
    """What was measured, the same for a case and for a loaded row, whose numbers may be floats."""
    values = [None if pd.isna(row.get(name)) else row[name] for name in keys]
    return tuple(float(value) if isinstance(value, Real) else value for value in values)


def reason_old(record: Record | None) -> str:
    """Why the rows of a run are not of today's code; "" if they are."""
    if record is None:
        return "of a run that is not known"
    if not record.code:
        return "from before code was recorded"
    notebook = code.notebook_of(record.slug)
    reason = code.reason_changed(record.code, code.of_notebook(notebook) if notebook else {})
    return f"older: {reason}" if reason else ""


def rows_of(now: Mapping[str, str], rows: pd.DataFrame, machine: str) -> pd.DataFrame:
    """The rows of a machine that all of this code measured, with this torch, on its present card."""
    # Cards of one name and another memory or socket share a folder.
    gpu = gpu_of(machine)
    runs = []
    for name in rows["run"].dropna().unique():
        record = load_run(machine, name)
        if record is None or record.torch != torch.__version__ or record.gpu != gpu:
            continue
        if now and not code.changed(now, record.code):
            runs.append(name)
    return rows[rows["run"].isin(runs)]
