"""Properties of a tensor-parallel SwiGLU layer, with error messages for its author."""

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.checks.exercise import Property
from cs336_systems.checks.on_ranks import checker, unlike
from cs336_systems.model import SwiGLU

_D_MODEL, _WIDTH, _TOKENS = 6, 5, 4  # _WIDTH of a rank: different sizes, so that a wrong cut shows
_CUTS = {"w1": 0, "w2": 1, "w3": 0}
LayerClass = Callable[[SwiGLU, dist.ProcessGroup | None], nn.Module]


@checker
def check_tensor_parallel(layer_class: LayerClass) -> Iterator[str | Property]:
    """Try a tensor-parallel SwiGLU layer in two CPU processes, against the whole layer.

    It is called as `layer_class(full, group)` with the whole layer, equal on every rank, and needs parameters
    `.w1` and `.w3` (its rows of the whole ones), `.w2` (its columns), `forward(x)`; see `on_ranks.checker`.
    """
    yield from _is_whole(layer_class, None)
    alone, _ = dist.new_subgroups(1)
    for found in _is_whole(layer_class, alone):
        yield (
            ""
            if isinstance(found, Property)
            else f"in a group of this rank alone, {found} Use the group."
        )


def _is_whole(layer_class: LayerClass, group: dist.ProcessGroup | None) -> Iterator[str | Property]:
    torch.manual_seed(0)
    n, rank, width = (
        dist.get_world_size(group),
        dist.get_rank(group),
        _WIDTH * dist.get_world_size(),
    )
    full, part = (
        SwiGLU(_D_MODEL, width),
        SwiGLU(_D_MODEL, width // n),
    )  # part has this rank's slices alone
    layer = layer_class(full, group)
    for name, cut in _CUTS.items():
        weight, wanted = (
            getattr(layer, name, None),
            getattr(full, name).weight.detach().chunk(n, cut)[rank],
        )
        pieces = f"{('rows', 'columns')[cut]} (dimension {cut})"
        if not isinstance(weight, nn.Parameter):
            yield f"`.{name}` is no nn.Parameter. Keep this rank's slice of {name} there."
        if weight.shape != wanted.shape:
            yield f"{name} is {tuple(weight.shape)}, not {tuple(wanted.shape)}. Cut it into {pieces}."
        if not torch.equal(weight, wanted):
            yield f"{name} is not the slice of rank {rank}: piece {rank} of its {pieces}."
        getattr(part, name).weight.data = wanted
    yield Property("every rank has its slice of each weight")

    x, gradient = torch.randn(2, _TOKENS, _D_MODEL)
    mine, of_all, own = (x.clone().requires_grad_() for _ in range(3))
    output, expected, term = layer(mine), full(of_all), part(own)
    torch.autograd.backward([output, expected, term], [gradient] * 3)
    otherwise = "not that of the whole layer."
    diagnoses = {
        "only this rank's term. All-reduce it at the end of forward.": term,
        "the mean of the ranks' terms. They add up: sum, do not average.": expected / n,
    }
    yield from unlike("the output", output, expected, diagnoses, otherwise)
    for name, cut in _CUTS.items():
        found, wanted = (
            getattr(layer, name).grad,
            getattr(full, name).weight.grad.chunk(n, cut)[rank],
        )
        diagnoses = {
            f"{n} times too large. The backward of the last all-reduce sends nothing.": n * wanted
        }
        yield from unlike(
            f"the gradient of {name}", found, wanted, diagnoses, f"{otherwise} Take its slice."
        )
    diagnoses = {
        "only what comes through this rank's slice. All-reduce it.": own.grad,
        "a mean. What comes through the slices adds up: do not divide.": of_all.grad / n,
    }
    yield from unlike("the gradient of the input", mine.grad, of_all.grad, diagnoses, otherwise)
    yield Property("output and gradients are those of the whole layer")
