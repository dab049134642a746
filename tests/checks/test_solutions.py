"""Steps' checkers accept right solutions written differently and refuse wrong ones.

tests/solutions/NN.py has them. Of each step `make test` tries the right ones, the first of them twice,
and one wrong one; `make solutions` tries all, each twice.
"""

import os
import re
import runpy
from functools import cache
from pathlib import Path

import nbformat
import pytest

pytest.importorskip("triton", reason="there is no triton for this platform")

from solutions import makes, written

from labbook.book.tidy import has_solution
from labbook.project import project

BANK = Path(__file__).parents[1] / "solutions"
TRY_ALL = bool(os.environ.get("CS336_ALL_SOLUTIONS"))


@cache
def bank(number: str) -> dict:
    """Of a notebook: RIGHT and WRONG, by the name that a step's cell defines."""
    return runpy.run_path(str(BANK / f"{number}.py"))


def changed(source: str, changes: list[tuple[str, str]]) -> str:
    for piece, instead in changes:
        assert source.count(piece) == 1, piece
        source = source.replace(piece, instead)
    return source


def candidates() -> list[tuple[str, str, str, str]]:
    """Notebook, step, what is said of the solution ("" of a right one), its source."""
    cases = []
    for path in sorted(BANK.glob("[0-9]*.py")):
        number = path.stem
        for name, sources in bank(number)["RIGHT"].items():
            cases += [(number, name, "", source) for source in sources]
            wrong = bank(number)["WRONG"][name]
            reasons = list(wrong) if TRY_ALL else list(wrong)[:1]
            cases += [
                (number, name, reason, changed(sources[0], wrong[reason])) for reason in reasons
            ]
    return cases


def test_every_step_has_right_and_wrong_solutions():
    for path in project().notebooks.glob("*.ipynb"):
        for cell in nbformat.read(path, as_version=4).cells:
            if has_solution(cell):
                assert bank(path.name[:2])["WRONG"].keys() & makes(cell.source), path


@pytest.mark.parametrize(("number", "name", "mistake", "source"), candidates())
def test_a_checker_tells_right_from_wrong(number, name, mistake, source):
    step = written(number, name)
    is_first = source == bank(number)["RIGHT"][name][0]
    for _ in range(2 if TRY_ALL or is_first else 1):
        printed = step.says(source)
        verdicts = re.findall(r": (right|not right|not yet)$", printed, re.MULTILINE)
        is_right = set(verdicts) == {"right"}
        assert is_right is not bool(mistake), printed
