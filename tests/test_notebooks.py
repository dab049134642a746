"""Every committed notebook is in form; the rules, and that each can fail: notebook/test_tidy_and_form.py."""

from pathlib import Path

import nbformat
import pytest

from cs336_systems.notebook.form import problems

NOTEBOOKS = sorted((Path(__file__).parents[1] / "notebooks").glob("*.ipynb"))


def test_there_are_notebooks():
    assert NOTEBOOKS


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_form(path):
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    assert problems(notebook, path.stem) == []
