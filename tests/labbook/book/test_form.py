"""Every committed notebook is in form."""

from pathlib import Path

import nbformat
import pytest
from nbformat import v4
from notebook_form import problems

NOTEBOOKS = sorted((Path(__file__).parents[3] / "notebooks").glob("*.ipynb"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_form(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert problems(notebook, path.stem) == []


BREAKS = {
    "not executed": {"execution_count": None},
    "is empty": {"source": ""},
    "public names": {"source": "from cs336_systems.parallel import _x"},
    "TODO is left": {"source": "x = 1  # TODO"},
    "absolute path": {"source": "open('/home/ada/x')"},
    "keeps metadata": {"metadata": {"papermill": {}}},
    "/home/ada/x": {"outputs": [v4.new_output("stream", text="in\n/home/ada/x")]},
    "at 0x7f0000": {"outputs": [v4.new_output("display_data", {"text/plain": "<A at 0x7f0000>"})]},
    "image/jpeg": {"outputs": [v4.new_output("display_data", {"image/jpeg": "", "image/png": ""})]},
}


@pytest.mark.parametrize("said", BREAKS)
def test_what_is_out_of_form_is_found(said):
    notebook = nbformat.read(NOTEBOOKS[1], as_version=4)
    next(cell for cell in notebook.cells[3:] if cell.cell_type == "code").update(BREAKS[said])
    assert any(said in problem for problem in problems(notebook, NOTEBOOKS[1].stem))
