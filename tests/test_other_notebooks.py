"""What a notebook takes from another one."""

import math

import nbformat

from cs336_systems.other_notebooks import taken_from


def test_what_is_taken_from_another_notebook_runs_nothing_of_it(tmp_path, monkeypatch):
    cells = [
        "import math\npi = math.pi\nsize = load().size\nshow()",
        "def twice(x):\n    return 2 * pi * half(x)",
        "def half(x):\n    return x / 2",
    ]
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
    nbformat.write(notebook, tmp_path / "30_mine.ipynb")
    monkeypatch.chdir(tmp_path)
    assert taken_from("30_mine", "twice")(1) == math.pi
