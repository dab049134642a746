"""How columns, names and numbers are written: the same on every axis, in every table and sentence.

What a project calls its values and columns stands in its `notebooks/vocabulary.py`: calls of `family`,
`label`, `column` and `order`. That file is run when the first word of it is needed.
"""

import math
import runpy
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import pandas as pd

from labbook.schema import COLUMNS

VOCABULARY = Path(__file__).parents[2] / "notebooks" / "vocabulary.py"
MISSING = "–"

# What stands in the place of a number that a row does not have.
STATUS_LABELS = {"oom": "OOM", "error": "error", "skipped": "skipped"}

# What the last part of a column's name says of its unit: in the schema, and of what is computed from rows.
UNITS = {name.rpartition("_")[2]: column.unit for name, column in COLUMNS.items() if column.unit}
UNITS |= {"us": "µs", "kib": "KiB", "gib": "GiB", "gb": "GB", "tflops": "TFLOP/s", "percent": "%"}


@dataclass(frozen=True)
class Named:
    """How a value is shown: its label, and the name of its colour in every plot; "" is one of a ramp."""

    label: str
    color: str = ""


@dataclass
class Vocabulary:
    """What the vocabulary says of columns and values, by the name of the column or the value.

    families: the values that a column can have, in order; a column of several is shown with the one that
        knows most of its values.
    """

    families: dict[str, list[dict[str, Named]]] = field(default_factory=dict)
    labels: dict[str, str] = field(default_factory=dict)
    columns: dict[str, str] = field(default_factory=dict)
    short: dict[str, str] = field(default_factory=dict)
    orders: dict[str, list[str]] = field(default_factory=dict)


_written = Vocabulary()


def family(columns: str, lines: str) -> None:
    """Values that belong together, in their order: lines "value | label | colour"; columns: one or several.

    A line may be a value alone; values without colours are drawn in a ramp from light to dark.
    """
    fields = [[part.strip() for part in line.split("|")] for line in lines.strip().splitlines()]
    named = {value: Named(*rest) if rest else Named(value) for value, *rest in fields}
    for name in columns.split():
        _written.families.setdefault(name, []).append(named)
    _written.labels.update({value: entry.label for value, entry in named.items()})


def label(value: str, text: str) -> None:
    """A value that belongs to no family."""
    _written.labels[value] = text


def column(name: str, label: str = "", short: str = "") -> None:
    """A column's name on an axis, with its unit; and in front of one of its numbers: "warm-up" 5."""
    for written, text in ((_written.columns, label), (_written.short, short)):
        if text:
            written[name] = text


def order(column: str, values: str) -> None:
    """The order of a column's values in rows that are loaded: "forward | backward"."""
    _written.orders[column] = [value.strip() for value in values.split("|")]


@cache
def vocabulary() -> Vocabulary:
    """What the project's file says; nothing where there is none."""
    if VOCABULARY.is_file():
        runpy.run_path(str(VOCABULARY))
    return _written


def column_label(column: str) -> str:
    """A column's name for an axis or a header, with its unit: "peak_memory_mib" -> "peak memory (MiB)"."""
    if column in vocabulary().columns:
        return vocabulary().columns[column]
    name, _, unit = column.rpartition("_")
    if name and unit in UNITS:
        return f"{name.replace('_', ' ')} ({UNITS[unit]})"
    return column.replace("_", " ")


def value_label(value: object, column: str | None = None) -> str:
    """A key's value for a legend, a tick or a cell; context lengths as 512 or 16K."""
    if column == "where":
        return machine_label(value)
    if isinstance(value, str):
        return vocabulary().labels.get(value, value)
    if pd.isna(value):
        return MISSING
    if column == "context_length":
        return context_label(value)
    if column == "num_rows":
        return f"{value:,.0f}"
    return f"{value:g}" if isinstance(value, float) else str(value)


def named_value(column: str, value: object) -> str:
    """A value that stands alone: text as it is, a number named: "context 512", "bucket size 25 MB"."""
    text = value_label(value, column)
    name = vocabulary().short.get(column, column.removeprefix("is_").replace("_", " "))
    if isinstance(value, str):
        return text
    if pd.api.types.is_bool(value):
        return name if value else f"not {name}"
    if column in COLUMNS and (unit := COLUMNS[column].unit):
        return f"{name.rpartition(' ')[0]} {text} {unit}"
    return f"{name} {text}"


def machine_label(where: str) -> str:
    """ "reference: H200" -> "H200 (reference)"."""
    role, _, name = where.partition(": ")
    return f"{name} ({role})" if name else role


def context_label(tokens: float) -> str:
    """128 -> "128", 1024 -> "1K", 16384 -> "16K"."""
    return f"{int(tokens) // 1024}K" if tokens >= 1024 and tokens % 1024 == 0 else f"{tokens:g}"


def family_of(values: Iterable[Hashable], column: str | None) -> dict[Hashable, Named]:
    """What is known of a column's values, by name and by label; of several families the best fitting."""
    distinct = set(values)
    known = vocabulary().families.get(column or "", ())
    families = [{**{named.label: named for named in f.values()}, **f} for f in known]
    return max(families, key=lambda family: len(distinct & set(family)), default={})


def ordered(values: Iterable[Hashable], column: str | None = None) -> list:
    """The distinct values in the order a reader expects: small before large, forward before backward."""
    distinct = [value for value in dict.fromkeys(values) if not pd.isna(value)]
    order = list(dict.fromkeys(named.label for named in family_of(distinct, column).values()))
    if order:
        known = {value: value if value in order else value_label(value) for value in distinct}
        return sorted(distinct, key=lambda v: order.index(known[v]) if known[v] in order else len(order))
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
    if abs(value) < 1e4:
        decimals = max(decimals, 0)
    rounded = round(float(value), decimals)
    return f"{rounded:,.{max(decimals, 0)}f}"
