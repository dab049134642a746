"""Parameters cells are read as papermill reads them, and wrong values are found before anything runs."""

import nbformat
import pytest
from nbformat import v4

from labbook.book import batch
from labbook.book.parameters import parameter_errors, parse_value, read_parameters

NOTEBOOKS = batch.load_notebooks()


@pytest.fixture
def known(tmp_path, write_notebook):
    return read_parameters(nbformat.read(write_notebook(tmp_path / "01_a.ipynb"), as_version=4))


def cell_with(source: str, cells: int = 1):
    tagged = {"tags": ["parameters"]}
    return v4.new_notebook(cells=[v4.new_code_cell(source, metadata=tagged) for _ in range(cells)])


def test_names_defaults_and_comments(known):
    assert list(known) == ["model_size", "edition", "context_lengths", "dtypes", "steps", "rate", "device"]
    assert known["context_lengths"].default == [32, 64]
    assert known["model_size"].comment == "size of the model"
    assert read_parameters(v4.new_notebook()) == {}


@pytest.mark.parametrize(
    "source",
    ["a = f(1)", "import os", "a, b = 1, 2", "print(1)", "a = [1, x]", "a = 1  # = 2", "a = b = 1"],
)
def test_anything_but_literals_is_refused(source):
    with pytest.raises(ValueError, match="parameters cell"):
        read_parameters(cell_with(source))
    with pytest.raises(ValueError, match="2 code cells"):
        read_parameters(cell_with("a = 1  # a", cells=2))


@pytest.mark.parametrize(
    ("values", "given", "allowed"),
    [
        ({"modle_size": "tiny"}, "modle_size", "model_size, edition, "),
        ({"model_size": "huge"}, "huge", "tiny, small, medium, large, xl, 2.7B"),
        ({"model_size": "10B"}, "10B", "xl, 2.7B"),
        ({"edition": 2024}, "2024", "2025, 2026"),
        ({"edition": "2025"}, "'2025'", "a whole number"),
        ({"edition": True}, "True", "a whole number"),
        ({"edition": 2026, "model_size": "2.7B"}, "2.7B", "10B"),
        ({"context_lengths": 128}, "128", "a list"),
        ({"context_lengths": [128, "256"]}, "256", "a list"),
        ({"context_lengths": []}, "[]", "a list"),
        ({"context_lengths": [0]}, "0", "1 or more"),
        ({"context_lengths": [64, 32, 64]}, "64 twice", "once"),
        ({"steps": 0}, "0", "1 or more"),
        ({"steps": 2.5}, "2.5", "a whole number"),
        ({"dtypes": ["float32", "fp8"]}, "fp8", "float32, tf32, bfloat16, float16"),
        ({"device": "tpu"}, "tpu", "auto, cpu, cuda"),
        ({"rate": "fast"}, "fast", "a number"),
        ({"rate": -0.5}, "-0.5", "0 or more"),
        ({"rate": float("nan")}, "nan", "0 or more"),
        ({"rate": None}, "None", "a number"),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(known, values, given, allowed):
    (error,) = parameter_errors(known, values)
    assert given in error
    assert allowed in error
    assert "\n" not in error


def test_words_of_a_notebook_alone_are_those_of_its_default_and_of_its_comment():
    known = read_parameters(cell_with("parts = ['grid', 'every 1']  # what is measured; also: tiles, models"))
    assert parameter_errors(known, {"parts": ["tiles", "models", "grid", "every 16"]}) == []
    (error,) = parameter_errors(known, {"parts": ["every 0"]})
    assert "'every 0'" in error
    assert "grid, every N, tiles, models" in error


def test_a_comment_tells_the_least():
    known = read_parameters(cell_with("mesh_x = 16  # devices, 2 or more\nhop_us = 1.0  # of a hop, above 0"))
    assert parameter_errors(known, {"mesh_x": 2, "hop_us": 0.1}) == []
    assert parameter_errors(known, {"mesh_x": 1}) == ["mesh_x has 1; allowed: 2 or more"]
    assert parameter_errors(known, {"hop_us": 0.0}) == ["hop_us has 0.0; allowed: above 0"]


@pytest.mark.parametrize(
    ("notebook", "given"),
    [
        ("51_communication_accounting", {"mesh_x": 0}),
        ("51_communication_accounting", {"gpu_memory_gb": 0.0}),
        ("52_alternate_ring_all_reduce", {"simulated_devices": [1, 4]}),
        ("53_data_parallel_calcs", {"hop_us": 0.0}),
        ("53_data_parallel_calcs", {"layers": 0}),
        ("55_tp_calcs", {"world_sizes": [2, 3]}),
        ("56_fsdp_tp_calcs", {"layers": 3}),
        ("56_fsdp_tp_calcs", {"num_devices": 1000}),
    ],
)
def test_what_a_calculation_cannot_do_is_refused(notebook, given):
    (error,) = parameter_errors(NOTEBOOKS[notebook], given)
    assert "allowed: " in error


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_a_wrong_word_is_refused_in_every_notebook(notebook):
    for name, parameter in (known := NOTEBOOKS[notebook]).items():
        listed = isinstance(parameter.default, list)
        if isinstance(parameter.default[0] if listed else parameter.default, str):
            wrong = ["no such word"] if listed else "no such word"
            (error,) = parameter_errors(known, {name: wrong}, notebook.partition("_")[2])
            assert "'no such word'; allowed: " in error


def test_right_values_and_defaults_are_never_refused(known):
    for values in ({"model_size": "10B", "edition": 2026}, {"steps": 1, "device": "cuda"}, {"rate": 2}):
        assert parameter_errors(known, values) == []
    for notebook, known in NOTEBOOKS.items():
        defaults = {name: parameter.default for name, parameter in known.items()}
        assert parameter_errors(known, defaults, notebook.partition("_")[2]) == []


def test_text_stays_text_and_the_rest_is_yaml(known):
    assert parse_value(known["model_size"], "10") == "10"
    assert parse_value(known["context_lengths"], "[128, 256]") == [128, 256]
    assert parse_value(known["steps"], "7") == 7
    assert parse_value(known["rate"], "1e-3") == 0.001, "which YAML takes for text"
    with pytest.raises(ValueError, match="context_lengths"):
        parse_value(known["context_lengths"], "[128")
