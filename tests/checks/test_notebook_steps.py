"""The graded steps of the notebooks: what returns nothing or overwrites its input is told in a sentence."""

import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this platform")

from solutions import written
from torch.utils._pytree import tree_leaves

FUNCTIONS = [("11", "time_steps"), ("12", "kernels_of"), ("13", "replay"), ("15", "saved_bytes")]
FUNCTIONS += [("16", "run"), ("37", "fill"), ("61", "feed_forward_backward")]
OF_TENSORS = [("14", "layer_norm"), ("21", "my_softmax"), ("21", "my_attention"), ("25", "delta")]
OF_TENSORS += [("61", "chunked_loss"), ("61", "rms_norm_backward")]


def crosses(number, name, wrap):
    """What is told of this change to a solution; whatever it is, the step ends with its verdict."""
    step = written(number, name)
    lines = step.says(step.solution, wrap).splitlines()
    assert lines[-1].endswith(": not right"), lines
    return [line for line in lines if line.startswith("✗")]


@pytest.mark.parametrize(("number", "name"), FUNCTIONS + OF_TENSORS)
def test_one_that_returns_nothing(number, name):
    (mistake,) = crosses(number, name, lambda right: lambda *args, **kwargs: None)
    assert "return" in mistake or "NoneType" in mistake


@pytest.mark.parametrize(("number", "name"), OF_TENSORS)
def test_one_that_overwrites_its_inputs(number, name):
    def wrap(right):
        def call(*args, **kwargs):
            result = right(*args, **kwargs)
            overwritten = next(
                x for x in tree_leaves((args, kwargs)) if isinstance(x, torch.Tensor)
            )
            overwritten.data.zero_()
            return result

        return call

    assert any("overwritten" in line for line in crosses(number, name, wrap))
