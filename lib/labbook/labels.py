"""How columns, values and numbers are written: the same on every axis, in every table and sentence.

What a project calls its values and columns is the `VOCABULARY` of its `notebooks/vocabulary.py`.
"""

import math
import runpy
from collections.abc import Callable, Hashable, Iterable
from functools import cache
from typing import NamedTuple

import pandas as pd

from labbook.project import project

MISSING = "–"
# What stands in the place of a number that a row does not have.
STATUS_LABELS = {"oom": "OOM", "error": "error", "skipped": "skipped"}
# What the last part of a column's name says of its unit.
_UNITS = (
    "s=s ms=ms us=µs mib=MiB gib=GiB mb=MB gb=GB gbps=GB/s tflops=TFLOP/s mhz=MHz w=W bytes=bytes "
    "percent=%"
)
UNITS = dict(pair.split("=") for pair in _UNITS.split())


class Named(NamedTuple):
    """How a value is shown: its label, and the name of its colour in every plot; "" is one of a ramp."""

    label: str
    color: str = ""


class Column(NamedTuple):
    """A column's name on an axis, with its unit; in front of one of its numbers; how a number is written."""

    label: str = ""
    short: str = ""
    text: Callable | None = None


class Vocabulary:
    """What a project calls its values and columns; each method says more of it."""

    def __init__(self) -> None:
        self.families = {}  # of a column: for each family what is `Named` by label and by value
        self.labels = {}  # of a value
        self.columns = {}
        self.derivations = {}

    def family(self, columns: str, lines: str) -> None:
        """Values of some columns that belong together, in their order: lines "value | label | colour".

        A line may be a value alone; values without colours are drawn in a ramp from light to dark. A column
        of several families is shown with the one that knows most of its values.
        """
        named = {}
        for line in lines.strip().splitlines():
            value, *rest = [part.strip() for part in line.split("|")]
            named[value] = Named(*rest) if rest else Named(value)
            self.labels[value] = named[value].label
        by_label = {entry.label: entry for entry in named.values()}
        for name in columns.split():
            self.families.setdefault(name, []).append(by_label | named)

    def column(self, name: str, *fields, **more) -> None:
        """What is said of a column: the fields of `Column`."""
        self.columns[name] = Column(*fields, **more)

    def derived(self, name: str, columns: str, label: Callable) -> None:
        """A column that a page adds to rows that have all of `columns`: `label` of their values."""
        self.derivations[name] = columns.split(), label


def vocabulary() -> Vocabulary:
    """Of the project; empty where it has none."""
    return _vocabulary(project().notebooks / "vocabulary.py")


@cache
def _vocabulary(path):
    return runpy.run_path(str(path))["VOCABULARY"] if path.is_file() else Vocabulary()


def with_derived(rows: pd.DataFrame) -> pd.DataFrame:
    """The rows and what can be derived from their columns; None where one of these is empty."""
    for name, (columns, label) in vocabulary().derivations.items():
        if name not in rows and set(columns) <= set(rows):
            labels = [
                label(*values) if all(map(pd.notna, values)) else None
                for values in rows[columns].itertuples(index=False)
            ]
            rows = rows.assign(**{name: pd.Series(labels, rows.index, dtype=object)})
    return rows


def column_of(name: str | None) -> Column:
    """What the project says of a column; nothing where it says nothing."""
    return vocabulary().columns.get(name, Column())


def column_label(column: str) -> str:
    """A column's name for an axis or a header, with its unit: "peak_memory_mib" -> "peak memory (MiB)"."""
    if label := column_of(column).label:
        return label
    name, _, unit = column.rpartition("_")
    if name and unit in UNITS:
        return f"{name.replace('_', ' ')} ({UNITS[unit]})"
    return column.replace("_", " ")


def value_label(value: object, column: str | None = None) -> str:
    """A key's value for a legend, a tick or a cell."""
    if isinstance(value, str):
        return vocabulary().labels.get(value, value)
    if pd.isna(value):
        return MISSING
    if text := column_of(column).text:
        return text(value)
    return f"{value:g}" if isinstance(value, float) else str(value)


def named_value(column: str, value: object) -> str:
    """A value that stands alone: text as it is, a number named: "context 512", "bucket size 25 MiB"."""
    text = value_label(value, column)
    if isinstance(value, str):
        return text
    title = column_of(column).short or column_label(column)
    name, _, unit = title.partition(" (")
    if pd.api.types.is_bool(value):
        return name if value else f"not {name}"
    return f"{name} {text} {unit.rstrip(')')}".rstrip()


def is_text(values: Iterable[Hashable]) -> bool:
    """Whether some of the values are words."""
    return any(isinstance(value, str) for value in values)


def family_of(values: Iterable[Hashable], column: str | None) -> dict[Hashable, Named]:
    """What is known of a column's values, by name and by label; of several families the best fitting."""
    distinct = set(values)
    families = vocabulary().families.get(column, [])
    return max(families, key=lambda family: len(distinct & set(family)), default={})


def ordered(values: Iterable[Hashable], column: str | None = None) -> list:
    """The distinct values in the order a reader expects: small before large, forward before backward.

    Raises ValueError: one is missing, and what has no place would vanish from a picture.
    """
    distinct = list(dict.fromkeys(values))
    if any(map(pd.isna, distinct)):
        raise ValueError(f"a row has no {column}; drop it, or fill it in")
    if family := family_of(distinct, column):
        # All labels in their order, then all values: the index of its label is the place of either.
        order = list(family)

        def place(value):
            return order.index(family[value].label) if value in family else len(order)

        return sorted(distinct, key=place)
    return distinct if is_text(distinct) else sorted(distinct)


def significant(value: float) -> str:
    """A number with three significant digits, never in powers of ten: 0.0635, 33.3, 16,500.

    Below 10,000 all digits before the point are shown, as tables do: 4,417.
    """
    if pd.isna(value):
        return MISSING
    if value == 0 or not math.isfinite(value):
        return f"{value:g}"
    decimals = 2 - int(f"{value:.2e}".partition("e")[2])  # 9.996 is 10.0
    if abs(value) < 1e4:
        decimals = max(decimals, 0)
    return f"{round(float(value), decimals):,.{max(decimals, 0)}f}"


def quantity(value: float, column: str) -> str:
    """A number with its unit; a time from a second on in seconds, which takes less room."""
    unit = column_label(column).partition(" (")[2].rstrip(")")
    if unit == "ms" and value >= 1000:
        return f"{significant(value / 1000)} s"
    return f"{significant(value)} {unit}".rstrip()
