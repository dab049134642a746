"""What every notebook starts from: its parameters checked, this machine's card, its rows and its figures."""

import gc
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, partial

import pandas as pd
import psutil
from IPython import get_ipython

from labbook import bench, code, evidence, ranks
from labbook.answers import show_markdown
from labbook.book.notebooks import check_parameters
from labbook.compare import beside_published
from labbook.files import figures_dir, write_atomically
from labbook.labels import column_label, significant, with_derived
from labbook.machine import load_card, machine_card
from labbook.project import project
from labbook.release import provenance
from labbook.rows import load_rows, point_of, published, save_rows
from labbook.runs import Run
from labbook.tables import row_lines, show, show_html


@cache
def _prepare_process():
    """What the process of a notebook needs once, for all its pages."""
    # What was imported stays: each collection between cases would walk all of it.
    gc.freeze()
    if shell := get_ipython():
        shell.observe(_end_soon, "exit_now")


def _end_soon(_):
    """Before a kernel ends: no last collection, which walks all of torch, no waiting for children.

    The kernel asks them by SIGTERM, which the resource tracker of multiprocessing does not heed.
    """
    gc.freeze()
    for child in psutil.Process().children():
        child.kill()
        child.wait()


class Page:
    """The rows and figures of one notebook, on this machine (`card`) and on the reference machine.

    Creating it begins a run, prints this machine's card, which is measured first where there is none, and by
    which code the committed rows were measured.

    slug: of the notebook's problem.
    parameters: `globals()` of the notebook; of its parameters, `device` and `reference` are used here; by
        default the reference is the project's.
    Raises BatchError: a parameter has a value that the notebook cannot run with; a line for each.
    """

    def __init__(self, slug: str, parameters: Mapping) -> None:
        check_parameters(slug, parameters)
        _prepare_process()
        self.slug = slug
        self.device = parameters.get("device", "auto")
        is_several = slug in project().several
        if is_several:
            ranks.preload()
        self.card = machine_card(self.device, is_several)
        self.reference = parameters.get("reference") or project().reference or self.card.slug
        self.reference_card = load_card(self.reference)
        _, names = code.code_cells(code.notebook_of(slug))
        values = {name: parameters[name] for name in sorted(names) if name in parameters}
        cells = parameters.get("In", [""])  # IPython's; it grows with every cell
        self.run = Run(slug, self.card.slug, values, partial(code.of_cells, cells, values))
        self._printed = set()
        self._print(self.card.line())
        self._show_provenance()

    def _show_provenance(self):
        """Print by which code the committed rows were measured; fold the names of what changed since."""
        line, changed = provenance(self.slug, {self.reference} | set(project().committed))
        if changed:
            folded = f"<details><summary>{line}</summary>{', '.join(changed)}</details>"
            show_html(folded, line)
        else:
            self._print(line)

    def reference_rows(
        self, table: str, slug: str | None = None, machine: str | None = None
    ) -> pd.DataFrame:
        """The rows of a table on the reference machine, or on another one that is named.

        slug: of another notebook's problem.
        """
        return with_derived(load_rows(slug or self.slug, machine or self.reference, table))

    def rows(self, table: str, slug: str | None = None) -> pd.DataFrame:
        """The rows of a table on this machine, of another notebook's problem if a slug is given."""
        return self.reference_rows(table, slug, self.card.slug)

    def beside_published(
        self, table: str | pd.DataFrame, keys: Sequence[str], value: str, rows: pd.DataFrame
    ):
        """Show, folded, what reports measured beside the reference: theirs, ours, the ratio, their card.

        table: of `figures/published`, or rows of one with the columns of `rows`.
        keys: what both agree in; a line for each of these that both have, in the order of the reports.
        rows: of the reference.
        """
        theirs = published(table) if isinstance(table, str) else table
        both = beside_published(theirs, rows, keys, value)
        numbers = ["theirs", "ours", "ratio"]
        both[numbers] = both[numbers].map(significant)
        show(both, f"Beside public reports: {column_label(value)}, theirs over ours", folded=True)

    def save(self, rows: Iterable[Mapping], table: str):
        """Save rows as this machine's, and print what came out, a line for each that says something new."""
        rows = list(rows)
        save_rows(rows, self.slug, table, self.card.slug, self.run)
        # Saved again with more columns, a row says the same.
        for line in row_lines(rows, table):
            self._print(line)

    def measure(self, table: str, cases: Iterable[bench.Case], setup: bench.Setup, **options):
        """Time each case on this machine and save its rows as they come; `options` as in `bench.measure`.

        A case whose row was measured by the code that now runs, with as many steps, is left out, so that what
        was interrupted continues; with $LABBOOK_AGAIN set none is.
        """
        cases = list(cases)
        on_record = evidence.points(self.on_record(table), table, options.get("steps", 0))
        due = [case for case in cases if point_of(case, table) not in on_record]
        for rows in bench.measure(due, setup, device=self.device, **options):
            # Rows of other tables first: with its own row on record a case is not measured again.
            for row in rows:
                for other_table, other_rows in row.pop("tables", {}).items():
                    self.save(other_rows, other_table)
            self.save(rows, table)
        if left_out := len(cases) - len(due):
            print(f"{left_out} of {len(cases)} cases are on record, measured by this code")

    def on_record(self, table: str) -> pd.DataFrame:
        """This machine's rows that the code of the running cell measured; none with $LABBOOK_AGAIN set."""
        now = {} if os.environ.get("LABBOOK_AGAIN") else self.run.executed()
        return evidence.rows_of(now, self.rows(table), self.card.slug)

    def figure(self, figure, stem: str, *, here: bool = False):
        """Write a figure to `figures/<machine>/<slug>/<stem>.png`, and hand it back to be shown.

        here: not of the reference's rows, but of this machine's, or of values computed on the spot.
        """
        machine = self.card.slug if here else self.reference
        # On the reference machine the picture of the reference stays.
        if not here or machine != self.reference:
            write_atomically(figures_dir() / machine / self.slug / f"{stem}.png", figure.png)
        return figure

    def here(self, text: str = ""):
        """Say what this machine's rows answer, without claims; without a text, that it has none."""
        show_markdown(f"**{self.card.slug}:** {text or 'not measured here.'}")

    def _print(self, line):
        """Print what this page has not printed yet."""
        if line and line not in self._printed:
            print(line)
        self._printed.add(line)
