"""What a correct tensor-parallel SwiGLU layer does, said in sentences to whoever wrote one."""

from collections.abc import Callable

import cloudpickle  # takes classes of a notebook by value
import torch
import torch.distributed as dist
from torch import Tensor, nn

from cs336_systems.model import SwiGLU
from cs336_systems.parallel import WorkerContext, WorkerError, launch

_D_MODEL, _WIDTH, _TOKENS = 6, 5, 4  # _WIDTH of a rank: different sizes, so that a wrong cut shows
_CUTS = {"w1": 0, "w2": 1, "w3": 0}

LayerClass = Callable[[SwiGLU, dist.ProcessGroup | None], nn.Module]


def check_tensor_parallel(layer_class: LayerClass, *, world_size: int = 2, timeout_s: float = 60.0) -> None:
    """Try a tensor-parallel SwiGLU layer in `world_size` CPU processes, against the whole layer.

    The class may be defined in a notebook. It is called as `layer_class(full, group)` with the whole layer,
    equal on every rank, and needs parameters `.w1` and `.w3` (its rows of the whole ones), `.w2` (its
    columns), and `forward(x)`.

    Raises:
        AssertionError: what is wrong, where, and how to mend it.
    """
    name = getattr(layer_class, "__name__", repr(layer_class))
    try:
        candidate = cloudpickle.dumps(layer_class)
        found = launch(find_mistake, world_size, candidate, backend="gloo", timeout_s=timeout_s)
    except WorkerError as error:
        raise AssertionError(f"{name} did not get through: {error}") from error
    failures = [f"{name}, rank {rank}: {mistake}" for rank, mistake in enumerate(found) if mistake]
    if failures:
        raise AssertionError("\n".join(failures))
    print(f"{name}: weights, output and gradients right on {world_size} ranks")


def find_mistake(context: WorkerContext, candidate: bytes) -> str | None:
    """The worker of `check_tensor_parallel`: the first thing that is wrong on this rank, or nothing."""
    ranks, layer_class = context.world_size, cloudpickle.loads(candidate)
    torch.manual_seed(0)
    full = SwiGLU(_D_MODEL, _WIDTH * ranks)
    layer = layer_class(full, None)
    mistakes: list[str | None] = [None] * ranks
    dist.all_gather_object(mistakes, _cuts(layer, full, context))
    if any(mistakes):  # all stop together: who went on would wait for the others
        return mistakes[context.rank]
    x, gradient = torch.randn(2, _TOKENS, _D_MODEL)
    mine, whole = x.clone().requires_grad_(), x.clone().requires_grad_()
    output, expected = layer(mine), full(whole)
    output.backward(gradient)
    expected.backward(gradient)
    part = _through_slice(full, x, gradient, context)
    return (
        _output(output, expected, part[0], ranks)
        or _weight_gradients(layer, full, context)
        or _input_gradient(mine.grad, whole.grad, part[1], ranks)
    )


def _slice(full: SwiGLU, name: str, context: WorkerContext) -> Tensor:
    return getattr(full, name).weight.chunk(context.world_size, _CUTS[name])[context.rank]


def _cuts(layer: nn.Module, full: SwiGLU, context: WorkerContext) -> str | None:
    for name, dimension in _CUTS.items():
        weight, expected = getattr(layer, name, None), _slice(full, name, context)
        which = f"{'rows' if dimension == 0 else 'columns'} (dimension {dimension})"
        if not isinstance(weight, nn.Parameter):
            return f"`.{name}` is no nn.Parameter. Keep this rank's slice of {name} there."
        if weight.shape != expected.shape:
            return f"{name} is {tuple(weight.shape)}, not {tuple(expected.shape)}. Cut it into {which}."
        if not torch.equal(weight, expected):
            return f"{name} is not the slice of rank {context.rank}: piece {context.rank} of its {which}."
    return None


def _through_slice(
    full: SwiGLU, x: Tensor, gradient: Tensor, context: WorkerContext
) -> tuple[Tensor, Tensor | None]:
    """What one rank has by itself: its term of the output, and of the gradient of the input."""
    x = x.clone().requires_grad_()
    w1, w2, w3 = (_slice(full, name, context).detach() for name in ("w1", "w2", "w3"))
    term = (nn.functional.silu(x @ w1.T) * (x @ w3.T)) @ w2.T
    term.backward(gradient)
    return term, x.grad


def _output(found: Tensor, expected: Tensor, part: Tensor, ranks: int) -> str | None:
    if _close(found, expected):
        return None
    if _close(found, part):
        return "the output is only this rank's term. All-reduce it at the end of forward."
    if _close(found, expected / ranks):
        return "the output is the mean of the ranks' terms. They add up: sum, do not average."
    return "the output is not that of the whole layer."


def _weight_gradients(layer: nn.Module, full: SwiGLU, context: WorkerContext) -> str | None:
    for name, dimension in _CUTS.items():
        found = getattr(layer, name).grad
        whole = getattr(full, name).weight.grad
        expected = whole.chunk(context.world_size, dimension)[context.rank]
        if found is None:
            return f"{name} has no gradient. Keep the all-reduce of forward inside autograd."
        if _close(found, context.world_size * expected):
            return (
                f"the gradient of {name} is {context.world_size} times too large. Every term of a sum has "
                "the gradient of the sum: the backward of the last all-reduce sends nothing."
            )
        if not _close(found, expected):
            return f"the gradient of {name} is not this rank's slice of the whole layer's."
    return None


def _input_gradient(found: Tensor | None, expected: Tensor, part: Tensor, ranks: int) -> str | None:
    if found is None:
        return "the input has no gradient."
    if _close(found, expected):
        return None
    if _close(found, part):
        return "the gradient of the input is only what comes through this rank's slice. All-reduce it."
    if _close(found, expected / ranks):
        return "the gradient of the input is a mean. What comes through the slices adds up: do not divide."
    return "the gradient of the input is not that of the whole layer."


def _close(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and torch.allclose(a, b, rtol=1e-4, atol=1e-6)
