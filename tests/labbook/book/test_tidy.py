"""Tidy notebooks, and the learner's copies: solutions gone, the notebook whole."""

import copy
import os
from multiprocessing import Pipe

import nbformat
import pytest
from IPython.core.interactiveshell import InteractiveShell
from IPython.utils.capture import capture_output
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from tests.labbook.kernel_forks import fork
from traitlets.config import Config

from labbook.book.tidy import CHECKER, IN_SHORT, cleared, has_solution, tidy, write_copies
from labbook.project import project

SOLUTION = """\
class Sum:
    def block(self, x):
        ### BEGIN SOLUTION
        return x.sum()
        ### END SOLUTION

    def total(self, x):
        ### BEGIN SOLUTION
        return self.block(x)

        ### END SOLUTION
"""
STUB = """\
class Sum:
    def block(self, x):
        # YOUR CODE HERE
        raise NotImplementedError()

    def total(self, x):
        # YOUR CODE HERE
        raise NotImplementedError()
"""
PATHS = sorted(project().notebooks.glob("*.ipynb"))
WITH_STEPS = [path for path in PATHS if "### BEGIN SOLUTION" in path.read_text(encoding="utf-8")]


@pytest.fixture
def notebook():
    output = new_output("stream", name="stdout", text="sum: right\n")
    check = new_code_cell(
        "check(Sum)", metadata={"tags": [CHECKER]}, outputs=[output], execution_count=2
    )
    uses = [
        new_code_cell(source) for source in ("found = Sum().total(x)", "print(found)", "print(x)")
    ]
    return new_notebook(cells=[new_code_cell(SOLUTION, execution_count=1), check] + uses)


def test_a_copy_has_stubs_any_cell_may_raise_and_nothing_shows_what_was_found(notebook):
    output = new_output("stream", name="stdout", text="3\n")
    notebook.cells[-1].outputs = [output]
    card = new_code_cell("card()", outputs=[output])
    in_short = new_markdown_cell("It is 3.", metadata={"tags": [IN_SHORT]})
    notebook.cells = [in_short, card] + notebook.cells
    learners = cleared(notebook)
    assert (learners.cells[1].source, notebook.cells[2].source) == (STUB, SOLUTION)
    assert [cell.outputs for cell in learners.cells] == [[output], [], [], [], [], []]
    assert all("raises-exception" in cell.metadata["tags"] for cell in learners.cells)


def test_a_tidied_notebook_stays_and_a_messy_one_becomes_it(notebook):
    messy = tidy(notebook)
    messy.metadata.papermill = {"duration": 1.5}
    messy.cells[1].metadata |= {"papermill": {"duration": 1}, "collapsed": True}
    messy.cells[1].outputs = [new_output("stream", text=text) for text in ("sum: right", "\n")]
    before = copy.deepcopy(messy)
    assert tidy(messy) == tidy(tidy(notebook)) == tidy(notebook)
    assert messy == before


def test_a_copy_that_is_there_stays(notebook, tmp_path):
    original = tmp_path / "11_sum.ipynb"
    folder = tmp_path / "learn"
    nbformat.write(notebook, original)
    list(write_copies([original], folder))
    (folder / original.name).write_text("my work")
    list(write_copies([original], folder))
    assert (folder / original.name).read_text() == "my work"
    with pytest.raises(PermissionError, match="copy the repository"):
        list(write_copies([original], original / "learn"))


def test_nbgrader_knows_what_to_clear_and_what_to_grade(notebook):
    notebook.cells.insert(0, new_markdown_cell("**Your turn: a sum** *(15 minutes, hard)*. Add."))
    solution, check = (cell.metadata["nbgrader"] for cell in tidy(notebook).cells[1:3])
    assert (solution["solution"], solution["grade"]) == (True, False)
    assert (check["solution"], check["grade"], check["locked"]) == (False, True, True)
    assert check["points"] == 15
    assert solution["grade_id"] != check["grade_id"]


def run_copy(path, told):
    """In a process of its own, send what is wrong with a copy up to its last checker; "" at the end."""
    notebook = nbformat.read(path, as_version=4)
    cells = [cell for cell in cleared(notebook).cells if cell.cell_type == "code"]
    checks = [i for i, cell in enumerate(cells) if CHECKER in cell.metadata["tags"]]
    not_yet = 0
    os.chdir(project().notebooks)
    quiet = Config(HistoryManager={"enabled": False}, InteractiveShell={"xmode": "Minimal"})
    shell = InteractiveShell.instance(config=quiet)
    for i, cell in enumerate(cells[: checks[-1] + 1]):
        with capture_output() as said:
            done = shell.run_cell(cell.source, store_history=True)
        not_yet += i in checks and ": not yet" in said.stdout
        if (i in checks and not done.success) or has_solution(cell):
            told.send(f"{cell.source}\nraised {done.error_in_exec!r}, said\n{said.stdout}")
    steps = sum(map(has_solution, notebook.cells))
    told.send(
        "" if not_yet >= steps else f"{not_yet} checkers say that {steps} steps are not written"
    )


@pytest.mark.parametrize("path", WITH_STEPS, ids=lambda path: path.stem)
def test_a_copy_runs_past_its_steps_and_says_not_yet_at_each(path):
    """As JupyterLab does, it goes on after a cell that raises and is marked as allowed to."""
    receive, send = Pipe(duplex=False)
    process = fork(run_copy, path, send)
    send.close()
    try:
        assert receive.recv() == ""
    finally:
        process.kill()
        process.join()


@pytest.mark.parametrize("begin", ["### BEGIN SOLUTION: the sum", "###BEGIN SOLUTION\r"])
@pytest.mark.parametrize("end", ["### END SOLUTION ", "### END SOLUTION\r"])
def test_a_solution_is_cleared_however_its_marks_are_written(begin, end):
    cell = new_code_cell(f"def f():\n    {begin}\n    return 42\n    {end}")
    assert has_solution(cell)
    assert "42" not in cleared(new_notebook(cells=[cell])).cells[0].source


def test_a_solution_without_an_end_is_not_handed_out():
    notebook = new_notebook(cells=[new_code_cell("### BEGIN SOLUTION\nreturn 42")])
    with pytest.raises(ValueError, match="other end"):
        cleared(notebook)
