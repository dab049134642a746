"""Parameters cells are read with ast alone, and wrong values are found before anything runs."""

import nbformat
import pytest
from hypothesis import given
from hypothesis import strategies as st
from nbformat import v4

from cs336_systems.workbook.parameters import (
    describe,
    parameter_errors,
    parse_value,
    read_parameters,
)


@pytest.fixture
def known(tmp_path, write_notebook):
    return read_parameters(nbformat.read(write_notebook(tmp_path / "01_a.ipynb"), as_version=4))


def notebook_with(source: str, cells: int = 1):
    tagged = {"tags": ["parameters"]}
    return v4.new_notebook(cells=[v4.new_code_cell(source, metadata=tagged) for _ in range(cells)])


def test_names_defaults_and_comments(known):
    assert list(known) == ["model_size", "edition", "context_lengths", "dtypes", "steps", "rate", "device"]
    assert known["context_lengths"].default == [32, 64]
    assert known["context_lengths"].comment == "lengths of the sequences"
    assert known["model_size"].comment == "size of the model"
    assert known["edition"].comment == "edition of the assignment", "not the comment of the line above"


def test_a_comment_on_the_line_above_belongs_to_the_code_on_its_own_line():
    parameters = read_parameters(notebook_with("a = 1  # of a\nb = 2"))
    assert (parameters["a"].comment, parameters["b"].comment) == ("of a", "")


def test_a_comment_may_stand_inside_a_list():
    source = "a = [\n    1,  # first\n    2,\n]"
    assert read_parameters(notebook_with(source))["a"].comment == "first"


def test_no_cell_means_no_parameters():
    assert read_parameters(v4.new_notebook()) == {}


@pytest.mark.parametrize("source", ["a = f(1)", "import os", "a, b = 1, 2", "print(1)", "a = [1, x]", "a ="])
def test_anything_but_literals_is_refused(source):
    with pytest.raises(ValueError, match="parameters cell"):
        read_parameters(notebook_with(source))


def test_two_cells_are_refused():
    with pytest.raises(ValueError, match="2 code cells"):
        read_parameters(notebook_with("a = 1  # a", cells=2))


@pytest.mark.parametrize(
    "values",
    [
        {"model_size": "2.7B"},
        {"model_size": "10B", "edition": 2026},
        {"context_lengths": [1], "dtypes": ["tf32", "bfloat16"], "steps": 1, "device": "cuda"},
        {"rate": 1},
    ],
)
def test_good_values(known, values):
    assert parameter_errors(known, values) == []


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"modle_size": "tiny"}, "unknown parameter 'modle_size'; allowed: model_size, edition,"),
        ({"model_size": "huge"}, "allowed: tiny, small, medium, large, xl, 2.7B"),
        ({"model_size": "10B"}, "'10B' belongs to edition 2026"),
        ({"edition": 2024}, "edition has 2024; allowed: 2025, 2026"),
        ({"edition": "2025"}, "edition is '2025'; allowed: a whole number"),
        ({"edition": True}, "edition is True; allowed: a whole number"),
        ({"context_lengths": 128}, "context_lengths is 128; allowed: a list, each item a whole number"),
        ({"context_lengths": [128, "256"]}, "allowed: a list, each item a whole number"),
        ({"context_lengths": []}, "context_lengths is []; allowed: a list"),
        ({"context_lengths": [0]}, "context_lengths has 0; allowed: 1 or more"),
        ({"steps": 0}, "steps has 0; allowed: 1 or more"),
        ({"steps": 2.5}, "steps is 2.5; allowed: a whole number"),
        ({"dtypes": ["float32", "fp8"]}, "dtypes has 'fp8'; allowed: float32, tf32, bfloat16, float16"),
        ({"device": "tpu"}, "device has 'tpu'; allowed: auto, cpu, cuda"),
        ({"rate": "fast"}, "rate is 'fast'; allowed: a number, like 0.5"),
        ({"rate": None}, "rate is None; allowed: a number"),
    ],
)
def test_wrong_values_say_what_is_allowed(known, values, said):
    (error,) = parameter_errors(known, values)
    assert said in error


def test_a_size_is_checked_against_the_edition_it_will_run_with():
    known = read_parameters(notebook_with("model_size = '2.7B'  # size\nedition = 2025  # edition"))
    (error,) = parameter_errors(known, {"edition": 2026})
    assert "'2.7B' belongs to edition 2025" in error


def test_passes_have_their_vocabulary():
    known = read_parameters(notebook_with("passes = ['forward']  # what a step does"))
    assert parameter_errors(known, {"passes": ["train_step"]}) == []
    assert (
        "allowed: forward, backward, forward_backward, train_step"
        in parameter_errors(known, {"passes": ["sideways"]})[0]
    )


def test_a_number_in_a_word_may_be_any_but_none():
    known = read_parameters(notebook_with("strategies = ['none']  # of blocks"))
    assert parameter_errors(known, {"strategies": ["every 3", "every 16"]}) == []
    (error,) = parameter_errors(known, {"strategies": ["every 0"]})
    assert "strategies has 'every 0'; allowed: none, every N" in error


def test_a_reference_must_have_a_card():
    known = read_parameters(notebook_with("reference = 'h200'  # machine"))
    assert parameter_errors(known, {"reference": "h200"}) == []
    (error,) = parameter_errors(known, {"reference": "h300"})
    assert error.startswith("reference has 'h300'; allowed: ")
    assert "h200" in error


def test_text_is_read_by_the_type_of_the_default(known):
    assert parse_value(known["model_size"], "10B") == "10B"
    assert parse_value(known["model_size"], "1") == "1"
    assert parse_value(known["context_lengths"], "[128, 256]") == [128, 256]
    assert parse_value(known["steps"], "7") == 7
    with pytest.raises(ValueError, match="allowed: a list"):
        parse_value(known["context_lengths"], "[128")


literals = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False)
literals |= st.text() | st.lists(st.integers()) | st.lists(st.text())


@given(default=literals)
def test_every_literal_survives_the_cell_and_fits_its_own_default(default):
    parameter = read_parameters(notebook_with(f"thing = {default!r}  # a thing"))["thing"]
    assert parameter.default == default
    assert describe(default)
    if default != []:
        assert not [e for e in parameter_errors({"thing": parameter}, {"thing": default}) if " is " in e]
