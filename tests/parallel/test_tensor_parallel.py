"""What the tensor-parallel layer promises beyond what its checker asks; each check runs on every rank."""

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


def test_it_keeps_its_promise():
    launch(run, 2, a_penalty_on_a_gradient_is_as_in_the_whole_layer, backend="gloo", timeout_s=60)
