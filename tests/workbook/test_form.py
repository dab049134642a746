"""A tidy notebook passes every rule of form; each way of being out of form is found."""

import copy

import nbformat
import pytest
from nbformat import v4

from cs336_systems.workbook.form import MOST_LINES, SECTIONS, problems
from cs336_systems.workbook.tidy import METADATA, tidy

NAME = "11_benchmarking_script"


def code(source, count, *outputs, tags=()):
    metadata = {"tags": list(tags)} if tags else {}
    return v4.new_code_cell(source, execution_count=count, outputs=list(outputs), metadata=metadata)


def stream(text):
    return v4.new_output("stream", name="stdout", text=text)


@pytest.fixture
def good():
    cells = [
        v4.new_markdown_cell("# 11 · benchmarking_script\n\nHow long is a step?"),
        code("steps = 3  # measured steps", 1, tags=["parameters"]),
    ]
    for number, section in enumerate(SECTIONS, start=2):
        cells.append(v4.new_markdown_cell(f"## {section}\n\nWords."))
        cells.append(code(f"print({number})", number, stream(f"{number}\n")))
    return tidy(v4.new_notebook(cells=cells))


def test_a_good_notebook_has_no_problems(good):
    nbformat.validate(good)
    assert problems(good, NAME) == []


def test_tidy_is_idempotent_and_leaves_its_argument_alone(good):
    messy = copy.deepcopy(good)
    messy.metadata.papermill = {"duration": 1.5}
    before = copy.deepcopy(messy)
    assert tidy(messy) == good == tidy(tidy(messy))
    assert messy == before


def test_tidy_strips_what_changes_and_keeps_what_is_said(good):
    messy = copy.deepcopy(good)
    cell = messy.cells[1]
    cell.metadata |= {"papermill": {"duration": 1}, "execution": {"status": "idle"}, "collapsed": True}
    cell.outputs = [stream("a\n"), stream("b\n"), v4.new_output("display_data", {"text/plain": "x"})]
    cell.outputs[2].metadata = {"needs_background": "light"}
    cell.outputs.append(stream("c\n"))
    tidied = tidy(messy).cells[1]
    assert tidied.metadata == {"tags": ["parameters"]}
    assert [output.get("text") for output in tidied.outputs] == ["a\nb\n", None, "c\n"]
    assert tidied.outputs[1].metadata == {}
    assert tidy(messy).metadata == METADATA


def set_cell(number, **values):
    return lambda notebook: notebook.cells[number].update(values)


def add_output(output):
    return lambda notebook: notebook.cells[3].outputs.append(output)


BROKEN = {
    "never executed": (set_cell(3, execution_count=None), "not executed top to bottom"),
    "executed out of order": (set_cell(3, execution_count=9), "not executed top to bottom"),
    "an error": (
        add_output(v4.new_output("error", ename="ZeroDivisionError", evalue="", traceback=[])),
        "ended with ZeroDivisionError",
    ),
    "another title": (set_cell(0, source="# Benchmarks"), "the first line is '# Benchmarks'"),
    "a section missing": (set_cell(2, source="Words."), "the sections are Build and check, Measure"),
    "a section twice": (set_cell(4, source="## Predict"), "the sections are Predict, Predict"),
    "no parameters": (set_cell(1, metadata={}), "no cell is tagged"),
    "an empty parameters cell": (set_cell(1, source="# nothing"), "no cell is tagged"),
    "a parameter without comment": (set_cell(1, source="steps = 3"), "parameter steps has no comment"),
    "a computed parameter": (set_cell(1, source="steps = 2 + f(1)  # x"), "allowed: name = literal"),
    "a long cell": (set_cell(3, source="x = 1\n" * (MOST_LINES + 1)), f"has {MOST_LINES + 1} lines"),
    "an empty cell": (set_cell(3, source=""), "code cell 2 is empty"),
    "something left to do": (set_cell(2, source="## Predict\n\nTODO"), "TODO is left"),
    "a path in a cell": (set_cell(3, source="open('/home/ada/x')"), "absolute path in a cell"),
    "a path of Windows": (set_cell(3, source="open('C:\\\\x')"), "absolute path in a cell"),
    "a path in an output": (add_output(stream("/tmp/x.csv")), "absolute path '/tmp/x.csv'"),
    "an address": (add_output(stream("<f at 0x7f00aa11bb22>")), "memory address"),
    "an SVG": (add_output(v4.new_output("display_data", {"image/svg+xml": "<svg/>"})), "svg+xml; allowed"),
    "an SVG in HTML": (add_output(v4.new_output("display_data", {"text/html": "<svg/>"})), "an SVG picture"),
    "too much output": (add_output(stream("x" * 2**20)), "bytes; allowed: 1,048,576"),
    "papermill's traces": (
        lambda notebook: notebook.cells[3].metadata.update(papermill={}),
        "cell 4 keeps metadata that changes",
    ),
    "another kernel": (
        lambda notebook: notebook.metadata.update(kernelspec={"name": "my-env"}),
        "metadata is",
    ),
    "a split stream": (add_output(stream("more")), "cell 4 keeps outputs"),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_what_is_out_of_form_is_found(good, kind):
    break_it, said = BROKEN[kind]
    break_it(good)
    assert any(said in problem for problem in problems(good, NAME)), problems(good, NAME)


def test_the_median_cell_is_short(good):
    for cell in good.cells[3::2]:
        cell.source = "x = 1\n" * 9
    assert "the median code cell has 9 lines; allowed: 8" in problems(good, NAME)


def test_the_name_is_one_of_the_workbook(good):
    assert "11_benchmark is no notebook of the workbook" in problems(good, "11_benchmark")[0]


def test_the_start_has_no_problem_of_its_own(good):
    parameters = code("reference = 'h200'  # whose rows", 1, tags=["parameters"])
    start = v4.new_notebook(cells=[v4.new_markdown_cell("# Start here"), parameters])
    assert problems(tidy(start), "00_start_here") == []
