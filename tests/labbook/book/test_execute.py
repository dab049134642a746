"""One notebook in a process of its own: how it can end, that nothing stays; some with other parameters."""

import sys

import nbformat
import pytest

from labbook.book.batch import execute
from labbook.files import NOTEBOOKS


def test_parameters_folder_and_interpreter(tmp_path, write_notebook, monkeypatch):
    kernel = tmp_path / "kernels" / "python3" / "kernel.json"  # the user's, not to be chosen
    kernel.parent.mkdir(parents=True)
    kernel.write_text('{"argv": ["false"], "display_name": "mine", "language": "python"}')
    monkeypatch.setenv("JUPYTER_PATH", str(tmp_path))
    code = "import os, sys\nprint(steps, os.getcwd(), sys.executable)"
    (tmp_path / "there").mkdir()
    source = write_notebook(tmp_path / "there" / "01_a.ipynb", code)
    outcome = execute(source, tmp_path / "out.ipynb", {"steps": 7})
    assert (outcome.status, outcome.reason) == ("ok", "")
    printed = nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-1].outputs[0].text
    assert printed == f"7 {source.parent} {sys.executable}\n"
    assert list(tmp_path.glob(".*")) == []


def test_an_error_is_one_line_and_the_notebook_is_kept(tmp_path, write_notebook):
    source = write_notebook(tmp_path / "01_a.ipynb", "print('before')", "raise ValueError('two\\nlines')")
    outcome = execute(source, tmp_path / "out.ipynb", {})
    assert (outcome.status, outcome.reason) == ("error", "cell [3]: ValueError: two lines")
    assert "before" in (tmp_path / "out.ipynb").read_text()


def test_what_dies_or_is_no_notebook_is_an_error(tmp_path, write_notebook):
    kernel = "import os; os.kill(os.getpid(), 9)"
    parent = "import os, time; os.kill(os.getppid(), 9); time.sleep(9)"
    for code, said in (
        (kernel, "died"),
        (parent, "killed by SIGKILL, perhaps out of memory"),
        ("", "Error: "),
    ):
        source = write_notebook(tmp_path / "01_a.ipynb", code)
        if not code:
            source.write_text("{")
        outcome = execute(source, tmp_path / "out.ipynb", {})
        assert (outcome.status, said in outcome.reason) == ("error", True)


OTHERS = [
    ("13", {"value": 0.02, "count": 500}),
    ("22", {"parts": ["model"], "implementations": ["eager"], "dtypes": ["float32"]}),
    ("12", {"passes": ["forward"], "context_lengths": [32], "traces": False}),
]


@pytest.mark.parametrize(("number", "parameters"), OTHERS)
def test_notebooks_run_with_other_parameters(tmp_path, monkeypatch, number, parameters):
    monkeypatch.setenv("LABBOOK_FIGURES", str(tmp_path))
    (path,) = NOTEBOOKS.glob(f"{number}_*.ipynb")
    outcome = execute(path, tmp_path / "out.ipynb", parameters)
    assert outcome.status == "ok", outcome.reason
    if number == "13":  # the picture of the handout's sum is left alone
        assert [path.parts[-3] != "h200" for path in tmp_path.glob("*/*/error.png")] == [True]
