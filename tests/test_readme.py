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


@pytest.mark.parametrize("path", re.findall(r"papermill (\S+)", TEXT))
def test_notebooks_exist(path):
    assert (REPOSITORY / path).exists()
