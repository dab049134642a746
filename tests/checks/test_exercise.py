"""A step of an exercise says what it found, and nothing leaves it."""

import contextlib
import re
import time

import pytest
import torch

from cs336_systems.checks import step, waits


def run(body, **how):
    with step("sum", **how) as check:
        body(check)
    return check


def raises(error):
    def body(check):
        raise error

    return body


def shown(capsys):
    return capsys.readouterr().out.splitlines()


def test_who_wants_a_tensors_number_waits_and_plain_values_stay():
    x = torch.ones(3)
    assert waits(lambda x, factor: factor[0] * x, x, [2]) == ""
    assert "wait for the GPU" in waits(lambda x: x.sum().item(), x)
    assert "is printed" in waits(print, x)
    assert "on [device(type='cpu')]" in waits(torch.ones(3).add_, x)


def test_every_property_is_shown_and_one_that_fails_fails_the_step(capsys):
    def body(check):
        check("of one block", True, "nothing")
        check("of two blocks", False, "is the last block masked?")
        check("of three blocks", True)

    assert run(body).passed is False
    assert shown(capsys) == [
        "✓ of one block",
        "✗ of two blocks: is the last block masked?",
        "✓ of three blocks",
        "sum: not right",
    ]


def catches_everything(check):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


def gives(found):
    return lambda check: check.close("the sum", found, torch.tensor([1.0, 2.0]), "masked?")


def overwrites(check):
    x = torch.ones(2)
    check.keeps(x=x)
    x.add_(1)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (raises(AssertionError("off by 2")), "off by 2"),
        (raises(NameError("off by 2")), "NameError: off by 2$"),
        (raises(NotImplementedError("aten::equal on meta tensors")), "aten::equal"),
        # What would end the notebook's kernel:
        (raises(SystemExit(1)), "SystemExit"),
        (lambda check: time.sleep(5), "0.3 s"),
        (catches_everything, "0.3 s"),
        # What is no tensor that was wanted:
        (gives(None), "nothing is returned"),
        (gives(torch.ones(3)), r"\(3,\), torch.float32; wanted: \(2,\), torch.float32"),
        (gives(torch.ones(2, device="meta")), "on meta"),
        (gives(torch.tensor([1.0, torch.nan])), "NaN or infinities; masked?"),
        (gives(torch.tensor([1.0, 3.0])), "the sum: masked?"),
        (
            lambda check: check.equal("buckets", [[1]], [[1, 0]], "mine"),
            r"buckets: \[\[1\]\]; mine",
        ),
        (lambda check: check.equal("buckets", None, [[1, 0]]), "nothing is returned"),
        (overwrites, "x stays as it was: it was overwritten; clone it first"),
    ],
)
def test_a_mistake_is_a_sentence_and_goes_no_further(body, said, capsys):
    assert run(body, timeout_s=0.3).passed is False
    assert re.search(f"✗ .*{said}", shown(capsys)[0])


@pytest.mark.parametrize(
    "error", [NotImplementedError(), AssertionError("rank 0 of 2 raised NotImplementedError: ")]
)
def test_what_is_not_written_is_not_yet(error, capsys):
    assert run(raises(error)).passed is None
    assert shown(capsys) == ["sum: not yet"]


def test_a_user_can_interrupt():
    with pytest.raises(KeyboardInterrupt):
        run(raises(KeyboardInterrupt()))


@pytest.mark.parametrize("error", [NotImplementedError(), AssertionError("off by 2")])
def test_nbgrader_gives_no_point_for_it(error, monkeypatch):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(AssertionError, match="sum"):
        run(raises(error))


def test_numbers_infinities_and_lists():
    with step("sum") as check:
        check.close("a number", 2.0, torch.tensor(2.0))
        check.close("-inf", torch.tensor(-torch.inf), torch.tensor(-torch.inf))
        check.equal("a list", [1, 2], [1, 2])
    assert check.passed
