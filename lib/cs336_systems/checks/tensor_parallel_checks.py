"""Properties of a tensor-parallel SwiGLU layer, with error messages for its author."""

from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.checks.exercise import StepCheck
from cs336_systems.checks.on_ranks import Findings, Property, checker, observed, unlike
from cs336_systems.model import SwiGLU
from cs336_systems.parallel import launch

# Different sizes, so that a wrong cut shows.
_D_MODEL = 6
_WIDTH_OF_A_RANK = 5
_TOKENS = 4
_CUTS = {"w1": 0, "w2": 1, "w3": 0}
LayerClass = Callable[[SwiGLU, dist.ProcessGroup | None], nn.Module]


@checker
def check_tensor_parallel(layer_class: LayerClass) -> Findings:
    """Try a tensor-parallel SwiGLU layer in two CPU processes, against the whole layer.

    It is called as `layer_class(full, group)` with the whole layer, equal on every rank, and needs parameters
    `.w1` and `.w3` (its rows of the whole ones), `.w2` (its columns), `forward(x)`; see `on_ranks.checker`.
    """
    yield from _is_whole(layer_class, None)
    alone, _ = dist.new_subgroups(1)
    for finding in _is_whole(layer_class, alone):
        held = isinstance(finding, Property)
        yield "" if held else f"in a group of this rank alone, {finding} Use the group."


