"""Runs: rows name the one that measured them, which says where, when and with which code."""

import json
import re
import subprocess

import pytest
import torch

from labbook import evidence, runs
from labbook.code import notebook_of
from labbook.project import project
from labbook.rows import load_rows, run_counts, save_rows

SLUG = "mixed_precision_accumulation"
MACHINE = "testbox"
TABLE = "accumulation"
CODE = {"cs336_systems/training/selective.py": "abc", "cs336_systems/model.py": "def"}


pytestmark = pytest.mark.usefixtures("figures")


def save(name: str, run: runs.Run | None = None) -> str:
    """The run of a row that was saved."""
    run = run or runs.Run(SLUG, MACHINE)
    save_rows([{"accumulation": name, "total": 1.0}], SLUG, TABLE, MACHINE, run)
    rows = load_rows(SLUG, MACHINE, TABLE)
    return rows.loc[rows["accumulation"] == name, "run"].item()


def test_a_row_names_its_run_and_the_run_says_where_when_and_how(figures, monkeypatch):
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(figures))
    run = runs.Run(SLUG, MACHINE, {"steps": 3, "report": str(figures)}, lambda: CODE)
    assert save("a", run) == save("b", run) == run.name
    record = runs.load_run(MACHINE, run.name)
    assert (record.machine, record.slug, record.torch) == (MACHINE, SLUG, torch.__version__)
    assert (record.parameters, record.code) == ({"steps": 3}, CODE)
    assert record.settings["NCCL_NVLS_ENABLE"] == "0"
    first, last = record.measured_at
    assert first <= last
    assert str(figures) not in (figures / MACHINE / "runs" / f"{run.name}.json").read_text()


def test_a_run_is_on_disk_before_its_rows(monkeypatch):
    def fail(*_):
        raise KeyboardInterrupt

    run = runs.Run(SLUG, MACHINE, executed=lambda: CODE)
    monkeypatch.setattr("labbook.rows.write_atomically", fail)
    with pytest.raises(KeyboardInterrupt):
        save("a", run)
    assert runs.load_run(MACHINE, run.name).code == CODE


def test_a_run_without_rows_is_removed(figures):
    first = runs.Run(SLUG, MACHINE)
    second = runs.Run(SLUG, MACHINE)
    save("a", first)
    save("b", first)
    save("a", second)
    assert runs.load_run(MACHINE, first.name).torch, "b is of it"
    save("b", second)
    assert [path.stem for path in (figures / MACHINE / "runs").iterdir()] == [second.name]


def test_rows_are_not_repeated_when_todays_code_measured_them(monkeypatch):
    save("a", runs.Run(SLUG, MACHINE, executed=lambda: CODE))
    save("b", runs.Run(SLUG, MACHINE, executed=lambda: CODE | {"cs336_systems/model.py": "older"}))
    save("c", runs.Run(SLUG, MACHINE))
    rows = load_rows(SLUG, MACHINE, TABLE)

    def of_code(code):
        return evidence.rows_of(code, rows, MACHINE)["accumulation"].tolist()

    assert of_code(CODE) == of_code({"cs336_systems/model.py": "def"}) == ["a"]
    assert of_code({}) == []
    with monkeypatch.context() as patch:
        patch.setattr(evidence, "versions", lambda: {"triton": "99"})
        assert of_code(CODE) == []
    monkeypatch.setattr(evidence, "gpu_of", lambda _: "the same with more memory")
    assert of_code(CODE) == []


def test_a_damaged_run_is_said_in_a_sentence(figures):
    path = figures / MACHINE / "runs" / f"{save('a')}.json"
    for damage in ("{", "[]", json.dumps({"run": "a"})):
        path.write_text(damage)
        with pytest.raises(ValueError, match=f"{MACHINE}/runs/.* is damaged"):
            runs.load_run(MACHINE, path.stem)


def test_the_commit_is_marked_where_the_library_has_uncommitted_changes(tmp_path, monkeypatch):
    def git(*arguments):
        command = ("git", "-C", str(tmp_path), "-c", "user.name=a", "-c", "user.email=a@b")
        return subprocess.check_output(command + arguments, text=True).strip()

    def commit(folder=tmp_path):
        runs.git_commit.cache_clear()
        return runs.git_commit(folder)

    assert commit() == "unknown"
    git("init", "-q")
    git("commit", "-qm", "a", "--allow-empty")
    clean = git("rev-parse", "--short=10", "HEAD")
    assert commit() == clean
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "a.py").write_text("")
    assert commit() == clean + "+"
    monkeypatch.setenv("GIT_DIR", str(tmp_path / ".git"))
    assert commit(tmp_path / "lib") == "unknown", "of the repository around it"
    runs.git_commit.cache_clear()


# The committed rows.


def test_git_keeps_the_folders_that_are_committed():
    ignored = (project().root / ".gitignore").read_text(encoding="utf-8")
    kept = re.findall(r"^!figures/([^/\n]+)/$", ignored, re.MULTILINE)
    assert sorted(kept) == sorted(project().committed)


def test_committed_rows_have_runs_and_runs_have_rows():
    for folder in [project().figures / name for name in project().committed]:
        slugs = {path.parent.name for path in folder.glob("*/*.csv")}
        assert all(map(notebook_of, slugs))
        found = {name for slug in slugs for _, name in run_counts(slug, folder.name)}
        assert found == {path.stem for path in folder.glob("runs/*.json")}
        records = [runs.load_run(folder.name, name) for name in found]
        assert all(each.slug in each.run and each.machine == folder.name for each in records)
