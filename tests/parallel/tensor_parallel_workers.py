"""Workers for test_tensor_parallel.py. Each asserts on every rank what it says in its docstring."""

import pytest
import torch

from cs336_systems.model import SwiGLU
from cs336_systems.parallel import TensorParallelSwiGLU


def frozen_weights_stay_frozen(context):
    """A slice is trainable if the weight is."""
    full = SwiGLU(4, 8)
    full.w1.requires_grad_(False)
    layer = TensorParallelSwiGLU(full)
    assert [weight.requires_grad for weight in (layer.w1, layer.w2, layer.w3)] == [False, True, True]


def no_gradient_of_a_gradient(context):
    """The messages in backward have no backward of their own: an error, not a wrong number."""
    x = torch.ones(2, 4, requires_grad=True)
    output = TensorParallelSwiGLU(SwiGLU(4, 8))(x).square().sum()
    (gradient,) = torch.autograd.grad(output, x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        gradient.sum().backward()


def run_all(context):
    """One launch for all of them: starting processes takes longer than the checks."""
    frozen_weights_stay_frozen(context)
    no_gradient_of_a_gradient(context)
