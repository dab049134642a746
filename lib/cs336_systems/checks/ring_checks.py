"""All-reduces around a ring, written as what one rank sends: run rank by rank in lock step, and checked.

def all_reduce(mine, rank, n):          # a generator, run on each of n ranks
    arrived = yield moving              # send a tensor to rank + 1, get what rank - 1 has sent
    return total
"""

from collections.abc import Generator

import torch
from torch import Tensor

from cs336_systems.checks.exercise import assert_tensor

_TWICE = (
    "something is added twice: is what is passed on the tensor that arrived, not the sum so far?"
)
_MISSING = "something is missing: n - 1 messages arrive, and a rank's own tensor counts too"


def run_ring(all_reduce, tensors):
    """Run a ring all-reduce on all ranks in this process, message by message.

    tensors: what each begins with. Returns what each ends with, and of each the messages it sent, in order.
    Raises AssertionError: it sends nothing to others, never ends, or not all ranks send equally often.
    """
    n = len(tensors)
    ranks = [all_reduce(tensor, rank, n) for rank, tensor in enumerate(tensors)]
    assert isinstance(ranks[0], Generator), "it sends nothing: `arrived = yield tensor` does"
    results = []
    sent = [[] for _ in ranks]
    arriving = [None] * n
    while not results:
        leaving = []
        for rank, arrived, log in zip(ranks, arriving, sent, strict=True):
            try:
                message = rank.send(arrived)
            except StopIteration as end:
                results.append(end.value)
                continue
            assert isinstance(message, Tensor), f"{message!r:.80} is sent; `yield` with a tensor"
            log.append(message.clone())  # a copy, as a wire makes
            leaving.append(log[-1])
        assert not (results and leaving), f"{len(results)} of {n} ranks are done, others still send"
        assert len(sent[0]) < 10_000, "messages go on and on: does a loop never end?"
        arriving = leaving[-1:] + leaving[:-1]
    return results, sent


def check_ring(check, all_reduce, tensors_sent):
    """Properties of a ring all-reduce; `tensors_sent(n)` is what each rank should send, in whole tensors."""
    for n in (2, 3, 4, 8):
        sent = _check_sums(check, all_reduce, torch.arange(24.0), f"{n} ranks", n)
        bytes_sent = {sum(message.nbytes for message in log) for log in sent}
        wanted = round(tensors_sent(n) * 24 * 4)  # of float32
        check(
            f"{n} ranks: each sends {wanted} bytes",
            bytes_sent == {wanted},
            f"they send {sorted(bytes_sent)}",
        )
    # Not every part of 25 numbers is equally long.
    for n in (2, 4):
        _check_sums(check, all_reduce, torch.arange(25.0), f"{n} ranks, 25 numbers", n)


def _check_sums(check, all_reduce, numbers, case, n):
    """Check what n ranks end with, and return what each of them sends."""
    before = [10.0**rank + numbers for rank in range(n)]
    # Strided, as a column of a matrix is.
    tensors = [x.new_empty(2 * len(x))[::2].copy_(x) for x in before]
    total = sum(before)
    results, sent = run_ring(all_reduce, tensors)
    for result in results:
        assert_tensor(f"{case}: the sum", result, total)
    check(
        f"{case}: all end with the sum",
        all(map(total.equal, results)),
        _TWICE if (results[0] > total).any() else _MISSING,
    )
    check(
        f"{case}: what they were given is unchanged",
        all(map(torch.equal, tensors, before)),
        "clone it",
    )
    return sent
