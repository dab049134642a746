"""Properties of a tensor-parallel SwiGLU layer, with error messages for its author."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.checks.on_ranks import checker, unlike
from cs336_systems.model import SwiGLU

_D_MODEL, _WIDTH, _TOKENS = 6, 5, 4  # _WIDTH of a rank: different sizes, so that a wrong cut shows
_CUTS = {"w1": 0, "w2": 1, "w3": 0}
LayerClass = Callable[[SwiGLU, dist.ProcessGroup | None], nn.Module]


@checker
def check_tensor_parallel(layer_class: LayerClass) -> Iterator[str]:
    """Try a tensor-parallel SwiGLU layer in two CPU processes, against the whole layer.

    It is called as `layer_class(full, group)` with the whole layer, equal on every rank, and needs parameters
    `.w1` and `.w3` (its rows of the whole ones), `.w2` (its columns), `forward(x)`; see `on_ranks.checker`.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    full = SwiGLU(_D_MODEL, _WIDTH * ranks)
    layer, whole = layer_class(full, None), {name: getattr(full, name).weight for name in _CUTS}
    slices = {name: whole[name].detach().chunk(ranks, cut)[rank] for name, cut in _CUTS.items()}
    for name, cut in _CUTS.items():
        weight, pieces = getattr(layer, name, None), f"{('rows', 'columns')[cut]} (dimension {cut})"
        if not isinstance(weight, nn.Parameter):
            yield f"`.{name}` is no nn.Parameter. Keep this rank's slice of {name} there."
        if weight.shape != (shape := slices[name].shape):
            yield f"{name} is {tuple(weight.shape)}, not {tuple(shape)}. Cut it into {pieces}."
        if not torch.equal(weight, slices[name]):
            yield f"{name} is not the slice of rank {rank}: piece {rank} of its {pieces}."
    yield "✓ every rank has its slice of each weight"

    x, gradient = torch.randn(2, _TOKENS, _D_MODEL)
    mine, of_all, own = (x.clone().requires_grad_() for _ in range(3))
    output, expected = layer(mine), full(of_all)
    # What this rank has by itself: its term of the output, and of the gradient of the input.
    term = (nn.functional.silu(own @ slices["w1"].T) * (own @ slices["w3"].T)) @ slices["w2"].T
    for each in (output, expected, term):
        each.backward(gradient)
    diagnoses = {
        "the output is only this rank's term. All-reduce it at the end of forward.": term,
        "the output is the mean of the ranks' terms. They add up: sum, do not average.": expected / ranks,
    }
    yield from unlike(output, expected, diagnoses, "the output is not that of the whole layer.")
    for name, cut in _CUTS.items():
        found, wanted = getattr(layer, name).grad, whole[name].grad.chunk(ranks, cut)[rank]
        if found is None:
            yield f"{name} has no gradient. Keep the all-reduce of forward inside autograd."
        its = f"the gradient of {name} is"
        too_large = f"{its} {ranks} times too large. The backward of the last all-reduce sends nothing."
        otherwise = f"{its} not this rank's slice of the whole layer's."
        yield from unlike(found, wanted, {too_large: ranks * wanted}, otherwise)
    if mine.grad is None:
        yield "the input has no gradient."
    its = "the gradient of the input is"
    diagnoses = {
        f"{its} only what comes through this rank's slice. All-reduce it.": own.grad,
        f"{its} a mean. What comes through the slices adds up: do not divide.": of_all.grad / ranks,
    }
    yield from unlike(mine.grad, of_all.grad, diagnoses, f"{its} not that of the whole layer.")
    yield "✓ output and gradients are those of the whole layer"