def _is_whole(layer_class, group):
    torch.manual_seed(0)
    n = dist.get_world_size(group)
    rank = dist.get_rank(group)
    width = _WIDTH_OF_A_RANK * dist.get_world_size()
    full = SwiGLU(_D_MODEL, width)
    # It gets this rank's slices alone.
    part = SwiGLU(_D_MODEL, width // n)
    layer = layer_class(full, group)
    for name, cut in _CUTS.items():
        weight = getattr(layer, name, None)
        wanted = getattr(full, name).weight.detach().chunk(n, cut)[rank]
        if not isinstance(weight, nn.Parameter):
            yield f"`.{name}` is no nn.Parameter. Keep this rank's slice of {name} there."
        if not torch.equal(weight, wanted):
            yield f"{name}, {weight.shape} is not the slice of rank {rank} of its {('rows', 'columns')[cut]}."
        getattr(part, name).weight.data = wanted
    yield Property("every rank has its slice of each weight")

    x, gradient = torch.randn(2, _TOKENS, _D_MODEL)
    x_of_layer, x_of_full, x_of_part = (x.clone().requires_grad_() for _ in range(3))
    expected = full(x_of_full)
    term = part(x_of_part)
    with observed() as sent:
        output = layer(x_of_layer)
        torch.autograd.backward([output, expected, term], [gradient] * 3)
    otherwise = "not that of the whole layer."
    diagnoses = {
        "only this rank's term. All-reduce it at the end of forward.": term,
        "the mean of the ranks' terms. They add up: sum, do not average.": expected / n,
    }
    yield from unlike("the output", output, expected, diagnoses, otherwise)
    for name, cut in _CUTS.items():
        d_weight = getattr(layer, name).grad
        wanted = getattr(full, name).weight.grad.chunk(n, cut)[rank]
        diagnoses = {
            f"{n} times too large. The backward of the last sum sends nothing.": n * wanted
        }
        yield from unlike(f"the gradient of {name}", d_weight, wanted, diagnoses, otherwise)
    d_input = x_of_full.grad
    diagnoses = {
        "only what comes through this rank's slice. All-reduce it.": x_of_part.grad,
        "a mean. What comes through the slices adds up: do not divide.": d_input / n,
    }
    yield from unlike("the gradient of the input", x_of_layer.grad, d_input, diagnoses, otherwise)
    if len(sent) > 2:
        yield f"it sends {len(sent)} messages. One in each pass is enough: add up what w1 and w3 share once."
    yield Property("output and gradients are those of the whole layer")


Function = type[torch.autograd.Function]
# What a step shows of each property on a rank: its name, whether it holds, and a diagnosis.
Found = list[tuple[str, bool, str]]


def check_sums(check: StepCheck, forward_sum: Function, backward_sum: Function) -> None:
    """Show whether one adds up two ranks' tensors in forward, the other in backward."""
    _show(check, launch(_try_sums, 2, forward_sum, backward_sum, backend="gloo", timeout_s=60))


def check_gather_linear(check: StepCheck, layer: Function) -> None:
    """Show whether `layer.apply(x, weight, None)` gathers, keeps this rank's tokens and gathers again."""
    _show(check, launch(_try_gather, 2, layer, backend="gloo", timeout_s=60))


def _show(check, by_rank):
    for same in zip(*by_rank, strict=True):
        # The first that does not hold, or else any.
        check(*min(same, key=lambda found: found[1]))


def _try_sums(context, forward_sum, backward_sum):
    # Of input and gradient, by rank.
    numbers = torch.tensor([[[1.0, 2.0], [11.0, 12.0]], [[3.0, 5.0], [103.0, 105.0]]])
    alone, _ = dist.new_subgroups(1)
    passes = ("forward", "backward")
    found = []
    for function, summed in ((forward_sum, "forward"), (backward_sum, "backward")):
        for group, ranks in ((None, ""), (alone, ", a group of this rank alone")):
            own = numbers[:, context.rank]
            x, grad = own.clone()
            x.requires_grad_()
            y = function.apply(x, group)
            y.backward(grad)
            for pass_, made, mine, both in zip(passes, (y, x.grad), own, numbers, strict=True):
                adds_up = pass_ == summed and group is None
                what = "the sum of the ranks" if adds_up else "this rank's own, passed on"
                told = f"{function.__name__}, {pass_}{ranks}: {what}"
                wanted = both.sum(0) if adds_up else mine
                found.append((told, made.equal(wanted), str(made.tolist())))
            found.append(
                (
                    f"{function.__name__}{ranks} keeps input and gradient",
                    torch.stack((x, grad)).equal(own),
                    "give all_reduce a copy",
                )
            )
    return found


def _try_gather(context, layer):
    torch.manual_seed(0)
    rank = context.rank
    xs = torch.randn(2, 4, 3).mT
    weights = torch.randn(2, 5, 4)
    grads = torch.randn(2, 5, 6).mT
    x = xs[rank].clone().requires_grad_()
    weight = weights[rank].clone().requires_grad_()
    y = layer.apply(x, weight, None)
    assert len(y) == 6, f"the output is {tuple(y.shape)}: gathered?"
    tensors = list(y.grad_fn.saved_tensors) + list(vars(y.grad_fn).values())
    kept = [t.untyped_storage().nbytes() for t in tensors if torch.is_tensor(t)]
    try:
        y.backward(grads[rank])
    except RuntimeError as error:
        raise AssertionError(f"backward: {error}; gather again?") from error
    near = partial(torch.allclose, atol=1e-5)
    whole = xs.flatten(0, 1)
    is_whole = near(y, whole @ weights[rank].T)
    is_x_alone = max(kept, default=0) < whole.nbytes
    d_x = (grads @ weights).sum(0).split(3)[rank]
    d_weight = grads[rank].T @ whole
    alone, _ = dist.new_subgroups(1)
    in_group = _is_of_this_rank(layer, xs[rank], weights[rank], grads[rank, : len(x)], alone)
    return [
        ("output of all tokens", is_whole, "gathered?"),
        ("the weight's gradient is of all tokens", near(weight.grad, d_weight), "gather again"),
        ("the input's is summed, then cut", near(x.grad, d_x), "scattered, not sliced?"),
        ("the gathered input is not kept", is_x_alone, "save x alone"),
        ("a group of this rank alone: its own tokens", in_group, "in backward, too?"),
    ]


def _is_of_this_rank(layer, x, weight, grad, alone):
    x = x.clone().requires_grad_()
    weight = weight.clone().requires_grad_()
    try:
        y = layer.apply(x, weight, alone)
        y.backward(grad)
        wanted = (x @ weight.T, grad @ weight, grad.T @ x)
        return all(map(partial(torch.allclose, atol=1e-5), (y, x.grad, weight.grad), wanted))
    except RuntimeError:  # tokens of other ranks are too many
        return False
