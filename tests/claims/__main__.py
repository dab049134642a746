"""Which answers would still stand if the rows were wrong? Perturbs the rows and lists them.

    python -m tests.claims                all notebooks, some minutes
    python -m tests.claims 27 33          those with these numbers

Of each notebook runs what its answers need, first with the committed rows, then with perturbed ones: every
row times exp(0.7 N(0, 1)); a group of rows (an implementation, a dtype, a pass, ...) 1.3 times as large, or
gone; the labels of two groups exchanged; a column a thousand times as large. An answer turns red when a claim
turns false; that it breaks for want of a row or takes too long does not count. Listed apart are answers that
say the same whatever the rows: what they check in the notebook itself (proof, run) is no claim about rows.

Exit code 1: an answer from rows that nothing turns red.
"""

import argparse
import ast
import gc
import os
import signal
import sys
import tempfile
import warnings
from collections.abc import Callable, Collection, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import nbformat
import numpy as np
import pandas as pd
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from tests.checks.solutions import makes, reads

import labbook.compare
import labbook.page
from labbook.labels import UNITS
from labbook.project import project
from labbook.schema import schema

NOTEBOOKS = Path(__file__).resolve().parents[2] / "notebooks"
LOAD_ROWS = labbook.load_rows
PUBLISHED = labbook.published
READING = (labbook, labbook.rows, labbook.page, labbook.compare)  # who has a name for the two
NOISES = 5
LIMIT_S = 20  # of a cell of perturbed rows: one with a loop over MiB has no end in another unit
MOST_GROUPS = 12  # of a column; one with more different values names things

Perturbation = tuple  # its kind, a column, what of it, and how many times as large


class Cell:
    """A code cell, the names it reads and makes, and what it has made."""

    def __init__(self, source: str, tags: list[str]) -> None:
        self.source = source
        self.measures = "nbval-ignore-output" in tags
        self.makes = makes(source)
        for node in ast.walk(ast.parse(source)):  # frame["share"] = ...
            if isinstance(node, ast.Subscript) and isinstance(node.ctx, ast.Store):
                self.makes |= {getattr(node.value, "id", "")}
        # Page(..., globals()) reads the parameters.
        self.reads = reads(source.replace("globals()", "reference"))
        self.made = {}
        self.from_rows = False


class Notebook:
    """The cells that the answers of a notebook need. What does not come from rows runs once."""

    def __init__(self, path: Path) -> None:
        cells = nbformat.read(path, as_version=4).cells
        code = [cell for cell in cells if cell.cell_type == "code"]
        cells = [Cell(cell.source, cell.metadata.get("tags", [])) for cell in code]
        self.cells = list(_needed(cells))[::-1]
        self.shell = InteractiveShell.instance()
        self.frames = {}
        self.shell.reset(new_session=False)
        self.shell.user_ns["__spec__"] = None  # which processes that are spawned ask for
        for module in READING:
            module.load_rows = self._load_rows
            module.published = self._load_published
        labbook.answer = self._answer

    def run(self, perturb: Perturbation | None = None) -> dict[tuple, tuple[str, bool]]:
        """What its answers claim of rows that `perturb` has changed, and whether it holds."""
        self.claims = {}
        self.said = {}
        self.perturb = perturb
        for cell in self.cells:
            if perturb and not cell.from_rows:
                self.shell.user_ns.update(cell.made)
                continue
            self.now = cell
            signal.alarm(LIMIT_S if perturb else 0)
            with capture_output():
                error = self.shell.run_cell(cell.source).error_in_exec
            signal.alarm(0)
            if error and not perturb:
                raise error
            # For want of a name what follows breaks as well.
            made = {} if error else self.shell.user_ns
            cell.made = {name: made[name] for name in cell.makes if name in made}
            for name in cell.makes - cell.made.keys():
                self.shell.user_ns.pop(name, None)
        if not perturb:
            _spread(self.cells)
        return self.claims

    def _answer(self, deliverable: str, text: str, *claims: labbook.Claim) -> None:
        cell = self.cells.index(self.now)
        self.said[cell, deliverable] = text
        for place, claim in enumerate(claims or [labbook.claim("makes no claim", True)]):
            self.claims[cell, deliverable, place] = (claim.description, claim.holds)

    def _load_rows(self, slug: str, machine: str, table: str) -> pd.DataFrame:
        if machine not in project().committed:
            return LOAD_ROWS(slug, machine, table)
        return self._changed((slug, machine, table), LOAD_ROWS, schema().tables[table].keys)

    def _load_published(self, name: str) -> pd.DataFrame:
        return self._changed((name,), PUBLISHED, _key_columns(PUBLISHED(name)))

    def _changed(self, place: tuple, load: Callable, keys: Collection[str]) -> pd.DataFrame:
        self.now.from_rows = True
        if place not in self.frames:
            frame = load(*place)
            values = [name for name in frame if frame[name].dtype.kind in "fi" and name not in keys]
            labels = [name for name in keys if 1 < frame[name].nunique() <= MOST_GROUPS]
            self.frames[place] = frame, values, labels
        frame, values, _ = self.frames[place]
        return perturbed(frame, values, *self.perturb) if self.perturb else frame.copy()


