"""The README's links lead somewhere and its commands exist."""

import re
from pathlib import Path

import pytest

from cs336_systems.__main__ import main

REPOSITORY = Path(__file__).parents[1]
README = (REPOSITORY / "README.md").read_text()


@pytest.mark.parametrize("target", re.findall(r"\]\(([^)#]+)\)", README))
def test_links_lead_somewhere(target):
    assert "://" in target or (REPOSITORY / target).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z]+)\b", README))))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("arguments", re.findall(r'make run ARGS="(.*?)"', README))
def test_runs_can_be_planned(arguments):
    assert main(["run", "--dry-run", *arguments.split()]) == 0


@pytest.mark.parametrize("path", re.findall(r"papermill (\S+)", README))
def test_notebooks_exist(path):
    assert (REPOSITORY / path).exists()
