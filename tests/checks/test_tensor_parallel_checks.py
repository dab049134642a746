"""check_tensor_parallel passes what is right, and names each classic mistake."""

import re

import broken_tensor_parallel
import cloudpickle
import pytest

from cs336_systems.checks.tensor_parallel_checks import check_tensor_parallel
from cs336_systems.parallel import TensorParallelSwiGLU, launch

# What the sentence about each mistake must name, and the rank that sees it.
SENTENCES = {
    "Parts": (0, None),
    "ForgetsToSum": (0, "output is only this rank's term. All-reduce"),
    "Averages": (0, "output is the mean"),
    "ForgetsTheInputGradient": (0, "gradient of the input is only what comes through this rank's slice"),
    "SumsBothWays": (0, "gradient of w1 is 2 times too large"),
    "SumsOutsideAutograd": (0, "w1 has no gradient"),
    "CutsW2ByRows": (0, r"w2 is \(3, 10\), not \(6, 5\). Cut it into columns"),
    "EveryoneTakesTheFirstSlice": (1, "w3 is not the slice of rank 1"),
    "KeepsTheSlicesElsewhere": (0, "`.w1` is no nn.Parameter"),
    "odd width": (0, "d_ff is 5; allowed: a multiple of 2"),
}


@pytest.fixture(scope="module")
def found():
    """All wrong classes in one launch."""
    cloudpickle.register_pickle_by_value(broken_tensor_parallel)  # as if defined in a notebook
    classes = {name: getattr(broken_tensor_parallel, name, None) for name in SENTENCES}
    classes = {name: cloudpickle.dumps(kind) for name, kind in classes.items() if kind}
    cloudpickle.unregister_pickle_by_value(broken_tensor_parallel)
    return launch(broken_tensor_parallel.check_each, 2, classes, backend="gloo", timeout_s=60)


@pytest.mark.parametrize("name", SENTENCES)
def test_each_mistake_is_named(found, name):
    rank, sentence = SENTENCES[name]
    mistake = found[rank][name]
    assert mistake is None if sentence is None else re.search(sentence, mistake)


def test_what_a_class_raises_is_told():
    class Nothing(TensorParallelSwiGLU):
        def forward(self, x):
            raise NotImplementedError

    with pytest.raises(AssertionError, match=r"Nothing did not get through: .*NotImplementedError"):
        check_tensor_parallel(Nothing)
