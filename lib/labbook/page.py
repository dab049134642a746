"""What every notebook starts from: its parameters checked, this machine's card, its rows and its figures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from labbook import bench
from labbook.book.parameters import check_parameters
from labbook.compare import beside_reference
from labbook.files import figures_dir, make_folder, write_atomically
from labbook.labels import named_value, significant
from labbook.machine import MachineCard, load_card, machine_card
from labbook.rows import load_rows, save_rows
from labbook.schema import COLUMNS, TABLES


class Page:
    """The rows and figures of one notebook, on this machine (`card`) and on the reference machine.

    Creating it prints this machine's card, which is measured first where there is none.

    Args:
        slug: of the notebook's problem.
        parameters: `globals()` of the notebook; of its parameters, `device` and `reference` are used here.

    Raises:
        BatchError: a parameter has a value that the notebook cannot run with; a line for each.
    """

    def __init__(self, slug: str, parameters: Mapping[str, Any]) -> None:
        check_parameters(slug, parameters)
        self.slug = slug
        self._printed: set[str] = set()
        self.reference: str = parameters.get("reference", "h200")
        self.reference_card: MachineCard = load_card(self.reference)
        self.device: str = parameters.get("device", "auto")
        self.card: MachineCard = machine_card(self.device)
        print(self.card.line())

    def rows(self, table: str, slug: str | None = None) -> pd.DataFrame:
        """The reference machine's rows of a table, of another notebook's problem if a slug is given."""
        return load_rows(slug or self.slug, self.reference, table)

    def here(self, table: str, slug: str | None = None) -> pd.DataFrame:
        """The same of this machine."""
        return load_rows(slug or self.slug, self.card.slug, table)

    def beside(self, table: str, slug: str | None = None) -> pd.DataFrame:
        """This machine's rows; `reference_ms`, `reference_status` where the reference measured the same."""
        mine = self.here(table, slug)
        alone = self.card.slug == self.reference
        return mine if alone else beside_reference(mine, self.rows(table, slug))

    def save(self, rows: Iterable[Mapping[str, Any]], table: str, slug: str | None = None) -> None:
        """Save rows as this machine's, and print what came out, a line for each that says something new."""
        rows = list(rows)
        save_rows(rows, slug or self.slug, table, machine=self.card.slug)
        for line in row_lines(rows, table):  # a row saved again, with columns of a profile, says the same
            if line not in self._printed:
                print(line)
            self._printed.add(line)

    def measure(self, table: str, cases: Iterable[bench.Case], setup: bench.Setup, **how: Any) -> None:
        """Time each case on this machine and save its rows as they come; `how` as in `bench.measure`."""
        for rows in bench.measure(cases, setup, device=self.device, **how):
            self.save(rows, table)

    def figure(self, figure: Any, stem: str, *, here: bool = False) -> Any:
        """Write a figure to `figures/<machine>/<slug>/<stem>.png` and `.svg`, and hand it back to be shown.

        Args:
            here: drawn from this machine's rows, not the reference machine's.
        """
        folder = make_folder(figures_dir() / (self.card.slug if here else self.reference) / self.slug)
        for suffix, content in ((".png", figure.png()), (".svg", figure.svg())):
            write_atomically(folder / f"{stem}{suffix}", content)
        return figure


def row_lines(rows: Sequence[Mapping[str, Any]], table: str) -> list[str]:
    """What was measured and what came out: "plain, context 512, d = 64, float32, forward: 1.23 ms".

    A line for each row; one for all of them where the table keeps whole recordings.
    """
    schema = TABLES[table]
    if rows and schema.group and rows[0].get("status", "ok") != "ok":
        return [f"{_measured(rows[0], schema.group)}: {_outcome(rows[0], schema.values)}"]
    if rows and schema.group:
        return [f"{_measured(rows[0], schema.group)}: {len(rows)} rows"]
    return [f"{_measured(row, schema.keys)}: {_outcome(row, schema.values)}" for row in rows]


def _measured(row: Mapping[str, Any], keys: Sequence[str]) -> str:
    implied = ("d_model", "num_heads") if "model_size" in keys else ()
    told = [name for name in keys if name not in implied and not pd.isna(row.get(name))]
    return ", ".join(named_value(name, row[name]) for name in told)


def _outcome(row: Mapping[str, Any], values: Sequence[str]) -> str:
    if row.get("status", "ok") != "ok":
        return row["status"] + (f" ({row['reason']})" if row.get("reason") else "")
    name = next((name for name in ("p50_ms", *values) if not pd.isna(row.get(name))), "")
    if not name:
        return "saved"
    value = row[name] if isinstance(row[name], str) else significant(row[name])
    return f"{value} {COLUMNS[name].unit}".rstrip()
