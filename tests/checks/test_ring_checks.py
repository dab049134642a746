"""Ring all-reduces in lock step: the right ones pass, and each mistake is named."""

import pytest
import torch
from solutions import written

from cs336_systems.checks import check_ring, step

ALTERNATE = written("52", "whole_ring")
whole_ring = ALTERNATE.made()


def usual_ring(mine, rank, n):
    parts = mine.clone().tensor_split(n)
    for hop in range(2 * (n - 1)):
        arrived = yield parts[(rank - hop) % n]
        target = parts[(rank - hop - 1) % n]
        target.copy_(target + arrived if hop < n - 1 else arrived)
    return torch.cat(parts)


@pytest.mark.parametrize(
    ("ring", "sent"), [(whole_ring, lambda n: n - 1), (usual_ring, lambda n: 2 * (n - 1) / n)]
)
def test_right_rings_pass(ring, sent, capsys):
    with step("ring") as check:
        check_ring(check, ring, sent)
    assert check.passed, capsys.readouterr().out


LOOP = "for _ in range(n - 1):"
# What is said, and how the ring is changed.
WRONG = {
    "missing": (LOOP, "for _ in range(n - 2):"),
    "clone": ("total = mine.clone()", "mine, total = mine.clone(), mine"),
    "yield": ("moving = yield moving", "pass"),
    "with a tensor": ("moving = yield moving", "yield"),
    "loop never end": (LOOP, "while True:"),
    "still send": (LOOP, "for _ in range(rank):"),
}


def drops_the_rest(mine, rank, n):
    """Cut into n equal pieces; what is left over is not added up."""
    end = len(mine) // n * n
    return torch.cat([(yield from usual_ring(mine[:end], rank, n)), mine[end:]])


def test_what_cannot_be_cut_evenly_is_not_lost(capsys):
    with step("ring") as check:
        check_ring(check, drops_the_rest, lambda n: 2 * (n - 1) / n)
    assert check.passed is False
    assert "✗ 4 ranks, 25 numbers: all end with the sum" in capsys.readouterr().out


@pytest.mark.parametrize("word", ["they send"] + list(WRONG))
def test_a_mistake_is_named(word, capsys):
    ring = ALTERNATE.made(*WRONG[word]) if word in WRONG else usual_ring
    with step("ring") as check:
        check_ring(check, ring, lambda n: n - 1)
    assert check.passed is False
    assert word in capsys.readouterr().out
