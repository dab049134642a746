"""A step of an exercise says what it found, and nothing leaves it."""

import contextlib
import signal
import sys
import time

import pytest
import torch

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


def catches_everything():
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


@pytest.mark.parametrize("endless", [lambda: time.sleep(5), catches_everything])
def test_what_hangs_is_stopped(endless, capsys):
    with step("sum", timeout_s=0.05) as check:
        endless()
    assert check.passed is False
    assert "0.05 s" in capsys.readouterr().out


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


@pytest.mark.parametrize("error", [SystemExit(1), KeyboardInterrupt(), GeneratorExit(), Unprintable()])
def test_what_would_end_the_kernel_is_a_sentence(error, capsys):
    with step("sum") as check:
        raise error
    assert check.passed is False
    assert type(error).__name__ in capsys.readouterr().out


def test_a_user_can_interrupt(capsys):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt), step("sum"):
        signal.raise_signal(signal.SIGINT)
    assert signal.getsignal(signal.SIGINT) is before


def test_long_output_is_cut_and_the_verdict_is_not(capsys):
    with step("sum") as check:
        for n in range(600_000):
            print("line", n)
        print("line", file=sys.stderr)
        check("of one block", True)
    shown = capsys.readouterr()
    assert len(shown.out) < 30_000
    assert shown.out.endswith("✓ of one block\nsum: right\n")
    assert shown.err == "line\n"


def test_what_the_assignment_does_not_ask_for_is_noted(capsys):
    with step("sum") as check:
        check.note("of no block", False, "then it is 0")
    assert check.passed
    assert "of no block: then it is 0" in capsys.readouterr().out


@pytest.mark.parametrize("error", [NotImplementedError(), AssertionError("off by 2")])
def test_nbgrader_gives_no_point_for_it(error, monkeypatch):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(AssertionError, match="sum"), step("sum"):
        raise error


def test_what_pytorch_does_not_implement_is_a_mistake(capsys):
    with step("sum") as check:
        raise NotImplementedError("aten::equal on meta tensors")
    assert check.passed is False
    assert "aten::equal" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("found", "named"),
    [
        (None, "nothing is returned"),
        ([1.0, 2.0], "list is returned"),
        (torch.ones(3), "(3,), torch.float32; wanted: (2,), torch.float32"),
        (torch.ones(2).half(), "torch.float16"),
        (torch.ones(2, device="meta"), "on meta"),
        (torch.tensor([1.0, torch.nan]), "NaN or infinities; masked?"),
        (torch.tensor([1.0, 3.0]), "the sum: masked?"),
    ],
)
def test_a_tensor_that_is_not_the_wanted_one_has_its_sentence(found, named, capsys):
    with step("sum") as check:
        check.close("the sum", found, torch.tensor([1.0, 2.0]), "masked?")
    assert check.passed is False
    (told,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("✗")]
    assert named in told


def test_numbers_and_infinities_that_are_wanted_are_close():
    with step("sum") as check:
        check.close("a number", 2.0, torch.tensor(2.0))
        check.close("-inf", torch.tensor(-torch.inf), torch.tensor(-torch.inf))
        check.equal("a list", [1, 2], [1, 2])
    assert check.passed


def test_what_is_not_equal_is_shown(capsys):
    with step("sum") as check:
        check.equal("buckets", [[1], [0]], [[1, 0]], "what fits goes together")
        check.equal("buckets", None, [[1, 0]])
    assert check.passed is False
    first, second, _ = capsys.readouterr().out.splitlines()
    assert first == "✗ buckets: [[1], [0]]; what fits goes together"
    assert "nothing is returned" in second


def test_inputs_that_have_to_stay_are_watched(capsys):
    x = torch.ones(2)
    with step("sum") as check:
        check.keeps(x=x)
        x += 1
    assert check.passed is False
    assert "✗ x stays as it was" in capsys.readouterr().out
