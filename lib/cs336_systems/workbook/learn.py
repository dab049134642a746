"""The learner's copies: notebooks whose solutions are cleared, in nbgrader's convention."""

import ast
import copy
import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbformat import NotebookNode

from cs336_systems.measure.files import make_folder, write_atomically
from cs336_systems.workbook.tidy import CHECKER, has_solution

# Between these lines stands what the learner writes; nbgrader leaves the same stub in their place.
_SOLUTION = re.compile(r"^([ \t]*)### BEGIN SOLUTION\n.*?^[ \t]*### END SOLUTION$", re.DOTALL | re.MULTILINE)
_STUB = r"\1# YOUR CODE HERE\n\1raise NotImplementedError()"
_MAY_RAISE = "raises-exception"  # tag of a cell whose error stops nothing


def cleared(notebook: NotebookNode) -> NotebookNode:
    """A copy without solutions, and without the outputs of what uses them.

    A cell that uses what is yet to be written may raise: the copy runs to its end all the same.
    """
    notebook = copy.deepcopy(notebook)
    unwritten: set[str] = set()  # names that the solutions make, and what is made from those
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        solution, tags = has_solution(cell), cell.metadata.get("tags", [])
        reads, makes = _names(cell.source)
        if solution or unwritten & reads:
            unwritten |= makes
            cell.source = _SOLUTION.sub(_STUB, cell.source)
            cell.outputs, cell.execution_count = [], None
            if CHECKER not in tags and not solution:
                cell.metadata["tags"] = [*tags, _MAY_RAISE]
    return notebook


def _names(source: str) -> tuple[set[str], set[str]]:
    """The names that code reads, and those that it defines or assigns."""
    reads, makes = set(), set()
    for statement in ast.parse(source).body:
        names = [node for node in ast.walk(statement) if isinstance(node, ast.Name)]
        reads |= {name.id for name in names if isinstance(name.ctx, ast.Load)}
        if isinstance(statement, ast.FunctionDef | ast.ClassDef):
            makes.add(statement.name)  # what it assigns inside is its own
        else:
            makes |= {name.id for name in names if isinstance(name.ctx, ast.Store)}
    return reads, makes


def write_copies(notebooks: Sequence[Path], folder: Path) -> Iterator[str]:
    """Write copies to `folder`, and yield a line for each. One that is there may hold work: it stays."""
    make_folder(folder)
    for path in notebooks:
        target = folder / path.name
        if target.exists():
            yield f"kept     {target} (delete it for a new one)"
            continue
        notebook = nbformat.read(path, as_version=4)
        steps = sum(map(has_solution, notebook.cells))
        write_atomically(target, nbformat.writes(cleared(notebook)) + "\n")
        yield f"written  {target}" + f" ({steps} steps)" * (steps > 0)
