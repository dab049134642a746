"""What every notebook starts from: its parameters checked, this machine's card, its rows and its figures."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from cs336_systems import measure, report
from cs336_systems.measure.files import figures_dir, make_folder, write_atomically
from cs336_systems.measure.machine import MachineCard, load_card, machine_card
from cs336_systems.measure.schema import COLUMNS, TABLES
from cs336_systems.report.words import named_value, significant
from cs336_systems.workbook.batch import check_parameters


class Page:
    """The rows and figures of one notebook, on this machine and on the reference machine.

    Creating it prints this machine's card, which is measured first where there is none.

    Args:
        slug: of the notebook's problem.
        parameters: `globals()` of the notebook; of its parameters, `device` and `reference` are used here.

    Attributes:
        card: of this machine.
        reference: slug of the reference machine.
        reference_card: its card.
        slug: as given.

    Raises:
        BatchError: a parameter has a value that the notebook cannot run with; a line for each.
    """

    def __init__(self, slug: str, parameters: Mapping[str, Any]) -> None:
        check_parameters(slug, parameters)
        self.slug = slug
        self.reference: str = parameters.get("reference", "h200")
        self.reference_card: MachineCard = load_card(self.reference)
        self.card: MachineCard = machine_card(parameters.get("device", "auto"))
        print(self.card.line())

    def rows(self, table: str, slug: str | None = None) -> pd.DataFrame:
        """The reference machine's rows of a table, of another notebook's problem if a slug is given."""
        return measure.load_rows(slug or self.slug, self.reference, table)

    def here(self, table: str, slug: str | None = None) -> pd.DataFrame:
        """This machine's rows of a table."""
        return measure.load_rows(slug or self.slug, self.card.slug, table)

    def beside(self, table: str, slug: str | None = None) -> pd.DataFrame:
        """This machine's rows; `reference_ms`, `reference_status` where the reference measured the same."""
        slug = slug or self.slug
        return report.beside_reference(slug, machine=self.card.slug, reference=self.reference, table=table)

    def save(self, rows: Iterable[Mapping[str, Any]], table: str, slug: str | None = None) -> None:
        """Save rows as this machine's, and print what came out, a line for each."""
        rows = list(rows)
        measure.save_rows(rows, slug or self.slug, table, machine=self.card.slug)
        schema = TABLES[table]
        if rows and schema.group:
            print(_line(rows[0] | {"rows": len(rows)}, schema.group, ["rows"]), "rows")
            return
        for row in rows:
            print(_line(row, schema.keys, schema.values))

    def figure(self, figure: Any, stem: str, *, here: bool = False) -> Any:
        """Write a figure to `figures/<machine>/<slug>/<stem>.png` and `.svg`, and hand it back to be shown.

        Args:
            figure: from one of the report's plots.
            stem: name of the file.
            here: drawn from this machine's rows, not the reference machine's.
        """
        folder = make_folder(figures_dir() / (self.card.slug if here else self.reference) / self.slug)
        for suffix, content in ((".png", figure.png()), (".svg", figure.svg())):
            write_atomically(folder / f"{stem}{suffix}", content)
        return figure


def _line(row: Mapping[str, Any], columns: Sequence[str], outcomes: Sequence[str]) -> str:
    """What was measured and what came out: "plain, context 512, d = 64, float32, forward: 1.23 ms"."""
    told = {name: value for name, value in row.items() if not pd.isna(value)}
    measured = ", ".join(named_value(name, told[name]) for name in columns if name in told)
    if told.get("status", "ok") != "ok":
        return f"{measured}: {told['status']}" + (f" ({told['reason']})" if told.get("reason") else "")
    name = next((name for name in ("p50_ms", *outcomes) if name in told), "")
    value, unit = told.get(name, "saved"), COLUMNS[name].unit if name in COLUMNS else ""
    return f"{measured}: {value if isinstance(value, str) else significant(value)} {unit}".rstrip()
