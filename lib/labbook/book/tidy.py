"""What a committed notebook keeps, nothing that changes by itself; and the learner's copy, solutions cleared.

Both mark solutions and their checkers as nbgrader does.
"""

import re
from collections.abc import Iterator, Sequence
from pathlib import Path

import nbformat
from nbconvert.preprocessors import CoalesceStreamsPreprocessor
from nbformat import NotebookNode

from labbook.book.notebooks import read, tags_of
from labbook.files import make_folder, write_atomically

HIDE_INPUT = "hide-input"  # tag of a cell whose output is what one reads
# Tag of the answer that matters most, of the picture beside it, and of a cell that shows those of others.
HEADLINE = "headline"
IN_SHORT = "in-short"  # tag of the cell that says below the question what was found
ASIDE = "aside"  # tag of code that the argument goes on without: the site folds it
CHECKER = "checker"  # tag of a cell that checks a step of an exercise
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"},
}

# Between these lines stands what the learner writes; nbgrader leaves the same stub in their place.
_SOLUTION = re.compile(
    r"^([ \t]*)###[ \t]*BEGIN SOLUTION\b[^\n]*\n.*?^[ \t]*###[ \t]*END SOLUTION\b[^\n]*$",
    re.DOTALL | re.MULTILINE,
)
_MARK = re.compile(r"#[ \t]*(BEGIN|END) SOLUTION")
_MINUTES = re.compile(r"\*\*Your turn.*?\*\((\d+) minutes", re.DOTALL)
_STUB = r"\1# YOUR CODE HERE\n\1raise NotImplementedError()"


def tidy(notebook: NotebookNode) -> NotebookNode:
    """The notebook as it is committed: fixed metadata, tags, and outputs in which streams are not split."""
    fixed = {"metadata": METADATA, "nbformat": 4, "nbformat_minor": 5}
    notebook = nbformat.from_dict(notebook | fixed)  # a copy
    points = 1
    for cell in notebook.cells:
        if minutes := _MINUTES.search(cell.source):
            points = int(minutes[1])
        tags = tags_of(cell)
        cell.metadata = NotebookNode(tags=tags) if tags else NotebookNode()
        # JupyterLab folds it, by this tag and by hide-input-in-jupyter; the site folds by this one alone. The
        # other is of a cell that would show a learner the solution of a step before it.
        if any(HIDE_INPUT in tag for tag in tags):
            cell.metadata["jupyter"] = NotebookNode(source_hidden=True)
        if has_solution(cell) or CHECKER in tags:
            cell.metadata["nbgrader"] = _nbgrader(cell, points)
        for output in cell.get("outputs", []):
            if "metadata" in output:  # the size of an image matters
                size = output.metadata.get("image/png")
                output.metadata = {"image/png": size} if size else {}
    return CoalesceStreamsPreprocessor().preprocess(notebook, {})[0]


def _nbgrader(cell, points):
    """A solution is written by the learner; a checker is locked, and gives a point a minute of its step."""
    is_checker = not has_solution(cell)
    metadata = NotebookNode(
        schema_version=3,
        grade_id=cell.id,
        task=False,
        solution=not is_checker,
        grade=is_checker,
        locked=is_checker,
    )
    return NotebookNode(metadata, points=points) if is_checker else metadata


def has_solution(cell: NotebookNode) -> bool:
    """Whether it holds what a learner is to write."""
    return cell.cell_type == "code" and _MARK.search(cell.source) is not None


def cleared(notebook: NotebookNode) -> NotebookNode:
    """A copy with stubs for solutions, without what its notebook found: no output from the first step on.

    Any cell may raise, as those do that use what is yet to be written: the copy runs to its end all the same.
    Raises ValueError: a solution has no end, or no beginning.
    """
    notebook = nbformat.from_dict(notebook)  # a copy
    notebook.cells = [cell for cell in notebook.cells if IN_SHORT not in tags_of(cell)]
    has_begun = False
    for cell in notebook.cells:
        if cell.cell_type == "code":
            tags = tags_of(cell)
            cell.metadata["tags"] = tags + ["raises-exception"]  # whose error stops nothing
            has_begun |= has_solution(cell)
            if has_begun or HEADLINE in tags:
                cell.outputs = []
                cell.execution_count = None
            cell.source = _SOLUTION.sub(_STUB, cell.source)
            if _MARK.search(cell.source):
                raise ValueError(f"a mark of a solution lacks its other end: {cell.source[:80]!r}")
    return notebook


def write_copies(notebooks: Sequence[Path], folder: Path) -> Iterator[str]:
    """Write copies to `folder`, and yield a line for each. One that is there may hold work: it stays."""
    make_folder(folder, "copy the repository to where you may write")
    for path in notebooks:
        target = folder / path.name
        if target.exists():
            yield f"kept     {target} (delete it for a new one)"
            continue
        copy = cleared(read(path))
        write_atomically(target, nbformat.writes(copy) + "\n")
        yield f"written  {target}"
