"""The solutions of the notebooks, to be changed in one place and checked."""

import contextlib
import io
import linecache
import symtable
from functools import cache
from typing import Any

import nbformat
import pytest
import torch

from labbook.book.tidy import CHECKER, has_solution
from labbook.project import project


class Written:
    """A step of a notebook: the cells that its checkers need, the solution among them."""

    def __init__(self, number, name):
        (path,) = project().notebooks.glob(f"{number}_*.ipynb")
        cells = nbformat.read(path, as_version=4).cells
        cells = [cell for cell in cells if cell.cell_type == "code"]
        steps = [i for i, cell in enumerate(cells) if has_solution(cell)]
        place = next(i for i in steps if name in makes(cells[i].source))
        end = next((i for i in steps if i > place), len(cells))
        checkers = [i for i in range(place, end) if _is_checker(cells[i])]
        self.name = name
        self.solution = cells[place].source
        self.before = []
        self.after = []
        # From the last checker back: what makes something that a later cell reads.
        wanted = set()
        for i in range(checkers[-1], -1, -1):
            source = cells[i].source
            if i in checkers or makes(source) & wanted:
                wanted |= reads(source)
                # A checker reads what it has made, as `check`: others are not run.
                if _is_checker(cells[i]):
                    wanted -= makes(source)
                if i != place:
                    (self.before if i < place else self.after).insert(0, source)

    def made(self, *changes):
        """What the cells make under its name, with pieces of them replaced: (piece, instead, piece, ...)."""
        source = "\n\n".join(self.before + [self.solution])
        for piece, instead in zip(changes[::2], changes[1::2], strict=True):
            assert piece in source, piece
            source = source.replace(piece, instead)
        names = {}
        _run(names, source)
        return names[self.name]

    def says(self, solution, wrap=lambda made: made):
        """What the checkers print of this solution, of which `wrap` may change what it has made."""
        names: dict[str, Any] = {}
        _run(names, *self.before, solution)
        names[self.name] = wrap(names[self.name])
        return _run(names, *self.after)


written = cache(Written)


def _is_checker(cell):
    return CHECKER in cell.metadata.get("tags", ())


def as_contiguous(x):
    """What is read of x where the numbers of a contiguous tensor would be."""
    return x.as_strided(x.shape, torch.empty(x.shape).stride())


def _run(names, *sources):
    """What cells print, run as in a notebook: what is defined finds its source, for which Triton asks."""
    # The latter is IPython's.
    names |= {"__name__": "__main__", "display": lambda *shown, **how: None}
    with (
        contextlib.redirect_stdout(io.StringIO()) as printed,
        pytest.MonkeyPatch.context() as patch,
    ):
        # Of rows, at which no checker looks.
        patch.setattr("labbook.page.provenance", lambda *_: ("", []))
        for source in sources:
            file = f"<cell {hash(source)}>"
            linecache.cache[file] = len(source), None, source.splitlines(keepends=True), file
            exec(compile(source, file, "exec"), names)
    return printed.getvalue()


@cache
def makes(source):
    symbols = symtable.symtable(source, "cell", "exec").get_symbols()
    return {symbol.get_name() for symbol in symbols if symbol.is_assigned() or symbol.is_imported()}


@cache
def reads(source):
    """The names that a cell takes from others; arguments and what is local to a function are its own."""
    cell = symtable.symtable(source, "cell", "exec")
    names = {symbol.get_name() for symbol in cell.get_symbols() if symbol.is_referenced()}
    tables = cell.get_children()
    while tables:
        table = tables.pop()
        tables += table.get_children()
        names |= {symbol.get_name() for symbol in table.get_symbols() if symbol.is_global()}
    return names
