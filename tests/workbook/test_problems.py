"""The list of the handout's problems."""

from cs336_systems.workbook import problems
from cs336_systems.workbook.problems import PROBLEMS, why_not_here


def test_a_number_and_a_name_mean_one_problem():
    assert [problem.number for problem in PROBLEMS] == sorted({problem.number for problem in PROBLEMS})
    assert len({problem.slug for problem in PROBLEMS}) == len(PROBLEMS)
    assert PROBLEMS[0].name == "11_benchmarking_script"


def test_without_triton_the_notebooks_that_need_it_say_so(monkeypatch):
    monkeypatch.setattr(problems, "find_spec", lambda name: name)
    assert why_not_here("24_flash_forward") == ""
    monkeypatch.setattr(problems, "find_spec", lambda name: None)
    assert "triton" in why_not_here("24_flash_forward")
    assert why_not_here("22_torch_compile") == why_not_here("00_start_here") == ""
