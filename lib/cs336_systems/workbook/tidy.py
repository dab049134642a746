"""What a committed notebook keeps: cells, tags and outputs, nothing that changes by itself."""

from copy import deepcopy

from nbformat import NotebookNode, from_dict

HIDE_INPUT = "hide-input"  # tag of a cell whose output is what one reads
CHECKER = "checker"  # tag of a cell that checks a step of an exercise
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"},
}


def tidy(notebook: NotebookNode) -> NotebookNode:
    """The notebook as it is committed: fixed metadata, tags, and outputs in which streams are not split."""
    # Not above: the command line need not wait for nbconvert.
    from nbconvert.preprocessors import CoalesceStreamsPreprocessor

    notebook = from_dict(deepcopy(notebook))
    notebook.update(metadata=from_dict(METADATA), nbformat=4, nbformat_minor=5)
    for cell in notebook.cells:
        tags = cell.metadata.get("tags")
        cell.metadata = NotebookNode(tags=tags) if tags else NotebookNode()
        if HIDE_INPUT in (tags or []):  # JupyterLab folds it; nbconvert's page does by the tag
            cell.metadata["jupyter"] = NotebookNode(source_hidden=True)
        if has_solution(cell) or CHECKER in (tags or []):
            cell.metadata["nbgrader"] = _nbgrader(cell)
        for output in cell.get("outputs", []):
            if "metadata" in output:  # the size of an image matters
                output.metadata = {k: v for k, v in output.metadata.items() if k == "image/png" and v}
    return CoalesceStreamsPreprocessor().preprocess(notebook, {})[0]


def has_solution(cell: NotebookNode) -> bool:
    """Whether it holds what a learner is to write."""
    return cell.cell_type == "code" and "### BEGIN SOLUTION" in cell.source


def _nbgrader(cell: NotebookNode) -> NotebookNode:
    """What makes a cell nbgrader's: a solution to write, or a locked check of it that counts one point."""
    solution = has_solution(cell)
    kind = {"solution": solution, "grade": not solution, "locked": not solution, "task": False}
    points = {} if solution else {"points": 1}
    return NotebookNode(schema_version=3, grade_id=cell["id"], **kind, **points)
