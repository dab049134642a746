"""The list of the handout's problems."""

from collections import Counter

from cs336_systems.workbook import problems
from cs336_systems.workbook.problems import PROBLEMS, why_not_here


def test_a_number_and_a_name_mean_one_problem():
    assert [problem.number for problem in PROBLEMS] == sorted({problem.number for problem in PROBLEMS})
    assert len({problem.slug for problem in PROBLEMS}) == len(PROBLEMS)


def test_every_chapter_of_both_editions_is_there():
    assert Counter(problem.chapter for problem in PROBLEMS) == {
        "Profiling and benchmarking": 5,
        "Single-GPU memory": 1,
        "Attention kernels": 7,
        "Data parallel": 8,
        "Sharding": 4,
        "Scaling on paper": 6,
        "Leaderboard": 1,
    }
    assert Counter(problem.editions for problem in PROBLEMS) == {(2025, 2026): 19, (2025,): 4, (2026,): 9}


def test_a_notebook_is_named_after_its_number_and_slug():
    assert PROBLEMS[0].name == "11_benchmarking_script"
    assert PROBLEMS[0].title == "11 · benchmarking_script"


def test_without_triton_the_notebooks_that_need_it_say_so(monkeypatch):
    monkeypatch.setattr(problems, "find_spec", lambda name: name)
    assert why_not_here("24_flash_forward") == ""
    monkeypatch.setattr(problems, "find_spec", lambda name: None)
    assert "needs triton" in why_not_here("24_flash_forward")
    assert why_not_here("22_torch_compile") == why_not_here("00_start_here") == ""
