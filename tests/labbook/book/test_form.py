"""A tidy notebook passes every rule of form; each way of being out of form is found."""

import copy

import nbformat
import pytest
from nbformat import v4
from notebook_form import MEDIAN_LINES, MOST_IMPORTS, MOST_LINES, SECTIONS, problems

from labbook.book.tidy import CHECKER, HIDE_INPUT, tidy

NAME = "12_nsys_profile"
FIRST = """\
# 12 · nsys_profile

*Handout problem `nsys_profile`, Spring 2025 and Spring 2026.*

*Read before:* [11](11_benchmarking_script.ipynb). *Time:* 10 minutes to read, 30 to work.

**The question.** Where does the time of a step go?
"""


def code(source, count, *outputs, tags=()):
    metadata = {"tags": list(tags)} if tags else {}
    return v4.new_code_cell(source, execution_count=count, outputs=list(outputs), metadata=metadata)


def stream(text):
    return v4.new_output("stream", name="stdout", text=text)


@pytest.fixture
def good():
    cells = [v4.new_markdown_cell(FIRST), code("steps = 3  # measured steps", 1, tags=["parameters"])]
    for number, section in enumerate(SECTIONS, start=2):
        cells.append(v4.new_markdown_cell(f"## {section}\n\nWords."))
        tags = [HIDE_INPUT] if section == "Answer" else []
        cells.append(code(f"print({number})", number, stream(f"{number}\n"), tags=tags))
    return tidy(v4.new_notebook(cells=cells))


def test_a_good_notebook_has_no_problems_and_a_tidied_one_stays(good):
    nbformat.validate(good)
    assert problems(good, NAME) == []
    messy = copy.deepcopy(good)
    messy.metadata.papermill = {"duration": 1.5}
    messy.cells[1].metadata |= {"papermill": {"duration": 1}, "collapsed": True}
    messy.cells[3].outputs = [stream("2"), stream("\n")]
    before = copy.deepcopy(messy)
    assert tidy(messy) == tidy(good) == good
    assert messy == before
    folded = [cell.metadata.jupyter for cell in good.cells if HIDE_INPUT in cell.metadata.get("tags", [])]
    assert folded == [{"source_hidden": True}]


def set_cell(number, **values):
    return lambda notebook: notebook.cells[number].update(values)


def add_output(output):
    return lambda notebook: notebook.cells[3].outputs.append(output)


def source(text):
    return set_cell(3, source=text)


BROKEN = {
    "never executed": (set_cell(3, execution_count=None), "not executed"),
    "an error": (add_output(v4.new_output("error", ename="TypeError", evalue="", traceback=[])), "TypeError"),
    "another title": (set_cell(0, source=FIRST.replace("nsys_profile\n", "profiles\n")), "12 · profiles"),
    "no question": (set_cell(0, source=FIRST.replace("question", "answer")), "question"),
    "another problem": (set_cell(0, source=FIRST.replace("`nsys_profile`", "`profile`")), "`profile`"),
    "a section missing": (set_cell(2, source="Words."), "the sections are Build and check, Measure"),
    "no parameters": (set_cell(1, metadata={}), "parameters"),
    "a parameter without comment": (set_cell(1, source="steps = 3"), "steps has no comment"),
    "a computed parameter": (set_cell(1, source="steps = 2 + f(1)  # x"), "literal"),
    "a long cell": (source("x = 1\n" * (MOST_LINES + 1)), f"has {MOST_LINES + 1} lines"),
    "an empty cell": (source(""), "is empty"),
    "many imports": (source("import os\n" * (MOST_IMPORTS + 1)), f"{MOST_IMPORTS + 1} imports"),
    "an import of a module": (source("from labbook.plots import bars"), "labbook.plots"),
    "an import of a private name": (source("from cs336_systems.report import _x"), "_x"),
    "an answer's code": (set_cell(11, metadata={}), HIDE_INPUT),
    "a solution without a checker": (
        source("### BEGIN SOLUTION\nx = 1\n### END SOLUTION"),
        "without a checker",
    ),
    "a checker that is not content": (
        set_cell(3, metadata={"tags": [CHECKER]}, outputs=[stream("a step: not right\n")]),
        "not right",
    ),
    "something left to do": (set_cell(2, source="## Predict\n\nTODO"), "TODO is left"),
    "a path in a cell": (source("open('/home/ada/x')"), "/home/ada/x"),
    "a path in an output": (add_output(stream("/tmp/x.csv")), "/tmp/x.csv"),
    "an address": (add_output(stream("<f at 0x7f00aa11bb22>")), "0x7f00aa11bb22"),
    "an SVG": (add_output(v4.new_output("display_data", {"image/svg+xml": "<svg/>"})), "svg+xml"),
    "too much output": (add_output(stream("x" * 2**20)), "1,048,576"),
    "papermill's traces": (set_cell(3, metadata={"papermill": {}}), "cell 4 keeps metadata"),
    "a split stream": (add_output(stream("more")), "cell 4 keeps outputs"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_out_of_form_is_found(good, kind):
    break_it, said = BROKEN[kind]
    break_it(good)
    assert any(said in problem for problem in problems(good, NAME)), problems(good, NAME)


def test_the_median_cell_is_short_and_a_name_has_a_number(good):
    assert any("nsys is no name" in problem for problem in problems(good, "nsys"))
    for cell in good.cells[3::2]:
        cell.source = "x = 1\n" * (MEDIAN_LINES + 1)
    assert any("median" in problem for problem in problems(good, NAME))


def test_the_start_has_no_problem_of_its_own():
    parameters = code("reference = 'h200'  # whose rows", 1, tags=["parameters"])
    start = v4.new_notebook(cells=[v4.new_markdown_cell("# Start here"), parameters])
    assert problems(tidy(start), "00_start_here") == []