def _key_columns(frame: pd.DataFrame) -> list[str]:
    """The columns that say what was measured and where, as opposed to what came out."""
    keys = set().union(*(table.keys for table in schema().tables.values()))
    values = schema().values | {"status", "reason", "run"}
    return [
        name for name in frame if name in keys or not (name in values or _is_value(frame[name]))
    ]


def _is_value(column: pd.Series) -> bool:
    """Whether a column that no table has is a result, by its numbers or its name."""
    _, _, end = column.name.rpartition("_")
    return column.dtype.kind == "f" or end == "status" or end in UNITS


def _needed(cells: list[Cell]) -> Iterator[Cell]:
    """The answers, and before each cell those that make what it reads; the last first."""
    made = set()
    late = set()  # what a function reads that is made after it
    for cell in cells:
        made |= cell.makes
        late |= cell.reads - made
    names = late & made
    saved = False
    for cell in reversed(cells):
        if "answer" in cell.reads or cell.makes & names or (saved and "page.save(" in cell.source):
            saved |= "page.rows(" in cell.source
            names = (names - cell.makes) | cell.reads
            yield cell


def _spread(cells: list[Cell]) -> None:
    """What reads a name that comes from rows comes from rows, save what measures here."""
    names = set()
    for cell in cells:
        cell.from_rows |= not cell.measures and bool(cell.reads & names)
        names = names | cell.makes if cell.from_rows else names - cell.makes


def perturbations(frames: list[tuple[pd.DataFrame, list, list]]) -> Iterator[Perturbation]:
    """Of rows like these, given with their columns of values and of labels."""
    yield from (("noise", "", seed) for seed in range(NOISES))
    columns = {name for _, values, _ in frames for name in values}
    yield from (("unit", name, 1000) for name in sorted(columns))
    groups = set()
    for rows, _, labels in frames:
        groups |= {(name, group) for name in labels for group in rows[name].dropna()}
    groups = sorted(groups, key=str)
    for (name, group), (same, other) in pairwise(groups):
        if name == same:
            yield "labels", name, {group: other, other: group}
    for name, group in groups:
        yield "times", name, group, 1.3
        yield "times", name, group, 1 / 1.3
        yield "without", name, group


def perturbed(
    frame: pd.DataFrame, values: list[str], kind: str, name: str, what: Any, factor: float = 1
) -> pd.DataFrame:
    if kind == "noise":
        factors = np.exp(0.7 * np.random.default_rng(what).standard_normal((len(frame), 1)))
        return frame.assign(**frame[values] * factors)
    if name not in frame:
        return frame
    if kind == "without":
        return frame[frame[name] != what]
    if kind == "labels":
        return frame.assign(**{name: frame[name].replace(what)})
    if kind == "unit":
        return frame.assign(**{name: frame[name] * what}) if name in values else frame
    return frame.assign(**frame[values] * np.where(frame[[name]] == what, factor, 1))


def audit(path: Path) -> bool:
    """Print what nothing turns red; returns whether an answer from rows is among it."""
    notebook = Notebook(path)
    try:
        claims = notebook.run()
    except Exception as error:
        print(f"{path.stem}: does not run, {type(error).__name__}: {error}")
        return True
    said = notebook.said
    changed = set()
    fell = {key for key, (_, holds) in claims.items() if not holds}
    for tried, perturb in enumerate(perturbations(list(notebook.frames.values()))):
        if tried >= NOISES and not changed - {key[:2] for key in fell}:
            break
        print(f"\r{path.stem}: {tried} tried, {len(fell)} claims false", end=" ", file=sys.stderr)
        gc.collect()  # a cell that broke leaves its frame, with tables in it, in a cycle
        fell |= {key for key, (_, holds) in notebook.run(perturb).items() if not holds}
        rerun = {answer for answer in said if notebook.cells[answer[0]].from_rows}
        changed |= {answer for answer in rerun if notebook.said.get(answer) != said[answer]}
    red = {key[:2] for key in fell}
    count = f"{len(changed)} of {len(said)} answers depend on rows"
    print(f"{path.stem}: {count}; {len(fell)} of {len(claims)} claims turned false")
    for _, deliverable in sorted(changed - red):
        print(f"    nothing turns red: ({deliverable})")
    for _, deliverable in sorted(said.keys() - changed - red):
        print(f"    whatever the rows: ({deliverable})")
    return bool(changed - red)


def main() -> int:
    description = __doc__.splitlines()[0]
    parser = argparse.ArgumentParser(prog="python -m tests.claims", description=description)
    parser.add_argument("numbers", nargs="*", metavar="NN", help="of notebooks (all)")
    options = parser.parse_args()
    paths = sorted(NOTEBOOKS.glob("*.ipynb"))[1:]
    if options.numbers:
        paths = [path for path in paths if path.stem[:2] in options.numbers]
    warnings.simplefilter("ignore")
    # A KeyboardInterrupt ends the cell.
    signal.signal(signal.SIGALRM, signal.default_int_handler)
    os.chdir(NOTEBOOKS)
    with tempfile.TemporaryDirectory(prefix="claims-") as folder:
        os.environ |= {"LABBOOK_FIGURES": folder, "CUDA_VISIBLE_DEVICES": "", "MPLBACKEND": "agg"}
        return int(any([audit(path) for path in paths]))


if __name__ == "__main__":
    sys.exit(main())
