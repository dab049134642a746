"""What a correct tensor-parallel SwiGLU layer does, said in sentences to whoever wrote one."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.checks.on_ranks import Case, check_on_ranks, unlike
from cs336_systems.model import SwiGLU
from cs336_systems.parallel import WorkerContext

_D_MODEL, _WIDTH, _TOKENS = 6, 5, 4  # _WIDTH of a rank: different sizes, so that a wrong cut shows
_CUTS = {"w1": 0, "w2": 1, "w3": 0}

LayerClass = Callable[[SwiGLU, dist.ProcessGroup | None], nn.Module]


def check_tensor_parallel(layer_class: LayerClass) -> None:
    """Try a tensor-parallel SwiGLU layer in two CPU processes, against the whole layer.

    The class may be defined in a notebook. It is called as `layer_class(full, group)` with the whole layer,
    equal on every rank, and needs parameters `.w1` and `.w3` (its rows of the whole ones), `.w2` (its
    columns), and `forward(x)`.

    Raises:
        AssertionError: what is wrong, where, and how to mend it.
    """
    check_on_ranks(layer_class, {}, CASES)


def _slice(whole: Tensor, name: str, context: WorkerContext) -> Tensor:
    return whole.chunk(context.world_size, _CUTS[name])[context.rank]


def _whole_layer(context: WorkerContext) -> SwiGLU:
    torch.manual_seed(0)
    return SwiGLU(_D_MODEL, _WIDTH * context.world_size)


def _cuts(context: WorkerContext, layer_class: LayerClass) -> str | None:
    """every rank has its slice of each weight"""
    full = _whole_layer(context)
    layer = layer_class(full, None)
    for name, dimension in _CUTS.items():
        weight, expected = getattr(layer, name, None), _slice(getattr(full, name).weight, name, context)
        which = f"{'rows' if dimension == 0 else 'columns'} (dimension {dimension})"
        if not isinstance(weight, nn.Parameter):
            return f"`.{name}` is no nn.Parameter. Keep this rank's slice of {name} there."
        if weight.shape != expected.shape:
            return f"{name} is {tuple(weight.shape)}, not {tuple(expected.shape)}. Cut it into {which}."
        if not torch.equal(weight, expected):
            return f"{name} is not the slice of rank {context.rank}: piece {context.rank} of its {which}."
    return None


def _computes(context: WorkerContext, layer_class: LayerClass) -> str | None:
    """output and gradients are those of the whole layer"""
    full, ranks = _whole_layer(context), context.world_size
    layer = layer_class(full, None)
    x, gradient = torch.randn(2, _TOKENS, _D_MODEL)
    mine, whole, through_slice = (x.clone().requires_grad_() for _ in range(3))
    output, expected = layer(mine), full(whole)
    output.backward(gradient)
    expected.backward(gradient)
    # What this rank has by itself: its term of the output, and of the gradient of the input.
    w1, w2, w3 = (_slice(getattr(full, name).weight, name, context).detach() for name in ("w1", "w2", "w3"))
    term = (nn.functional.silu(through_slice @ w1.T) * (through_slice @ w3.T)) @ w2.T
    term.backward(gradient)
    suspects = {
        "the output is only this rank's term. All-reduce it at the end of forward.": term,
        "the output is the mean of the ranks' terms. They add up: sum, do not average.": expected / ranks,
    }
    return (
        unlike(output, expected, suspects, "the output is not that of the whole layer.")
        or _weight_gradients(layer, full, context)
        or _input_gradient(mine.grad, whole.grad, through_slice.grad, ranks)
    )


def _weight_gradients(layer: nn.Module, full: SwiGLU, context: WorkerContext) -> str | None:
    ranks = context.world_size
    for name in _CUTS:
        found, expected = getattr(layer, name).grad, _slice(getattr(full, name).weight.grad, name, context)
        if found is None:
            return f"{name} has no gradient. Keep the all-reduce of forward inside autograd."
        too_large = (
            f"the gradient of {name} is {ranks} times too large. Every term of a sum has the gradient of the "
            "sum: the backward of the last all-reduce sends nothing."
        )
        otherwise = f"the gradient of {name} is not this rank's slice of the whole layer's."
        if mistake := unlike(found, expected, {too_large: ranks * expected}, otherwise):
            return mistake
    return None


def _input_gradient(found: Tensor | None, expected: Tensor, part: Tensor, ranks: int) -> str | None:
    if found is None:
        return "the input has no gradient."
    gradient = "the gradient of the input is"
    suspects = {
        f"{gradient} only what comes through this rank's slice. All-reduce it.": part,
        f"{gradient} a mean. What comes through the slices adds up: do not divide.": expected / ranks,
    }
    return unlike(found, expected, suspects, f"{gradient} not that of the whole layer.")


CASES: tuple[Case, ...] = (_cuts, _computes)
