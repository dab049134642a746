"""The links of the README and of the first notebook lead somewhere, and their commands exist."""

import re
from pathlib import Path

import nbformat
import pytest

from cs336_systems.__main__ import main

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = REPOSITORY / "notebooks"
CELLS = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4).cells
TEXTS = {
    REPOSITORY: (REPOSITORY / "README.md").read_text(encoding="utf-8"),
    NOTEBOOKS: "\n".join(cell.source for cell in CELLS if cell.cell_type == "markdown"),
}
TEXT = "\n".join(TEXTS.values())


@pytest.mark.parametrize(
    ("folder", "target"),
    [(folder, target) for folder, text in TEXTS.items() for target in re.findall(r"\]\(([^)#]+)\)", text)],
)
def test_links_lead_somewhere(folder, target):
    assert "://" in target or (folder / target).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z]+)\b", TEXT))))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("arguments", re.findall(r'make run ARGS="(.*?)"', TEXT))
def test_runs_can_be_planned(arguments):
    assert main(["run", "--dry-run", *arguments.split()]) == 0


def test_options_of_run_are_given_through_make():
    told = re.findall(r"`([^`]*)--(?:force|dry-run|only)\b", TEXTS[REPOSITORY])
    assert told
    assert all("ARGS=" in before for before in told), "make takes them for its own"


def test_lab_opens_where_notebooks_and_learners_copies_are():
    (folder,) = re.findall(r"--notebook-dir=(\S+)", (REPOSITORY / "Makefile").read_text())
    assert (REPOSITORY / folder).resolve() == REPOSITORY.resolve()


@pytest.mark.parametrize("path", re.findall(r"papermill (\S+)", TEXT))
def test_notebooks_exist(path):
    assert (REPOSITORY / path).exists()
