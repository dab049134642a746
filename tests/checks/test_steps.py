"""A step of an exercise says what it found, and nothing leaves it."""

import time

import pytest

from cs336_systems.checks import step


def test_every_property_is_shown_and_one_that_fails_fails_the_step(capsys):
    with step("sum") as check:
        check("of one block", True, "nothing")
        check("of two blocks", False, "is the last block masked?")
        check("of three blocks", True)
    lines = capsys.readouterr().out.splitlines()
    assert [line[0] for line in lines] == ["✓", "✗", "✓", "s"]
    assert "is the last block masked?" in lines[1]
    assert "nothing" not in lines[0]
    assert check.passed is False


def test_all_right(capsys):
    with step("sum") as check:
        check("of one block", True)
    assert check.passed
    assert capsys.readouterr().out.endswith("sum: right\n")


@pytest.mark.parametrize(
    "error", [NotImplementedError(), AssertionError("rank 0 of 2 raised NotImplementedError: ")]
)
def test_what_is_not_written_is_not_yet(error, capsys):
    with step("sum") as check:
        raise error
    assert check.passed is None
    assert capsys.readouterr().out == "sum: not yet\n"


@pytest.mark.parametrize("error", [AssertionError("off by 2"), ValueError("off by 2"), NameError("off by 2")])
def test_a_mistake_is_told_and_goes_no_further(error, capsys):
    with step("sum") as check:
        raise error
    assert check.passed is False
    assert "off by 2" in capsys.readouterr().out


def test_what_hangs_is_stopped(capsys):
    with step("sum", timeout_s=0.05) as check:
        time.sleep(5)
    assert check.passed is False
    assert "0.05 s" in capsys.readouterr().out


@pytest.mark.parametrize("error", [NotImplementedError(), AssertionError("off by 2")])
def test_nbgrader_gives_no_point_for_it(error, monkeypatch):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(AssertionError, match="sum"), step("sum"):
        raise error
