"""check_tensor_parallel passes what is right, and names each classic mistake."""

import re

import pytest
import torch.distributed as dist
from each_candidate import bug
from torch import nn
from torch.nn import functional as F

from cs336_systems.checks import tensor_parallel_checks
from cs336_systems.checks.tensor_parallel_checks import check_tensor_parallel
from cs336_systems.model import SwiGLU
from cs336_systems.parallel import TensorParallelSwiGLU
from cs336_systems.parallel.tensor_parallel import _Sum, _SumGradient

PROPERTIES = tensor_parallel_checks.PROPERTIES


class _SumBothWays(_Sum):
    """What torch.distributed.nn's all_reduce does."""

    @staticmethod
    def backward(ctx, grad):
        total = grad.contiguous().clone()
        dist.all_reduce(total)
        return total, None


class Right(TensorParallelSwiGLU):
    """The layer in parts that can go wrong one by one."""

    def __init__(self, full, group):
        super().__init__(full, group)
        self.change(full)

    def change(self, full):
        pass

    def enter(self, x):
        return _SumGradient.apply(x, self.group)

    def leave(self, term):
        return _Sum.apply(term, self.group)

    def forward(self, x):
        x = self.enter(x)
        return self.leave(F.linear(F.silu(F.linear(x, self.w1)) * F.linear(x, self.w3), self.w2))


class SumsOutsideAutograd(Right):
    def leave(self, term):
        total = term.detach()
        dist.all_reduce(total)
        return total.requires_grad_()


def cut_w2_by_rows(self, full):
    self.w2 = nn.Parameter(full.w2.weight.detach().chunk(dist.get_world_size(), 0)[dist.get_rank()])


def take_the_first_slice(self, full):
    self.w3 = nn.Parameter(full.w3.weight.detach().chunk(dist.get_world_size(), 0)[0])


BUGS = {  # what is said about each
    "^$": Right,
    "output is only this rank's term. All-reduce": bug(Right, leave=lambda self, x: x),
    "output is the mean": bug(Right, leave=lambda self, x: Right.leave(self, x) / 2),
    "gradient of the input is only what comes": bug(Right, enter=lambda self, x: x),
    "gradient of w1 is 2 times too large": bug(
        Right, leave=lambda self, x: _SumBothWays.apply(x, self.group)
    ),
    "w1 has no gradient": SumsOutsideAutograd,
    r"w2 is \(3, 10\), not \(6, 5\). Cut it into columns": bug(Right, change=cut_w2_by_rows),
    "rank 1: w3 is not the slice of rank 1": bug(Right, change=take_the_first_slice),
    "`.w1` is no nn.Parameter": bug(Right, change=lambda self, full: delattr(self, "w1")),
}


@pytest.mark.parametrize("sentence", BUGS)
def test_each_mistake_is_named(failures, sentence):
    assert re.search(sentence, failures[sentence])


def test_what_a_class_raises_is_told():
    nothing = bug(TensorParallelSwiGLU, forward=lambda self, x: [][0])
    with pytest.raises(AssertionError, match=r"did not get through: .*IndexError"):
        check_tensor_parallel(nothing)


def test_a_width_that_the_ranks_cannot_share():
    class Odd(TensorParallelSwiGLU):
        def __init__(self, full, group):
            super().__init__(SwiGLU(4, 5), group)

    with pytest.raises(AssertionError, match="d_ff is 5; allowed: a multiple of 2"):
        check_tensor_parallel(Odd)
