"""What the tensor-parallel layer promises beyond what its checker asks; each check runs on every rank."""

import torch
from wrappers import run

from cs336_systems.model import SwiGLU
from cs336_systems.parallel import TensorParallelSwiGLU, launch


def frozen_weights_stay_frozen(context):
    """A slice is trainable if the weight is."""
    full = SwiGLU(4, 8)
    full.w1.requires_grad_(False)
    layer = TensorParallelSwiGLU(full)
    assert [weight.requires_grad for weight in (layer.w1, layer.w2, layer.w3)] == [
        False,
        True,
        True,
    ]


def gradients_of_a_gradient(context):
    """With a penalty on the gradient of the input, everything is as in the whole layer."""
    torch.manual_seed(0)
    full, found = SwiGLU(4, 8), []
    for layer in (full, TensorParallelSwiGLU(full)):
        x = torch.ones(2, 4, requires_grad=True)
        loss = layer(x).square().sum()
        (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
        found.append(torch.autograd.grad(loss + gradient.pow(3).sum(), [x, *layer.parameters()]))
    for whole, mine, cut in zip(*found, (None, 0, 1, 0), strict=True):  # of x, w1, w2, w3
        wanted = whole if cut is None else whole.chunk(context.world_size, cut)[context.rank]
        torch.testing.assert_close(mine, wanted)


def test_it_keeps_its_promises():
    launch(
        run, 2, frozen_weights_stay_frozen, gradients_of_a_gradient, backend="gloo", timeout_s=60
    )
