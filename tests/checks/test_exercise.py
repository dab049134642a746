"""A step of an exercise says what it found, and nothing leaves it."""

import contextlib
import re
import signal
import sys
import time

import pytest
import torch

from cs336_systems.checks import step


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


def test_every_property_is_shown_and_one_that_fails_fails_the_step(capsys):
    def body(check):
        check("of one block", True, "nothing")
        check("of two blocks", False, "is the last block masked?")
        check.note("of no block", False, "then it is 0")
        check("of three blocks", True)

    assert run(body).passed is False
    assert shown(capsys) == [
        "✓ of one block",
        "✗ of two blocks: is the last block masked?",
        "· not asked for, of no block: then it is 0",
        "✓ of three blocks",
        "sum: not right",
    ]
    assert run(lambda check: check.note("of no block", False, "then it is 0")).passed
    assert shown(capsys)[-1] == "sum: right"


@pytest.mark.parametrize(
    "error", [NotImplementedError(), AssertionError("rank 0 of 2 raised NotImplementedError: ")]
)
def test_what_is_not_written_is_not_yet(error, capsys):
    assert run(raises(error)).passed is None
    assert shown(capsys) == ["sum: not yet"]


class Unprintable(Exception):
    def __str__(self):
        raise ValueError


def catches_everything(check):
    while True:
        with contextlib.suppress(Exception):
            time.sleep(0.01)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        (raises(AssertionError("off by 2")), "off by 2"),
        (raises(NameError("off by 2")), "NameError: off by 2$"),
        (raises(NotImplementedError("aten::equal on meta tensors")), "aten::equal"),
        (raises(TypeError("'NoneType' object is not callable")), "'NoneType' .* a missing `return`"),
        # What would end the notebook's kernel:
        (raises(SystemExit(1)), "SystemExit"),
        (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
        (raises(GeneratorExit()), "GeneratorExit"),
        (raises(Unprintable()), "Unprintable"),
        (lambda check: time.sleep(5), "0.3 s"),
        (catches_everything, "0.3 s"),
    ],
)
def test_a_mistake_is_a_sentence_and_goes_no_further(body, said, capsys):
    assert run(body, timeout_s=0.3).passed is False
    assert re.search(said, shown(capsys)[0])


def test_a_user_can_interrupt(capsys):
    before = signal.getsignal(signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        run(lambda check: signal.raise_signal(signal.SIGINT))
    assert signal.getsignal(signal.SIGINT) is before


def test_long_output_is_cut_and_the_verdict_is_not(capsys):
    def body(check):
        for n in range(600_000):
            print("line", n)
        print("line", file=sys.stderr)
        check("of one block", True)

    run(body)
    printed = capsys.readouterr()
    assert len(printed.out) < 30_000
    assert printed.out.endswith("✓ of one block\nsum: right\n")
    assert printed.err == "line\n"


@pytest.mark.parametrize("error", [NotImplementedError(), AssertionError("off by 2")])
def test_nbgrader_gives_no_point_for_it(error, monkeypatch):
    monkeypatch.setenv("NBGRADER_EXECUTION", "autograde")
    with pytest.raises(AssertionError, match="sum"):
        run(raises(error))


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
    wanted = torch.tensor([1.0, 2.0])
    assert run(lambda check: check.close("the sum", found, wanted, "masked?")).passed is False
    assert named in shown(capsys)[0]


def test_numbers_infinities_and_lists(capsys):
    def right(check):
        check.close("a number", 2.0, torch.tensor(2.0))
        check.close("-inf", torch.tensor(-torch.inf), torch.tensor(-torch.inf))
        check.equal("a list", [1, 2], [1, 2])

    assert run(right).passed
    shown(capsys)
    assert run(lambda check: check.equal("buckets", [[1], [0]], [[1, 0]], "together")).passed is False
    assert shown(capsys)[0] == "✗ buckets: [[1], [0]]; together"
    assert run(lambda check: check.equal("buckets", None, [[1, 0]])).passed is False
    assert "nothing is returned" in shown(capsys)[0]


def test_inputs_that_have_to_stay_are_watched(capsys):
    x = torch.ones(2)
    assert run(lambda check: (check.keeps(x=x), x.add_(1))).passed is False
    assert "✗ x stays as it was: it was overwritten; clone it first" in shown(capsys)
