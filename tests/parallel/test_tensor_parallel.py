"""What the tensor-parallel layer promises beyond what its checker asks; each check runs on every rank."""

import pytest
import torch
from wrappers import run

from cs336_systems.model import SwiGLU
from cs336_systems.parallel import TensorParallelSwiGLU, launch


def a_penalty_on_a_gradient_is_as_in_the_whole_layer(context):
    torch.manual_seed(0)
    full = SwiGLU(4, 8)
    gradients = []
    for layer in (full, TensorParallelSwiGLU(full)):
        x = torch.ones(2, 4, requires_grad=True)
        loss = layer(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        penalized = loss + gradient.pow(3).sum()
        inputs = [x] + list(layer.parameters())
        gradients.append(torch.autograd.grad(penalized, inputs))
    # Of x, w1, w2, w3.
    for whole, mine, cut in zip(*gradients, (None, 0, 1, 0), strict=True):
        expected = whole if cut is None else whole.chunk(context.world_size, cut)[context.rank]
        torch.testing.assert_close(mine, expected)


def an_optimizer_that_needs_whole_weights_is_refused(context):
    layer = TensorParallelSwiGLU(SwiGLU(4, 8))
    layer(torch.ones(2, 4)).sum().backward()
    with pytest.raises(ValueError, match="this rank's part of a weight"):
        torch.optim.Adafactor(layer.parameters()).step()


CHECKS = [
    a_penalty_on_a_gradient_is_as_in_the_whole_layer,
    an_optimizer_that_needs_whole_weights_is_refused,
]


def test_it_keeps_its_promises():
    launch(run, 2, *CHECKS, backend="gloo", timeout_s=60)
