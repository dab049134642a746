"""What a committed notebook keeps: cells, tags and outputs, nothing that changes by itself."""

from nbformat import NotebookNode, from_dict

HIDE_INPUT = "hide-input"  # tag of a cell whose output is what one reads
CHECKER = "checker"  # tag of a cell that checks a step of an exercise
METADATA = {
    "kernelspec": {"display_name": "Python 3 (ipykernel)", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "name": "python", "pygments_lexer": "ipython3"},
}


def tidy(notebook: NotebookNode) -> NotebookNode:
    """The notebook as it is committed: fixed metadata, tags, and outputs in which streams are not split."""
    return from_dict(
        {
            "cells": [_tidy_cell(cell) for cell in notebook.cells],
            "metadata": METADATA,
            "nbformat": 4,
            "nbformat_minor": 5,
        }
    )


def has_solution(cell: NotebookNode) -> bool:
    """Whether it holds what a learner is to write."""
    return cell.cell_type == "code" and "### BEGIN SOLUTION" in cell.source


def _tidy_cell(cell: NotebookNode) -> dict:
    tags = cell.metadata.get("tags")
    kept = {key: cell[key] for key in ("id", "cell_type", "source", "execution_count") if key in cell}
    kept["metadata"] = {"tags": tags} if tags else {}
    if HIDE_INPUT in (tags or []):  # JupyterLab folds it; nbconvert's page does by the tag
        kept["metadata"]["jupyter"] = {"source_hidden": True}
    if has_solution(cell) or CHECKER in (tags or []):
        kept["metadata"]["nbgrader"] = _nbgrader(cell)
    if cell.cell_type == "code":
        kept["outputs"] = _tidy_outputs(cell.outputs)
    return kept


def _nbgrader(cell: NotebookNode) -> dict:
    """What makes a cell nbgrader's: a solution to write, or a locked check of it that counts one point."""
    solution = has_solution(cell)
    kind = {"solution": solution, "grade": not solution, "locked": not solution, "task": False}
    return {"schema_version": 3, "grade_id": cell["id"], **kind} | ({} if solution else {"points": 1})


def _tidy_outputs(outputs: list[NotebookNode]) -> list[dict]:
    """Streams joined (the kernel cuts them by time), and of the outputs' metadata only the size of images."""
    tidied: list[dict] = []
    for output in map(dict, outputs):
        if "metadata" in output:
            output["metadata"] = {k: v for k, v in output["metadata"].items() if k == "image/png" and v}
        last = tidied[-1] if tidied else {}
        if output["output_type"] == "stream" and last.get("name") == output["name"]:
            last["text"] += output["text"]
        else:
            tidied.append(output)
    return tidied
