"""Rows on record: which are of today's code, and which cases they spare."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import pandas as pd
import torch

from labbook import code
from labbook.machine import gpu_of
from labbook.rows import run_counts
from labbook.runs import Record, load_run


def age(slug: str, machine: str) -> str:
    """How many of a machine's rows are of today's code, and what the others are; "" without rows."""
    counts: Counter[str] = Counter()
    for name, count in run_counts(slug, machine).items():
        counts[reason_old(load_run(machine, name)) or "of today's code"] += count
    parts = [f"{count:,} {reason}" for reason, count in counts.most_common()]
    return f"rows of {machine}: {'; '.join(parts)}" if parts else ""


def measured(
    rows: pd.DataFrame, keys: Iterable[str], steps: int
) -> Callable[[Mapping[str, Any]], bool]:
    """Tells of a case whether one of the rows has it, so that it need not be measured again."""
    rows = rows[rows["status"] == "ok"]  # memory may be free now, a compiler installed
    if "steps" in rows:
        rows = rows[rows["steps"].fillna(steps) >= steps]
    points = {_point(row, keys) for row in rows.to_dict("records")}
    return lambda case: _point(case, keys) in points


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
