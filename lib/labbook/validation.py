"""Rules of rows: each fits its table and agrees with itself, and a pass takes longer than its parts."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from itertools import permutations
from typing import Any

from labbook.schema import COLUMNS, STATUSES, TABLES, Table

Row = dict[str, Any]

_PERCENTILES = ("p20_ms", "p50_ms", "p80_ms")
# Of the tables with times: what is equal in all passes of one measurement.
_SAME = {name for table in TABLES.values() if "p50_ms" in table.values for name in table.keys}
_SAME -= {"pass", "warmup_steps"}
# How much one step does: a pass of a higher level contains those below, so it cannot be faster.
_PASS_LEVEL = {"forward": 0, "backward": 0, "forward_backward": 1, "train_step": 2}
_ATTEMPTS = 3


class RowError(ValueError):
    """A row, or a file of rows, that does not fit its table."""


def checked(record: Mapping[str, Any], table: Table, where: str) -> Row:
    """The record with each value as its column stores it; empty ones are left out.

    An empty value may be given for a column that the table does not have.

    Raises:
        RowError: one sentence: where, what was given, what is allowed.
    """
    row: Row = {}
    for name, given in record.items():
        try:
            value = COLUMNS[name].check(given) if name in COLUMNS else given
        except ValueError as error:
            raise RowError(f"{where}: {name} is {given!r}; {error}") from None
        if name not in table.columns and (value is not None or name not in COLUMNS):
            raise RowError(f"{where}: there is no column {name!r}; allowed: {', '.join(table.columns)}")
        if value is not None:
            row[name] = value
    row = {"status": "ok"} | row
    if problem := _contradiction(row, table):
        raise RowError(f"{where}: {problem}")
    return row


def _contradiction(row: Row, table: Table) -> str:
    values = [name for name in table.values if name in row and name != "steps"]
    times = [name for name in values if COLUMNS[name].unit in ("ms", "s")]
    percentiles = [row.get(name) for name in _PERCENTILES]
    if row["status"] != "ok" and times:
        return (
            f"status is {row['status']!r}, but {times[0]} is {row[times[0]]:g}; allowed: times with 'ok' only"
        )
    if row["status"] == "ok" and not values:
        return f"status is 'ok', but nothing was measured; allowed: a value, or {', '.join(STATUSES[1:])}"
    if {"mean_ms", *_PERCENTILES} & row.keys() and None in percentiles:
        return f"{_PERCENTILES[percentiles.index(None)]} is empty; allowed: all of {', '.join(_PERCENTILES)}"
    if None not in percentiles and percentiles != sorted(percentiles):
        return f"{', '.join(_PERCENTILES)} are {percentiles}; allowed: rising"
    return ""


def check_batch(rows: list[Row], table: Table, where: str) -> None:
    """Refuse rows of one save that contradict each other: two with one key, or a pass faster than its part.

    Raises:
        RowError: as above.
    """
    seen = set()
    for number, row in enumerate(rows):
        key = _described(row, table.keys)
        if key in seen:
            raise RowError(f"{where}, rows[{number}]: duplicate key {key}; allowed: once")
        seen.add(key)
    for error in pass_order_errors(rows):
        raise RowError(f"{where}: {error}")


def _described(row: Mapping[str, Any], columns: Iterable[str]) -> str:
    return ", ".join(f"{name}={row[name]}" for name in columns if row.get(name) is not None)


def pass_order_errors(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Sentences about passes faster than a pass inside them, by more than the spread of the steps.

    Rows are compared when they are equal in every other key. Of several warm-ups only the longest counts: the
    shorter ones are there to show the start, not the pass.
    """
    groups = defaultdict(list)
    for row in rows:
        if row.get("pass") in _PASS_LEVEL and row.get("p50_ms") is not None and row.get("warmup_steps") != 0:
            groups[tuple((name, row[name]) for name in sorted(_SAME & row.keys()))].append(row)
    errors = []
    for group in groups.values():
        longest = max(row.get("warmup_steps") or 0 for row in group)
        group = [row for row in group if (row.get("warmup_steps") or 0) == longest]
        for small, large in permutations(group, 2):
            if _PASS_LEVEL[small["pass"]] < _PASS_LEVEL[large["pass"]] and large["p80_ms"] < small["p20_ms"]:
                at = _described(large, [name for name in COLUMNS if name in _SAME])
                errors.append(
                    f"{large['pass']} took {large['p80_ms']:.4g} ms (p80_ms), {small['pass']} inside it "
                    f"{small['p20_ms']:.4g} ms (p20_ms), at {at}; measure both again, in one run"
                )
    return errors


def measured_in_order(measure: Callable[[], list[Row]]) -> list[Row]:
    """The rows of `measure`, measured again (twice at most) while a pass is faster than a part of it.

    That happens when something else took the machine during one of the passes: on a shared CPU, not seldom.
    """
    for _ in range(_ATTEMPTS):
        rows = measure()
        if not pass_order_errors(rows):
            break
    return rows
