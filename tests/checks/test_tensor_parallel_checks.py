"""check_tensor_parallel passes what is right, and names each classic mistake."""

import re

import broken_tensor_parallel
import pytest

from cs336_systems.checks import tensor_parallel_checks
from cs336_systems.checks.tensor_parallel_checks import check_tensor_parallel
from cs336_systems.model import SwiGLU
from cs336_systems.parallel import TensorParallelSwiGLU

BROKEN, CASES = broken_tensor_parallel, tensor_parallel_checks.CASES
# What the sentence about each mistake must name.
SENTENCES = {
    "Parts": "nothing",
    "ForgetsToSum": "output is only this rank's term. All-reduce",
    "Averages": "output is the mean",
    "ForgetsTheInputGradient": "gradient of the input is only what comes through this rank's slice",
    "SumsBothWays": "gradient of w1 is 2 times too large",
    "SumsOutsideAutograd": "w1 has no gradient",
    "CutsW2ByRows": r"w2 is \(3, 10\), not \(6, 5\). Cut it into columns",
    "EveryoneTakesTheFirstSlice": "rank 1: w3 is not the slice of rank 1",
    "KeepsTheSlicesElsewhere": "`.w1` is no nn.Parameter",
}


@pytest.mark.parametrize("name", SENTENCES)
def test_each_mistake_is_named(failures, name):
    assert re.search(SENTENCES[name], " ".join(failures[name]) or "nothing")


def test_what_a_class_raises_is_told():
    class Nothing(TensorParallelSwiGLU):
        def forward(self, x):
            raise NotImplementedError

    with pytest.raises(AssertionError, match=r"Nothing did not get through: .*NotImplementedError"):
        check_tensor_parallel(Nothing)


def test_a_width_that_the_ranks_cannot_share():
    class Odd(TensorParallelSwiGLU):
        def __init__(self, full, group):
            super().__init__(SwiGLU(4, 5), group)

    with pytest.raises(AssertionError, match="d_ff is 5; allowed: a multiple of 2"):
        check_tensor_parallel(Odd)
