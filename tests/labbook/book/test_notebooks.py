"""Parameters cells are read as papermill reads them, and wrong values are found before anything runs."""

import nbformat
import pytest
from nbformat import v4

from labbook.book import notebooks
from labbook.book.notebooks import BatchError, convert, parameter_errors, read_parameters

NOTEBOOKS = notebooks.load_notebooks()


@pytest.fixture
def known(tmp_path, write_notebook):
    return read_parameters(nbformat.read(write_notebook(tmp_path / "01_a.ipynb"), as_version=4))


def name_of(number: str) -> str:
    return next(name for name in NOTEBOOKS if name.startswith(number))


def errors_of(notebook: str, *given: str) -> list[str]:
    """Of "name=text"s for a notebook, by its number."""
    name = name_of(notebook)
    known = NOTEBOOKS[name]
    pairs = [each.partition("=") for each in given]
    values = {key: convert(known[key].default, text) for key, _, text in pairs}
    return parameter_errors(known, values, name[3:])


def test_anything_but_literals_is_refused():
    cell = v4.new_code_cell("a = [1, x]", metadata={"tags": ["parameters"]})
    with pytest.raises(ValueError, match="malformed"):
        read_parameters(v4.new_notebook(cells=[cell]))


@pytest.mark.parametrize(
    ("values", "given", "allowed"),
    [
        ({"modle_size": "tiny"}, "modle_size", "model_size, edition, context_lengths, "),
        ({"edition": 2024}, "2024", "2025, 2026"),
        ({"edition": True}, "True", "int"),
        ({"edition": 2026, "model_size": "2.7B"}, "2.7B", "10B"),
        ({"context_lengths": [128, "256"]}, "256", "a list"),
        ({"context_lengths": []}, "an empty list", "one item or more"),
        ({"context_lengths": [64, 32, 64]}, "twice", "once"),
    ],
)
def test_wrong_values_are_named_with_what_is_allowed(known, values, given, allowed):
    (error,) = parameter_errors(known, values)
    assert given in error.partition("allowed: ")[0]
    assert allowed in error.partition("allowed: ")[2]
    assert "\n" not in error


@pytest.mark.parametrize(
    ("notebook", "text", "meant"),
    [
        ("13", "count=01000", 1000),
        ("13", "value=1e-3", 0.001),
        ("21", "context_lengths=[064, 128]", [64, 128]),
        ("31", "message_mb=[1e-1, 1e+1]", [0.1, 10.0]),
        ("12", "traces=False", False),
        ("11", "model_size=10", "10"),
    ],
)
def test_text_means_what_a_person_means(notebook, text, meant):
    name, _, text = text.partition("=")
    value = convert(NOTEBOOKS[name_of(notebook)][name].default, text)
    assert (value, type(value)) == (meant, type(meant))


WRONG = """
13 count=0|13 count=1e3|13 count=0x10|13 count=|13 count=~|13 value=0|13 value=-1|13 value=inf|13 value=.nan
13 value=11|12 traces=2|12 steps=[3]|21 context_lengths=[1:30]|21 context_lengths=[-1]|21 batch_size=0
21 context_lengths=[[64]]|21 context_lengths=[2001-01-01]|21 context_lengths={a: 1}|24 d_head=300
16 strategies=[every 0]|26 query_tiles=[48]|27 repeat_ms=inf|31 message_mb=[.inf]
31 message_mb=[-1]|31 limit_s=0|32 batch_size=3|33 bucket_sizes_mb=[0]|33 bucket_sizes_mb=[inf]
33 batch_size=3|33 world_sizes=[3]|41 world_size=1|42 world_size=3|51 gpu_memory_gb=inf|51 side=0
52 hop_us=inf|52 tensor_mb=0|53 world_sizes=[3]|54 d_ff=0|55 world_sizes=[2, 3]
56 num_devices=1000|61 batch_size=1|61 world_size=0|33 world_sizes=[0]|11 batch_size=10000000000000000
""".replace("\n", "|").strip("|")


@pytest.mark.parametrize("given", WRONG.split("|"))
def test_what_a_notebook_cannot_run_with_is_refused(given):
    (error,) = errors_of(*given.split(" ", 1))
    assert given.split(" ")[1].partition("=")[0] in error
    assert "; allowed: " in error


def test_a_family_of_words_or_numbers_is_taken():
    assert not errors_of("16", "strategies=[every 5, every 12]")
    assert not errors_of("56", "num_devices=2048")


@pytest.mark.parametrize("notebook", NOTEBOOKS)
def test_every_parameter_has_a_rule_which_its_default_follows(notebook):
    known = NOTEBOOKS[notebook]
    rules = notebooks.rules_of(notebook[3:])
    for name, parameter in known.items():
        first = parameter.default[0] if isinstance(parameter.default, list) else parameter.default
        if isinstance(first, str) and "text" not in rules[name]:
            wrong = ["no such word"] if isinstance(parameter.default, list) else "no such word"
            (error,) = parameter_errors(known, {name: wrong}, notebook[3:])
            assert "'no such word'; allowed: " in error
        elif not isinstance(first, bool):
            assert rules[name].keys() & {"words", "most", "text"}, name
    defaults = {name: parameter.default for name, parameter in known.items()}
    assert parameter_errors(known, defaults, notebook[3:]) == []


def test_a_notebook_refuses_what_papermill_lets_through():
    notebooks.check_parameters("mixed_precision_accumulation", {"count": 5, "np": object()})
    with pytest.raises(BatchError, match=r"value is '1'(.|\n)*count is 5.5"):
        notebooks.check_parameters("mixed_precision_accumulation", {"count": 5.5, "value": "1"})
