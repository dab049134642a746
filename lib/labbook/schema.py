"""The tables of a project, as its `notebooks/tables.yaml` declares them."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property

from labbook.project import project, read_yaml

STATUSES = ("ok", "oom", "skipped", "error")


@dataclass(frozen=True)
class Table:
    """The columns of a table by name, each with its type, and the keys of one recording, if it has such."""

    keys: dict[str, str]
    values: dict[str, str]
    group: tuple[str, ...]

    @property
    def types(self) -> dict[str, str]:
        """Every column of the file, in its order."""
        return self.keys | self.values | dict.fromkeys(("status", "reason", "run"), "text")


@dataclass(frozen=True)
class Schema:
    """All tables by name, and the only values of some columns, in their order."""

    tables: dict[str, Table]
    allowed: dict[str, Sequence[str]]

    @cached_property
    def values(self) -> set[str]:
        """The value columns of any table."""
        return set().union(*(table.values for table in self.tables.values()))


def schema() -> Schema:
    """Of the project."""
    return _read(project().notebooks / "tables.yaml")


def columns_of(table: str) -> Table:
    """Raises ValueError: the project has no such table."""
    tables = schema().tables
    if table not in tables:
        raise ValueError(f"unknown table {table!r}; allowed: {', '.join(tables)}")
    return tables[table]


@cache
def _read(path):
    declared = read_yaml(path)
    shared = declared.get("shared", {})
    tables = {name: _table(columns, shared) for name, columns in declared["tables"].items()}
    return Schema(tables, {"status": STATUSES} | declared.get("allowed", {}))


def _table(declared, shared):
    keys = _columns(declared["keys"], "text", shared)
    values = _columns(declared["values"], "float", shared)
    return Table(keys, values, tuple(_columns(declared.get("group", ""), "text", shared)))


def _columns(text, default, shared):
    """The types of declared columns, "name name:int $several", by name."""
    types = {}
    for word in text.split():
        name, _, kind = word.partition(":")
        if name.startswith("$"):
            types |= _columns(shared[name[1:]], default, shared)
        else:
            types[name] = kind or default
    return types
