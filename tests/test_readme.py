"""The links of the README and of the first notebook lead somewhere, and their commands exist."""

import re
import runpy
from itertools import pairwise
from pathlib import Path

import nbformat
import numpy as np
import pytest

from cs336_systems.__main__ import main
from labbook import load_rows, one
from labbook.book.map import read_map
from labbook.book.notebooks import book

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = REPOSITORY / "notebooks"
CELLS = nbformat.read(NOTEBOOKS / "00_start_here.ipynb", as_version=4).cells
README = (REPOSITORY / "README.md").read_text(encoding="utf-8")
TEXTS = {
    REPOSITORY: README + (REPOSITORY / "CONTRIBUTING.md").read_text(encoding="utf-8"),
    NOTEBOOKS: "\n".join(cell.source for cell in CELLS if cell.cell_type == "markdown"),
}
TEXT = "\n".join(TEXTS.values())
COMMANDS = TEXT + "".join(
    (REPOSITORY / f).read_text() for f in (".github/workflows/test.yml", "Containerfile")
)
TEACHING = (REPOSITORY / "TEACHING.md").read_text(encoding="utf-8")
CHAPTERS = {  # what the page for teachers says of each besides: what to have read, and its GPUs
    "11": " | no; times want one",
    "16": "15 | no; times want one",
    "21": "11 | no; times want one",
    "31": "11 | no; times want two",
    "41": "35, 36 | no; times want two",
    "51": "31, 43 | no; 55's times want two",
    "61": "16, 25, 43 | no; times want two",
}


@pytest.mark.parametrize("folder", TEXTS)
def test_links_lead_somewhere(folder):
    for to in re.findall(r"(?:\]\(|\bpapermill )([^)#\s]+)", TEXTS[folder]):
        assert "://" in to or (folder / to).exists() or (REPOSITORY / to).exists(), to


@pytest.mark.parametrize(
    "target", sorted(set(re.findall(r'make"?,? "?([a-z-]+)\b', COMMANDS)) - {"gcc"})
)
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (REPOSITORY / "Makefile").read_text(), re.MULTILINE)


@pytest.mark.parametrize("arguments", re.findall(r'make run ARGS="(.*?)"', TEXT))
def test_runs_can_be_planned(arguments):
    assert main(["run", "--dry-run"] + arguments.split()) == 0


def test_its_numbers_are_rows():
    flash = load_rows("flash_leaderboard", "h200", "flash_times").query(
        "protocol == 'leaderboard' and num_heads == 16 and context_length == 16384 and d_head == 64"
    )
    names = "flash_triton", "flash_cute", "sdpa_cudnn"
    entries = [one(flash, implementation=name) for name in names]
    steps = load_rows("leaderboard", "h200-x2", "full_step_times").query(
        "round == 1 and whole_blocks in (0, 11)"
    )
    steps = steps.set_index("implementation")
    full, torchs = (steps.loc[name] for name in ("offloaded", "fsdp2_selective"))
    assert {each["run"] for each in entries + [full]} == {entries[0]["run"], torchs["run"]}
    mixed = load_rows("benchmarking_script", "h200", "model_times").query("`pass` == 'forward'")
    mixed = mixed.query("warmup_steps == 5 and context_length == 512 and batch_size == 4")
    speed_up = mixed.pivot_table(index=["model_size", "edition"], columns="dtype", values="p50_ms")
    speed_up = speed_up["float32"] / speed_up["bfloat16"]
    numbers = [f"{each['mean_ms']:.2f} ms" for each in entries]
    numbers += [f"{each['p50_ms'] / 1e3:.2f} s" for each in (full, torchs)]
    numbers += f"{speed_up.max():.2f} times", f"{speed_up.min():.2f} times"
    assert [number for number in numbers if number not in README] == []


def test_the_page_for_teachers_adds_up():
    entries = read_map()
    all_minutes = 0
    chapters = book("chapters")
    for first, end in pairwise(list(CHAPTERS) + ["99"]):
        names = [name for name in entries if first <= name[:2] < end]
        minutes = np.array([entries[name].minutes for name in names], float).sum(axis=0)
        all_minutes += minutes
        read = [nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4) for name in names]
        graded = [cell.metadata.get("nbgrader", {}) for each in read for cell in each.cells]
        points = [cell["points"] for cell in graded if cell.get("grade")]
        hours = " | ".join(f"{total / 60:.1f}" for total in minutes)
        line = f"| {chapters[int(first)]} | {hours} | {len(points)} | {sum(points)} | {CHAPTERS[first]} |"
        assert line in TEACHING
    read, work = all_minutes / 60
    assert f"{read:.0f} hours to read, {work:.0f} to work" in README


@pytest.mark.parametrize("name", sorted(set(read_map()) - {"00_start_here"}))
def test_every_part_of_a_problem_leads_to_its_answer(name):
    """Bold names are answers of the page, and each answer that is named by a letter or a number is a part."""
    notebook = nbformat.read(NOTEBOOKS / f"{name}.ipynb", 4)
    calls = r'^\s*answer\(\s*"(.+?)"'
    text = "\n".join(cell.source for cell in notebook.cells)
    answers = set(re.findall(calls, text, re.MULTILINE))
    pattern = rf"^\| \[{name[:2]}\]\(notebooks/{name}\.ipynb\) \| (.*) \| (.*) \|$"
    editions, parts = re.search(pattern, TEACHING, re.MULTILINE).groups()
    named = set(re.findall(r"\*\*(.+?)\*\*", parts))
    assert named <= answers
    assert {answer for answer in answers if len(answer.split(",")[0]) == 1} <= named
    assert editions.split(", ") == read_map()[name].editions


def test_a_class_is_handed_no_solution(tmp_path):
    handout = runpy.run_path(str(REPOSITORY / "examples" / "handout.py"))
    handout["write"](tmp_path / "whole")  # refuses a solution
    assert not list(tmp_path.rglob("tests"))
    (tmp_path / "mine.py").write_text((REPOSITORY / "tests/solutions/13.py").read_text())
    assert handout["left_in"](tmp_path) != []
