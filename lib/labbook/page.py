"""What every notebook starts from: its parameters checked, this machine's card, its rows and its figures."""

import os
from collections import Counter
from collections.abc import Iterable, Mapping
from numbers import Real
from typing import Any

import pandas as pd

from labbook import bench, code, later, runs
from labbook.files import committed, figures_dir, make_folder, write_atomically
from labbook.machine import MachineCard, load_card, machine_card
from labbook.rows import TABLES, load_rows, run_counts, save_rows


class Page:
    """The rows and figures of one notebook, on this machine (`card`) and on the reference machine.

    Creating it begins a run, prints this machine's card, which is measured first where there is none, and how
    old the rows of the committed machines are.

    slug: of the notebook's problem.
    parameters: `globals()` of the notebook; of its parameters, `device` and `reference` are used here.
    Raises BatchError: a parameter has a value that the notebook cannot run with; a line for each.
    """

    def __init__(self, slug: str, parameters: Mapping[str, Any]) -> None:
        later("check_parameters")(slug, parameters)
        self.slug = slug
        self._printed: set[str] = set()
        self.reference: str = parameters.get("reference", "h200")
        self.reference_card: MachineCard = load_card(self.reference)
        self.device: str = parameters.get("device", "auto")
        self.card: MachineCard = machine_card(self.device)
        self._names = code.code_cells(code.notebook_of(slug))[1]
        given = {name: parameters[name] for name in sorted(self._names) if name in parameters}
        self._executed: list[str] = parameters.get("In", [])  # IPython's; it grows with every cell
        self.run = runs.Run(slug, self.card.slug, given, self.code)
        machines = sorted({self.reference, *committed()})
        self._say("\n".join(filter(None, [self.card.line(), *map(self._age, machines)])))

    def reference_rows(
        self, table: str, slug: str | None = None, machine: str | None = None
    ) -> pd.DataFrame:
        """The rows of a table on the reference machine, or on another one that is named.

        slug: of another notebook's problem.
        Prints, once, how many of the reference machine's rows are historical, and why.
        """
        rows = load_rows(slug or self.slug, machine or self.reference, table)
        if machine is None:
            self._say_historical(rows, table)
        return later("with_derived")(rows)

    def _say_historical(self, rows: pd.DataFrame, table: str) -> None:
        names = rows["run"].dropna().unique()
        records = {name: runs.load_run(self.reference, name) for name in names}
        why = rows["run"].map(lambda name: (record := records.get(name)) and record.historical)
        for reason, count in why[why.astype(bool)].value_counts().items():
            self._say(f"{table}: {count:,} of {len(rows):,} rows are historical, {reason}")

    def rows(self, table: str, slug: str | None = None) -> pd.DataFrame:
        """The rows of a table on this machine, of another notebook's problem if a slug is given."""
        return later("with_derived")(load_rows(slug or self.slug, self.card.slug, table))

    def beside(self, table: str, slug: str | None = None) -> pd.DataFrame:
        """This machine's rows; `reference_ms`, `reference_status` where the reference measured the same."""
        mine = self.rows(table, slug)
        theirs = load_rows(slug or self.slug, self.reference, table)
        return mine if self.card.slug == self.reference else later("beside_reference")(mine, theirs)

    def on_record(self, table: str, slug: str | None = None) -> pd.DataFrame:
        """This machine's rows that the code of the running cell measured: not to be repeated."""
        return runs.of_code(self.code(), self.rows(table, slug), self.card.slug)

    def save(
        self,
        rows: Iterable[Mapping[str, Any]],
        table: str,
        slug: str | None = None,
        machine: str | None = None,
    ) -> None:
        """Save rows as this machine's, and print what came out, a line for each that says something new.

        machine: another name for where they were made; "ahead_of_time" for what was only compiled.
        """
        rows = list(rows)
        run = self.run if machine is None else runs.Run(self.slug, machine, executed=self.code)
        save_rows(rows, slug or self.slug, table, machine or self.card.slug, run)
        for line in later("row_lines")(
            rows, table
        ):  # saved again with more columns, a row says the same
            self._say(line)

    def measure(
        self, table: str, cases: Iterable[bench.Case], setup: bench.Setup, **how: Any
    ) -> None:
        """Time each case on this machine and save its rows as they come; `how` as in `bench.measure`.

        A case whose row was measured by the code that now runs, with as many steps, is left out, so that what
        was interrupted continues; with $LABBOOK_AGAIN set none is.
        """
        cases, keys, steps = list(cases), [*TABLES[table].keys], how.get("steps", 0)
        record = (
            self.on_record(table)
            if not os.environ.get("LABBOOK_AGAIN")
            else pd.DataFrame(columns=keys)
        )
        record = record[record["status"] != "skipped"] if len(record) else record
        kept = {
            _key(row, keys)
            for row in record.to_dict("records")
            if not row.get("steps", steps) < steps
        }
        how |= {"kept": lambda case: _key(case, keys) in kept, "device": self.device}
        for rows in bench.measure(cases, setup, **how):
            for other, more in [pair for row in rows for pair in row.pop("tables", {}).items()]:
                self.save(more, other)
            self.save(rows, table)
        if left_out := sum(_key(case, keys) in kept for case in cases):
            print(f"{left_out} of {len(cases)} cases are on record, measured by this code")

    def figure(
        self, figure: Any, stem: str, *, here: bool = False, machine: str | None = None
    ) -> Any:
        """Write a figure to `figures/<machine>/<slug>/<stem>.png` and `.svg`, and hand it back to be shown.

        here, machine: drawn from this machine's rows, or a named one's, not the reference machine's.
        """
        machine = self.card.slug if here else machine or self.reference
        folder = make_folder(figures_dir() / machine / self.slug)
        for suffix, content in ((".png", figure.png()), (".svg", figure.svg())):
            write_atomically(folder / f"{stem}{suffix}", content)
        return figure

    def code(self) -> dict[str, str]:
        """The hashes of what the running cell saves (see `labbook.code`); none outside of IPython."""
        return code.of_cells(self._executed, self._names) if self._executed else {}

    def _age(self, machine: str) -> str:
        """How many of a machine's rows are of today's code, and what the others are."""
        counts = Counter()
        for name, count in run_counts(self.slug, machine).items():
            record = runs.load_run(machine, name)
            path = code.notebook_of(record.slug) if record else None
            now = code.of_notebook(path) if path and record.code else {}
            counts[runs.why_old(record, now) or "of today's code"] += count
        told = "; ".join(f"{count:,} {why}" for why, count in counts.most_common())
        return f"rows of {machine}: {told}" if told else ""

    def _say(self, line: str) -> None:
        if line and line not in self._printed:
            print(line)
        self._printed.add(line)


def _key(row: Mapping[str, Any], keys: Iterable[str]) -> tuple:
    """What was measured, the same for a case and for a loaded row, whose numbers may be floats."""
    values = [None if pd.isna(row.get(name)) else row[name] for name in keys]
    return tuple(float(each) if isinstance(each, Real) else each for each in values)
