"""The project that labbook serves: this one, another course from a copy elsewhere, or none."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import labbook
from labbook import project

COURSE = {
    "notebooks/book.yaml": "measured: [lessons]",
    "notebooks/parameters.yaml": "{}",
    "notebooks/tables.yaml": "tables: {times: {keys: 'size:int', values: '"
    "mean_ms std_ms p20_ms p50_ms p80_ms steps:int'}}",
    "lessons/__init__.py": "",
    "lessons/sums.py": "def total(size):\n    return sum(range(size))",
}
CELL = """\
from lessons.sums import total
page.measure("times", grid(size=[1, 2]), lambda case: {"": Step(lambda: total(case.size))}, steps=2)
"""
PROGRAM = f"""
from labbook import Page, Step, grid, machine, runs, show, value_label
machine._matmul_tflops = lambda device: {{"float32": 0.1}}
machine._copy_gbps = lambda device: 1.0
page = Page("sums", {{"In": ["", {CELL!r}], "device": "cpu"}})
{CELL}
show(page.rows("times"))
(run,) = page.rows("times")["run"].unique()
print(sorted(runs.load_run(page.card.slug, run).code)[:2])
print(len(page.rows("times")), page.reference == page.card.slug, value_label("sdpa"))
"""


def test_a_copy_of_labbook_serves_another_course(tmp_path, write_notebook):
    shutil.copytree(Path(labbook.__file__).parent, tmp_path / "installed" / "labbook")
    for name, text in COURSE.items():
        (tmp_path / "course" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "course" / name).write_text(text)
    write_notebook(tmp_path / "course" / "notebooks" / "01_sums.ipynb", parameters="n = 1")
    env = {name: value for name, value in os.environ.items() if not name.startswith("LABBOOK")}
    env["PYTHONPATH"] = str(tmp_path / "installed")
    options = {"env": env, "cwd": tmp_path / "course", "capture_output": True, "text": True}
    process = subprocess.run([sys.executable, "-c", PROGRAM], **options)
    assert process.returncode == 0, process.stderr
    assert process.stdout.splitlines()[-2:] == [
        "['labbook.timing', 'lessons/sums.py']",
        "2 True sdpa",
    ]
    assert [path.name for path in (tmp_path / "course" / "figures").glob("*/sums/*")] == [
        "times.csv"
    ]


def test_a_project_is_that_of_configure_or_around_the_working_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("LABBOOK_PROJECT", "")
    here = project.project().root
    assert here == Path(__file__).parents[2], "of the checkout, wherever tests run"
    inner = tmp_path / "notebooks" / "more"
    inner.mkdir(parents=True)
    (tmp_path / "notebooks" / "book.yaml").write_text("reference: box")
    monkeypatch.chdir(inner)
    assert project._nearest.__wrapped__() == tmp_path
    labbook.configure(tmp_path)
    assert project.project() == project.Project(tmp_path, "box")
    monkeypatch.setenv("LABBOOK_PROJECT", "")
    assert project.project().root == here, "found once in a process"


def test_without_a_project_it_is_said_which_file_is_missing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(project, "__file__", str(tmp_path / "a" / "b" / "c.py"))
    with pytest.raises(ValueError, match=f"book.yaml cannot be read: .*{tmp_path}"):
        project._declared(project._nearest.__wrapped__())
