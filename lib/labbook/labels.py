"""How columns, values and numbers are written: the same on every axis, in every table and sentence.

What a project calls its values and columns stands in its `notebooks/vocabulary.py`: calls of `family`,
`column`, `derived` and `synonyms`. That file is run at the end of this one.
"""

import math
import runpy
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import pandas as pd

from labbook.files import NOTEBOOKS

MISSING = "–"
# What stands in the place of a number that a row does not have.
STATUS_LABELS = {"oom": "OOM", "error": "error", "skipped": "skipped"}
# What the last part of a column's name says of its unit.
UNITS = {
    "s": "s",
    "ms": "ms",
    "us": "µs",
    "kib": "KiB",
    "mib": "MiB",
    "gib": "GiB",
    "mb": "MB",
    "gb": "GB",
}
UNITS |= {
    "gbps": "GB/s",
    "tflops": "TFLOP/s",
    "mhz": "MHz",
    "w": "W",
    "bytes": "bytes",
    "percent": "%",
}


class Named(NamedTuple):
    """How a value is shown: its label, and the name of its colour in every plot; "" is one of a ramp."""

    label: str
    color: str = ""


class Column(NamedTuple):
    """A column's name on an axis, with its unit; in front of one of its numbers; how a number is written."""

    label: str = ""
    short: str = ""
    text: Callable[[Any], str] | None = None


class Derived(NamedTuple):
    """What a column is made of, and how."""

    columns: list[str]
    label: Callable[..., str]


FAMILIES: dict[str, list[dict[str, Named]]] = {}  # of a column, see `family`
LABELS: dict[str, str] = {}  # of a value
COLUMNS: dict[str, Column] = {}
DERIVED: dict[str, Derived] = {}
SYNONYMS: list[set[str]] = []


def family(columns: str, lines: str) -> None:
    """Values that belong together, in their order: lines "value | label | colour"; of any number of columns.

    A line may be a value alone; values without colours are drawn in a ramp from light to dark. A column of
    several families is shown with the one that knows most of its values.
    """
    fields = [[part.strip() for part in line.split("|")] for line in lines.strip().splitlines()]
    named = {value: Named(*rest) if rest else Named(value) for value, *rest in fields}
    for name in columns.split():
        FAMILIES.setdefault(name, []).append(named)
    LABELS.update({value: entry.label for value, entry in named.items()})


def column(
    name: str, label: str = "", short: str = "", text: Callable[[Any], str] | None = None
) -> None:
    """What a project says of a column, see `Column`."""
    COLUMNS[name] = Column(label, short, text)


def derived(name: str, columns: str, label: Callable[..., str]) -> None:
    """A column that a page adds to rows that have all of `columns`: `label` of their values."""
    DERIVED[name] = Derived(columns.split(), label)


def with_derived(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows and what can be derived from their columns; None where one of these is empty."""
    for name, (columns, label) in DERIVED.items():
        if name in rows or not set(columns) <= set(rows):
            continue
        complete = rows[columns].dropna()
        labels = [label(*values) for values in complete.itertuples(index=False)]
        column = pd.Series(labels, complete.index, dtype=object).reindex(rows.index)
        rows = rows.assign(**{name: column.where(column.notna(), None)})
    return rows


def synonyms(columns: str) -> None:
    """Columns that name one thing in several ways: who compares one does not hold the others fixed."""
    SYNONYMS.append(set(columns.split()))


def column_label(column: str) -> str:
    """A column's name for an axis or a header, with its unit: "peak_memory_mib" -> "peak memory (MiB)"."""
    if known := COLUMNS.get(column, Column()).label:
        return known
    name, _, unit = column.rpartition("_")
    if name and unit in UNITS:
        return f"{name.replace('_', ' ')} ({UNITS[unit]})"
    return column.replace("_", " ")


def value_label(value: object, column: str | None = None) -> str:
    """A key's value for a legend, a tick or a cell; of a machine "reference: H200" -> "H200 (reference)"."""
    if isinstance(value, str):
        role, _, name = value.partition(": ") if column == "where" else (value, "", "")
        return f"{name} ({role})" if name else LABELS.get(role, role)
    if pd.isna(value):
        return MISSING
    if text := COLUMNS.get(column, Column()).text:
        return text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def named_value(column: str, value: object) -> str:
    """A value that stands alone: text as it is, a number named: "context 512", "bucket size 25 MiB"."""
    text, has_unit = value_label(value, column), column.rpartition("_")[2] in UNITS
    unit = column_label(column).rpartition("(")[2].rstrip(")") if has_unit else ""
    name = COLUMNS.get(column, Column()).short or column.removeprefix("is_").replace("_", " ")
    if isinstance(value, str):
        return text
    if pd.api.types.is_bool(value):
        return name if value else f"not {name}"
    return f"{name.rpartition(' ')[0]} {text} {unit}" if unit else f"{name} {text}"


def family_of(values: Iterable[Hashable], column: str | None) -> dict[Hashable, Named]:
    """What is known of a column's values, by name and by label; of several families the best fitting."""
    distinct, known = set(values), FAMILIES.get(column or "", ())
    families = [{**{named.label: named for named in family.values()}, **family} for family in known]
    return max(families, key=lambda family: len(distinct & set(family)), default={})


def ordered(values: Iterable[Hashable], column: str | None = None) -> list:
    """The distinct values in the order a reader expects: small before large, forward before backward."""
    distinct = [value for value in dict.fromkeys(values) if not pd.isna(value)]
    family = family_of(distinct, column)
    if order := list(dict.fromkeys(named.label for named in family.values())):
        places = {value: order.index(family[value].label) for value in distinct if value in family}
        return sorted(distinct, key=lambda value: places.get(value, len(order)))
    return sorted(distinct) if all(not isinstance(value, str) for value in distinct) else distinct


def significant(value: float, digits: int = 3) -> str:
    """A number with `digits` significant digits, never in powers of ten: 0.0635, 33.3, 16,500.

    Below 10,000 all digits before the point are shown, as tables do: 4,417.
    """
    if pd.isna(value):
        return MISSING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = digits - 1 - math.floor(math.log10(abs(value)))
    decimals = max(decimals, 0) if abs(value) < 1e4 else decimals
    return f"{round(float(value), decimals):,.{max(decimals, 0)}f}"


def quantity(value: float, column: str) -> str:
    """A number with its unit; a time from a second on in seconds, which takes less room."""
    unit = column_label(column).partition(" (")[2].rstrip(")")
    if unit == "ms" and value >= 1000:
        return f"{significant(value / 1000)} s"
    return f"{significant(value)} {unit}".rstrip()


if (_VOCABULARY := NOTEBOOKS / "vocabulary.py").is_file():
    runpy.run_path(str(_VOCABULARY))
