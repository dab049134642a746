"""Properties of a tensor-parallel SwiGLU layer, with error messages for its author."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.checks.on_ranks import check_on_ranks, holds, unlike
from cs336_systems.model import SwiGLU
from cs336_systems.parallel import WorkerContext

_D_MODEL, _WIDTH, _TOKENS = 6, 5, 4  # _WIDTH of a rank: different sizes, so that a wrong cut shows
_CUTS = {"w1": 0, "w2": 1, "w3": 0}
LayerClass = Callable[[SwiGLU, dist.ProcessGroup | None], nn.Module]


def check_tensor_parallel(layer_class: LayerClass) -> None:
    """Try a tensor-parallel SwiGLU layer in two CPU processes, against the whole layer.

    It is called as `layer_class(full, group)` with the whole layer, equal on every rank, and needs parameters
    `.w1` and `.w3` (its rows of the whole ones), `.w2` (its columns), and `forward(x)`; see `check_on_ranks`.
    """
    check_on_ranks(layer_class, {}, PROPERTIES)


def _whole_layer(context: WorkerContext) -> tuple[SwiGLU, Callable[[Tensor, str], Tensor]]:
    """The layer, and what cuts this rank's slice of the weight of this name."""
    torch.manual_seed(0)
    full = SwiGLU(_D_MODEL, _WIDTH * context.world_size)
    return full, lambda whole, name: whole.chunk(context.world_size, _CUTS[name])[context.rank]


@holds("every rank has its slice of each weight")
def cuts(context: WorkerContext, layer_class: LayerClass) -> Iterator[str]:
    full, slice_of = _whole_layer(context)
    layer = layer_class(full, None)
    for name, dimension in _CUTS.items():
        weight, expected = getattr(layer, name, None), slice_of(getattr(full, name).weight, name)
        pieces = f"{'rows' if dimension == 0 else 'columns'} (dimension {dimension})"
        if not isinstance(weight, nn.Parameter):
            yield f"`.{name}` is no nn.Parameter. Keep this rank's slice of {name} there."
        if weight.shape != expected.shape:
            yield f"{name} is {tuple(weight.shape)}, not {tuple(expected.shape)}. Cut it into {pieces}."
        if not torch.equal(weight, expected):
            yield f"{name} is not the slice of rank {context.rank}: piece {context.rank} of its {pieces}."


@holds("output and gradients are those of the whole layer")
def computes(context: WorkerContext, layer_class: LayerClass) -> Iterator[str]:
    (full, slice_of), ranks = _whole_layer(context), context.world_size
    layer = layer_class(full, None)
    x, gradient = torch.randn(2, _TOKENS, _D_MODEL)
    mine, whole, through_slice = (x.clone().requires_grad_() for _ in range(3))
    output, expected = layer(mine), full(whole)
    output.backward(gradient)
    expected.backward(gradient)
    # What this rank has by itself: its term of the output, and of the gradient of the input.
    w1, w2, w3 = (slice_of(getattr(full, name).weight, name).detach() for name in ("w1", "w2", "w3"))
    term = (nn.functional.silu(through_slice @ w1.T) * (through_slice @ w3.T)) @ w2.T
    term.backward(gradient)
    diagnoses = {
        "the output is only this rank's term. All-reduce it at the end of forward.": term,
        "the output is the mean of the ranks' terms. They add up: sum, do not average.": expected / ranks,
    }
    yield from unlike(output, expected, diagnoses, "the output is not that of the whole layer.")
    for name in _CUTS:
        found, wanted = getattr(layer, name).grad, slice_of(getattr(full, name).weight.grad, name)
        if found is None:
            yield f"{name} has no gradient. Keep the all-reduce of forward inside autograd."
        own = f"the gradient of {name} is"
        too_large = f"{own} {ranks} times too large. The backward of the last all-reduce sends nothing."
        otherwise = f"{own} not this rank's slice of the whole layer's."
        yield from unlike(found, wanted, {too_large: ranks * wanted}, otherwise)
    if mine.grad is None:
        yield "the input has no gradient."
    own = "the gradient of the input is"
    diagnoses = {
        f"{own} only what comes through this rank's slice. All-reduce it.": through_slice.grad,
        f"{own} a mean. What comes through the slices adds up: do not divide.": whole.grad / ranks,
    }
    yield from unlike(mine.grad, whole.grad, diagnoses, f"{own} not that of the whole layer.")


PROPERTIES = (cuts, computes)
