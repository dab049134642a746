"""A release: which rows are old is known without git, words make none old, and pages say what has changed."""

import pytest

from labbook import code
from labbook.book.commands import main
from labbook.machine import now
from labbook.project import project
from labbook.release import provenance
from labbook.rows import save_rows
from labbook.runs import Run

COURSE = {
    "notebooks/book.yaml": "{reference: box, committed: [box], measured: [lessons]}",
    "notebooks/parameters.yaml": "{}",
    "notebooks/tables.yaml": "tables: {totals: {keys: 'size:int', values: 'total:int'}}",
    "lessons/__init__.py": "",
    "lessons/sums.py": "def total(size):\n    return sum(range(size))\n",
    "lessons/shows.py": "def show(rows):\n    return rows\n",
}
CELL = "from lessons.sums import total\npage.save([{'size': 1, 'total': total(1)}], 'totals')"
OTHER = "from lessons.shows import show\npage.save(show([]), 'totals_too')"
FRESH = "all committed rows are of today's code\n"


@pytest.fixture
def course(tmp_path, monkeypatch, write_notebook):
    """A project without git, with a row of today's code on the machine `box`."""
    monkeypatch.setenv("LABBOOK_PROJECT", str(tmp_path))
    monkeypatch.setenv("LABBOOK_FIGURES", str(tmp_path / "figures"))
    monkeypatch.syspath_prepend(tmp_path)
    for name, text in COURSE.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(text)
    write_notebook(tmp_path / "notebooks" / "01_sums.ipynb", CELL, OTHER, parameters="n = 1")
    forget()
    save(1)
    yield tmp_path
    forget()


def forget():
    """What this process has read of modules, as a new one would."""
    for known in (code._folder, code._path, code._module):
        known.cache_clear()


def save(size, commit="1a2b3c4d5e"):
    """Save a row of today's code, measured at a commit."""
    run = Run("sums", "box", executed=lambda: code.of_notebook(code.notebook_of("sums")))
    run.record.commit = commit
    save_rows([{"size": size, "total": 0}], "sums", "totals", "box", run)


def edit(name, old, new):
    path = project().root / name
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new))
    forget()


def check(capsys):
    """The exit code of release-check, and what it prints."""
    capsys.readouterr()
    return main(["release-check"]), capsys.readouterr().out


def test_rows_are_old_where_measured_code_has_changed_and_not_where_words_have(course, capsys):
    assert check(capsys) == (0, FRESH)
    edit("lessons/sums.py", "def total", "# A comment.\ndef total")
    edit("lessons/shows.py", "return rows", "return list(rows)")
    edit("notebooks/01_sums.ipynb", "show([])", "show([1])")
    assert check(capsys) == (0, FRESH)
    edit("lessons/sums.py", "range(size)", "range(size + 1)")
    assert check(capsys) == (1, "01_sums: totals of box, 1 rows; changed since: sums.py\n")
    assert main(["release", "v2.0"]) == 1
    assert not (course / "RELEASE").exists()


def test_rows_without_code_on_record_are_old(course, capsys):
    (path,) = course.glob("figures/box/runs/*.json")
    path.unlink()
    assert check(capsys)[0] == 1


def test_pages_say_what_has_changed_since_the_release(course, capsys):
    assert provenance("sums", ["another"]) == ("", [])
    assert provenance("sums", ["box"])[0] == "measured on box; no measured files have changed since"
    save(2, "another")
    save(3)
    assert main(["release", "v1.0"]) == 0
    begin = f"measured at v1.0 (1a2b3c4d5e, {now()[:10]}, box); "
    assert provenance("sums", ["box"]) == (f"{begin}no measured files have changed since", [])
    edit("lessons/sums.py", "range(size)", "range(size + 1)")
    assert provenance("sums", ["box"]) == (f"{begin}1 measured file has changed since", ["sums.py"])
    save(3)
    assert provenance("sums", ["box"])[0].startswith("measured on box"), "no longer all of it"


def test_a_release_names_each_measured_file_by_its_hash(course):
    assert main(["release", "v1.0", "5c0b28ae"]) == 0
    first, *lines = (course / "RELEASE").read_text().splitlines()
    assert first == f"v1.0 5c0b28ae, {now()[:10]}"
    hashes = code.of_table(code.notebook_of("sums"), "totals")
    assert {"lessons/sums.py", "labbook.timing"} < set(hashes)
    assert sorted(lines) == sorted(f"{digest} {name}" for name, digest in hashes.items())
