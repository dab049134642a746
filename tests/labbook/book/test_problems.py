"""What cannot run on a machine says so."""

from labbook.book import problems
from labbook.book.problems import why_not_here


def test_without_triton_the_notebooks_that_need_it_say_so(monkeypatch):
    monkeypatch.setattr(problems, "find_spec", lambda name: name)
    assert why_not_here("24_flash_forward") == ""
    monkeypatch.setattr(problems, "find_spec", lambda name: None)
    assert "triton" in why_not_here("24_flash_forward")
    assert why_not_here("22_torch_compile") == why_not_here("00_start_here") == ""
