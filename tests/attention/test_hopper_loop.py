"""Notebook 27 shows the loop of the Hopper forward line by line: today's loop."""

import inspect

import nbformat
import pytest

pytest.importorskip("triton")

from cs336_systems.attention.hopper_forward import attend
from labbook.book.notebooks import NOTEBOOKS


def test_every_line_that_27_explains_is_in_the_loop_in_this_order():
    (path,) = NOTEBOOKS.glob("27_*.ipynb")
    cells = [cell.source for cell in nbformat.read(path, as_version=4).cells]
    (table,) = (source.split('"""')[1] for source in cells if source.startswith("BESIDE"))
    loop = inspect.getsource(attend.fn).partition("for _ in range(1, tiles):")[2]
    places = [loop.find(line) for line in table.strip().splitlines() if not line.startswith(" ")]
    assert len(places) > 10
    assert places[0] > 0
    assert places == sorted(places)
