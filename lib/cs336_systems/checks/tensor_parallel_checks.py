"""Properties of a tensor-parallel SwiGLU layer and of its parts, with error messages for their author."""

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.checks.on_ranks import Property, checker, observed, unlike
from cs336_systems.model import SwiGLU

# Different sizes, so that a wrong cut shows.
_D_MODEL = 6
_WIDTH_OF_A_RANK = 5
_TOKENS = 4
_CUTS = {"w1": 0, "w2": 1, "w3": 0}


@checker
def check_tensor_parallel(layer_class):
    """Try a tensor-parallel SwiGLU layer in two CPU processes, against the whole layer.

    It is called as `layer_class(full, group)` with the whole layer, equal on every rank, and needs parameters
    `.w1` and `.w3` (its rows of the whole ones), `.w2` (its columns), `forward(x)`; see `on_ranks.checker`.
    """
    yield from _in_groups(_is_whole, layer_class)


@checker
def check_sums(forward_sum, *, backward_sum):
    """Ask of functions of a tensor and a group whether one adds up in forward, the other in backward."""
    yield from _in_groups(_adds_up, forward_sum, "forward")
    yield from _in_groups(_adds_up, backward_sum, "backward")


@checker
def check_gather_linear(layer):
    """Ask of `layer.apply(x, weight, group)` whether it gathers, keeps this rank's x, and gathers again."""
    yield from _in_groups(_gathers, layer)


def _in_groups(properties, *candidate):
    """Properties of all ranks together; then they must hold, unsaid, in a group of each rank alone."""
    yield from properties(*candidate, None)
    alone, _ = dist.new_subgroups(1)
    for finding in properties(*candidate, alone):
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


def _adds_up(function, where, group):
    # Of input and gradient, by rank.
    numbers = torch.tensor([[[1.0, 2.0], [11.0, 12.0]], [[3.0, 5.0], [103.0, 105.0]]])
    own = numbers[:, dist.get_rank()]
    x, grad = own.clone()
    x.requires_grad_()
    y = function.apply(x, group)
    y.backward(grad)
    name = function.__name__
    if not torch.stack((x, grad)).equal(own):
        yield f"{name} has overwritten its input or gradient. Give all_reduce a copy."
    for pass_, result, mine, all_ranks in zip(
        ("forward", "backward"), (y, x.grad), own, numbers, strict=True
    ):
        adds_up = pass_ == where and group is None
        wanted = all_ranks.sum(0) if adds_up else mine
        diagnoses = {
            "added up over the ranks. Pass on this rank's own.": all_ranks.sum(0),
            "this rank's own, not added up.": mine,
            "the mean over the ranks. Add up, do not divide.": all_ranks.mean(0),
        }
        yield from unlike(
            f"{name}'s {pass_}", result, wanted, diagnoses, f"{result}, not {wanted}."
        )
    yield Property(f"{name} adds up in {where}, and nowhere else")


def _gathers(layer, group):
    torch.manual_seed(0)
    ranks = [0, 1] if group is None else [dist.get_rank()]
    xs = torch.randn(2, 4, 3).mT[ranks]
    weights = torch.randn(2, 5, 4)[ranks]
    whole = xs.flatten(0, 1)
    grads = torch.randn(2, 5, 6).mT[ranks, : len(whole)]
    place = ranks.index(dist.get_rank())
    own, rows, grad = xs[place], weights[place], grads[place]
    x = own.clone().requires_grad_()
    weight = rows.clone().requires_grad_()
    with observed() as sent:
        y = layer.apply(x, weight, group)
        near = "x of all ranks times this rank's rows."
        diagnoses = {"of this rank's tokens alone. Gather first.": own @ rows.T}
        yield from unlike("the output", y, whole @ rows.T, diagnoses, f"not {near}")
        forward = list(sent)
        tensors = list(y.grad_fn.saved_tensors) + list(vars(y.grad_fn).values())
        kept = max(each.untyped_storage().nbytes() for each in tensors if torch.is_tensor(each))
        y.backward(grad)
    backward = sent[len(forward) :]
    gathers_again = any("reduce" not in each.collective for each in backward)
    if group is None and (kept >= whole.nbytes or not gathers_again):
        yield "the gathered input is kept for backward. Save x alone, and gather again."
    through = grads @ weights
    by_rank = through.sum(0).split(len(own))
    alone = through[place].split(len(own))
    diagnoses = {
        "only what comes through this rank's rows. Scatter it, do not slice.": alone[place],
        "a mean. What comes through the rows adds up.": by_rank[place] / len(ranks),
        "that of another rank's tokens.": by_rank[place - 1],
    }
    yield from unlike("the gradient of x", x.grad, by_rank[place], diagnoses, "not right.")
    of_all = [each.T @ whole for each in grads]
    diagnoses = {
        "of this rank's tokens alone. Gather x again.": grad.split(len(own))[place].T @ own,
        "added up over the ranks. Each has rows of its own.": sum(of_all),
    }
    yield from unlike("the gradient of weight", weight.grad, of_all[place], diagnoses, "not right.")
    for pass_, messages, most in (("forward", forward, 1), ("backward", backward, 2)):
        # An all-reduce sends as much as a gather and a scatter.
        sizes = [each.numel * (1 + (each.collective == "all_reduce")) for each in messages]
        times = sum(sizes) / whole.numel()
        if times > most:
            yield f"{pass_} sends as much as {times:g} gathers of x; {most} would do."
    yield Property("it gathers in both passes, and scatters the gradient of x")
