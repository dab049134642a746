"""Ring all-reduces in lock step: the right ones pass, and each mistake is named."""

import pytest
import torch

from cs336_systems.checks import check_ring, run_ring, step


def whole_ring(mine, rank, n):
    total, moving = mine.clone(), mine
    for _ in range(n - 1):
        moving = yield moving
        total += moving
    return total


def usual_ring(mine, rank, n):
    parts = mine.clone().tensor_split(n)
    for hop in range(2 * (n - 1)):
        arrived, target = (yield parts[(rank - hop) % n]), parts[(rank - hop - 1) % n]
        target.copy_(target + arrived if hop < n - 1 else arrived)
    return torch.cat(parts)


def one_short(mine, rank, n):
    total, moving = mine.clone(), mine
    for _ in range(n - 2):
        moving = yield moving
        total += moving
    return total


def in_place(mine, rank, n):
    moving = mine.clone()
    for _ in range(n - 1):
        moving = yield moving
        mine += moving
    return mine


def endless(mine, rank, n):
    while True:
        mine = yield mine


def silent(mine, rank, n):
    return n * mine


def uneven(mine, rank, n):
    for _ in range(rank):
        yield mine
    return mine


@pytest.mark.parametrize(
    ("ring", "sent"), [(whole_ring, lambda n: n - 1), (usual_ring, lambda n: 2 * (n - 1) / n)]
)
def test_right_rings_pass(ring, sent, capsys):
    with step("ring") as check:
        check_ring(check, ring, sent)
    assert check.passed, capsys.readouterr().out


@pytest.mark.parametrize(
    ("ring", "word"),
    [
        (one_short, "missing"),
        (in_place, "clone"),
        (silent, "yield"),
        (endless, "loop never end"),
        (uneven, "still send"),
        (usual_ring, "they send"),
    ],
)
def test_a_mistake_is_named(ring, word, capsys):
    with step("ring") as check:
        check_ring(check, ring, lambda n: n - 1)
    assert check.passed is False
    assert word in capsys.readouterr().out


def test_messages_are_logged_as_they_were_when_they_left():
    _, sent = run_ring(whole_ring, [torch.full((2,), float(rank)) for rank in range(3)])
    assert [[int(message[0]) for message in log] for log in sent] == [[0, 2], [1, 0], [2, 1]]
    _, sent = run_ring(usual_ring, [torch.ones(3)] * 3)  # it overwrites what it has sent
    assert [[int(message) for message in log] for log in sent] == [[1, 2, 3, 3]] * 3
