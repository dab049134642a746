"""The learner's copies: notebooks whose solutions are cleared, in nbgrader's convention."""

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


def cleared(notebook: NotebookNode) -> NotebookNode:
    """A copy without solutions, and without the outputs of the solutions' cells and of their checkers."""
    notebook = copy.deepcopy(notebook)
    for cell in notebook.cells:
        if has_solution(cell) or CHECKER in cell.metadata.get("tags", ()):
            cell.source = _SOLUTION.sub(_STUB, cell.source)
            cell.outputs, cell.execution_count = [], None
    return notebook


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
