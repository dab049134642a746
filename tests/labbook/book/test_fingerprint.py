"""What is measured again: what the measuring part of a notebook, or of the library behind it, changed."""

import os
import shutil
import subprocess
import sys

import nbformat
import pytest

from labbook import fingerprint as module
from labbook.fingerprint import fingerprint

MEASURE = """\
from cs336_systems.bench import sweep_attention
from cs336_systems.report import lines, show
x = steps
"""


@pytest.fixture
def digest(tmp_path, write_notebook):
    def digest(*code, **parameters):
        path = write_notebook(tmp_path / "11_one.ipynb", *(code or (MEASURE,)))
        return fingerprint(nbformat.read(path, as_version=4), parameters)

    return digest


@pytest.fixture
def library(tmp_path, monkeypatch):
    """A copy of the library to change."""
    copy = tmp_path / "cs336_systems"
    shutil.copytree(module.PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    monkeypatch.setattr(module, "PACKAGE", copy)
    return copy


def test_the_notebooks_measuring_code_parameters_and_torch_count(digest, monkeypatch):
    before = digest()
    assert digest() == before
    assert digest(MEASURE.replace("x = steps", "x = 2 * steps")) != before
    assert digest(steps=1) != before
    monkeypatch.setattr("importlib.metadata.version", lambda package: "99")
    assert digest() != before


def test_results_comments_and_the_reports_imports_do_not(digest):
    before = digest(MEASURE, "## Results", "show(x)")
    assert digest(MEASURE, "## Results", "show(x, 'Another caption')") == before
    assert digest(MEASURE.replace("x = steps", "x = steps  # a comment"), "## Results") == before
    assert digest(MEASURE.replace("lines, show", "bars, show"), "## Results") == before


LOCALE = """\
from nbformat.v4 import new_code_cell, new_notebook
from labbook.fingerprint import fingerprint
fingerprint(new_notebook(cells=[new_code_cell("checks = parallel = 1")]), {})
"""


def test_the_locale_does_not_count():
    ascii_only = {"LC_ALL": "C", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}
    subprocess.run([sys.executable, "-c", LOCALE], check=True, env=os.environ | ascii_only)


OTHERS = ("bench/ddp_bench", "parallel/ddp")
MEASURING = ("__init__", "bench/attention_bench", "attention/triton_forward")


@pytest.mark.parametrize("file", [*OTHERS, *MEASURING])
def test_what_measures_is_measured_again_when_its_code_changes_and_not_its_words(digest, library, file):
    before = digest()
    with (library / f"{file}.py").open("a") as changed:
        changed.write("\n# a comment\n")
    assert digest() == before
    with (library / f"{file}.py").open("a") as changed:
        changed.write("\n\ndef something_new():\n    return 1\n")
    assert (digest() != before) == (file in MEASURING)
