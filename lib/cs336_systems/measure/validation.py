"""Rules of a row: it speaks the vocabulary, its values agree, a pass takes longer than those inside it."""

from collections.abc import Callable, Iterable, Mapping
from itertools import combinations
from typing import Any, TypeVar

from cs336_systems.measure.schema import COLUMNS, KEYS, STATUSES, TIMES, unknown_column

Measured = TypeVar("Measured")
Row = dict[str, Any]
Key = tuple[Any, ...]

_PERCENTILES = ("p20_ms", "p50_ms", "p80_ms")
_MEASURED = tuple(
    name
    for name, column in COLUMNS.items()
    if column.kind == "value" and name not in ("steps", "status", "reason")
)
# How much one step does: a pass of a higher level contains those below, so it cannot be faster.
_PASS_LEVEL = {"forward": 0, "backward": 0, "forward_backward": 1, "train_step": 2}


_ATTEMPTS = 3


class RowError(ValueError):
    """A row, or a file of rows, that does not fit the vocabulary."""


def key_of(row: Mapping[str, Any]) -> Key:
    """What was measured: two rows of one table with the same key are the same measurement."""
    return tuple(row.get(name) for name in KEYS)


def describe(row: Mapping[str, Any], without: str = "") -> str:
    """The filled keys of a row, for a message."""
    keys = (name for name in KEYS if row.get(name) is not None and name != without)
    return ", ".join(f"{name}={COLUMNS[name].format(row[name])}" for name in keys)


def converted(record: Mapping[str, Any], where: str, *, from_text: bool = False) -> Row:
    """The record with each value checked and converted by its column."""
    row = {}
    for name, value in record.items():
        if name not in COLUMNS:
            raise RowError(f"{where}: {unknown_column(name)}")
        try:
            row[name] = COLUMNS[name].parse(value) if from_text else COLUMNS[name].check(value)
        except ValueError as error:
            raise RowError(f"{where}: {name} is {value!r}; {error}") from None
    return row


def check_row(row: Row, machine: str, where: str) -> None:
    """Refuse a row that contradicts itself or its folder.

    Raises:
        RowError: one sentence: where, what was given, what is allowed.
    """
    status = row.get("status")
    times = [name for name in TIMES if row.get(name) is not None]
    percentiles = [row.get(name) for name in _PERCENTILES]
    problem = ""
    if row.get("machine") != machine:
        problem = f"machine is {row.get('machine')!r}; allowed in this folder: {machine!r}"
    elif all(row.get(name) is None for name in KEYS):
        problem = f"no key column is filled; allowed: {', '.join(KEYS)}"
    elif status is None:
        problem = f"status is empty; allowed: {', '.join(STATUSES)}"
    elif status != "ok" and times:
        problem = (
            f"status is {status!r}, but {times[0]} is {row[times[0]]:g}; allowed: times with status 'ok' only"
        )
    elif status == "ok" and all(row.get(name) is None for name in _MEASURED):
        problem = (
            "status is 'ok', but nothing was measured; allowed: a value, or another status with its reason"
        )
    elif {"mean_ms", *_PERCENTILES} & set(times) and None in percentiles:
        problem = (
            f"{_PERCENTILES[percentiles.index(None)]} is empty; allowed: all of {', '.join(_PERCENTILES)}"
        )
    elif None not in percentiles and percentiles != sorted(percentiles):
        problem = f"{', '.join(_PERCENTILES)} are {percentiles}; allowed: rising"
    if problem:
        raise RowError(f"{where}: {problem}")


def pass_order_errors(rows: Iterable[Mapping[str, Any]]) -> list[str]:
    """Sentences about passes faster than a pass inside them, by more than the spread of the steps.

    Rows are compared when they are equal in every other key. Of several warm-ups only the longest counts: the
    shorter ones are there to show the start, not the pass.
    """
    groups: dict[Key, list[Mapping[str, Any]]] = {}
    for row in rows:
        if row.get("pass") in _PASS_LEVEL and row.get("p50_ms") is not None and row.get("warmup_steps") != 0:
            groups.setdefault(key_of({**row, "pass": None, "warmup_steps": None}), []).append(row)
    for key, group in groups.items():
        longest = max(row.get("warmup_steps") or 0 for row in group)
        groups[key] = [row for row in group if (row.get("warmup_steps") or 0) == longest]
    pairs = [
        pair
        for group in groups.values()
        for pair in combinations(sorted(group, key=lambda row: _PASS_LEVEL[row["pass"]]), 2)
    ]
    return [
        f"{large['pass']} took {large['p80_ms']:.4g} ms (p80_ms), {small['pass']} inside it "
        f"{small['p20_ms']:.4g} ms (p20_ms), at {describe(large, without='pass')}; "
        "measure both again, in one run"
        for small, large in pairs
        if _PASS_LEVEL[small["pass"]] < _PASS_LEVEL[large["pass"]] and large["p80_ms"] < small["p20_ms"]
    ]


def measured_in_order(
    measure: Callable[[], list[Measured]], as_row: Callable[[Measured], Row]
) -> list[Measured]:
    """What `measure` returns, measured again (twice at most) while a pass in it is faster than a part of it.

    That happens when something else took the machine during one of the passes: on a shared CPU, not seldom.
    """
    for _ in range(_ATTEMPTS):
        measured = measure()
        if not pass_order_errors(map(as_row, measured)):
            break
    return measured
