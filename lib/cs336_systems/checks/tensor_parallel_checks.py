"""Properties of a tensor-parallel SwiGLU layer and of its parts, with error messages for their author."""

import torch
import torch.distributed as dist
from torch import nn

from cs336_systems.checks.on_ranks import MEET, Property, checker, observed, unlike
from cs336_systems.model import SwiGLU

# Different sizes, so that a wrong cut shows.
_D_MODEL = 6
_WIDTH_OF_A_RANK = 5
_TOKENS = 4
_CUTS = {"w1": 0, "w2": 1, "w3": 0}


@checker
def check_tensor_parallel(layer_class):
    """Try a tensor-parallel SwiGLU layer in `world_size` CPU processes, against the whole layer.

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
        yield MEET if held else f"in a group of this rank alone, {finding} Use the group."


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
        getattr(part, name).weight.data = wanted
        if not isinstance(weight, nn.Parameter):
            yield f"`.{name}` is no nn.Parameter. Keep this rank's slice of {name} there."
        if not torch.equal(weight, wanted):
            yield f"{name}, {weight.shape} is not the slice of rank {rank} of its {('rows', 'columns')[cut]}."
    yield Property("every rank has its slice of each weight")
    yield from _computes_whole(layer, full, part, n)


def _computes_whole(layer, full, part, n):
    """part: a layer of this rank's slices, whose output is one of n terms."""
    x, gradient = torch.randn(2, _TOKENS, _D_MODEL)
    expected, d_input = _both_passes(full, x, gradient)
    term, d_input_of_term = _both_passes(part, x, gradient)
    with observed() as sent:
        output, d_x = _both_passes(layer, x, gradient)
    otherwise = "not that of the whole layer."
    diagnoses = {
        "only this rank's term. All-reduce it at the end of forward.": term,
        "the mean of the ranks' terms. They add up: sum, do not average.": expected / n,
    }
    yield from unlike("the output", output, expected, diagnoses, otherwise)
    for name in _CUTS:
        wanted = getattr(part, name).weight.grad
        diagnoses = {
            f"{n} times too large. The backward of the last sum sends nothing.": n * wanted
        }
        d_weight = getattr(layer, name).grad
        yield from unlike(f"the gradient of {name}", d_weight, wanted, diagnoses, otherwise)
    diagnoses = {
        "only what comes through this rank's slice. All-reduce it.": d_input_of_term,
        "a mean. What comes through the slices adds up: do not divide.": d_input / n,
    }
    yield from unlike("the gradient of the input", d_x, d_input, diagnoses, otherwise)
    if len(sent) > 2:
        yield f"it sends {len(sent)} messages. One in each pass is enough: add up what w1 and w3 share once."
    yield Property("output and gradients are those of the whole layer")


def _both_passes(layer, x, gradient):
    """The output, and the gradient of the input."""
    x = x.clone().requires_grad_()
    output = layer(x)
    output.backward(gradient)
    return output, x.grad


def _adds_up(function, where, group):
    # By rank.
    inputs = 1 + torch.eye(dist.get_world_size())
    gradients = inputs + 100
    rank = dist.get_rank()
    x = inputs[rank].clone().requires_grad_()
    gradient = gradients[rank].clone()
    y = function.apply(x, group)
    y.backward(gradient)
    name = function.__name__
    if not (x.equal(inputs[rank]) and gradient.equal(gradients[rank])):
        yield f"{name} has overwritten its input or gradient. Give all_reduce a copy."
    # In a group of one rank the sum is its own.
    summed = where if group is None else ""
    yield from _sum_or_own(f"{name}'s forward", y, inputs, summed == "forward")
    yield from _sum_or_own(f"{name}'s backward", x.grad, gradients, summed == "backward")
    yield Property(f"{name} adds up in {where}, and nowhere else")


def _sum_or_own(what, result, by_rank, is_sum):
    total = by_rank.sum(0)
    own = by_rank[dist.get_rank()]
    wanted = total if is_sum else own
    diagnoses = {
        "added up over the ranks. Pass on this rank's own.": total,
        "this rank's own, not added up.": own,
        "the mean over the ranks. Add up, do not divide.": by_rank.mean(0),
    }
    yield from unlike(what, result, wanted, diagnoses, f"{result}, not {wanted}.")


def _gathers(layer, group):
    torch.manual_seed(0)
    world = dist.get_world_size()
    ranks = dist.get_process_group_ranks(group)
    n = len(ranks)
    rank = dist.get_rank(group)
    # Of the group's ranks: x (n, tokens, in), weight (n, out, in), gradient (n, all tokens, out).
    xs = torch.randn(world, 4, 3).mT[ranks].requires_grad_()
    weights = torch.randn(world, 5, 4)[ranks].requires_grad_()
    gradients = torch.randn(n, 5, 3 * n).mT
    outputs = xs.flatten(0, 1) @ weights.mT
    outputs.backward(gradients)
    x = xs[rank].detach().clone().requires_grad_()
    weight = weights[rank].detach().clone().requires_grad_()
    with observed() as forward:
        output = layer.apply(x, weight, group)
    diagnoses = {"of this rank's tokens alone. Gather first.": x @ weight.T}
    yield from unlike(
        "the output", output, outputs[rank], diagnoses, "not x of all ranks times this rank's rows."
    )

    kept = _largest_kept(output.grad_fn)
    with observed() as backward:
        output.backward(gradients[rank])
    gathers_again = any("reduce" not in message.collective for message in backward)
    # A rank alone has nothing to gather, and what it keeps is the whole x.
    if n > 1 and (kept >= xs.nbytes or not gathers_again):
        yield "the gathered input is kept for backward. Save x alone, and gather again."
    own_gradient = gradients[rank].chunk(n)[rank]
    yield from _wrong_gradients(x, weight, xs.grad, weights.grad, own_gradient, rank)
    yield from _sends_little("forward", forward, xs, 1)
    yield from _sends_little("backward", backward, xs, 2)
    yield Property("it gathers in both passes, and scatters the gradient of x")


def _wrong_gradients(x, weight, d_xs, d_weights, own_gradient, rank):
    """d_xs, d_weights: what all ranks should have. own_gradient: of this rank's rows of its own tokens."""
    diagnoses = {
        "only what comes through this rank's rows. Scatter it, do not slice.": own_gradient
        @ weight,
        "a mean. What comes through the rows adds up.": d_xs[rank] / len(d_xs),
        "that of another rank's tokens.": d_xs[rank - 1],
    }
    yield from unlike("the gradient of x", x.grad, d_xs[rank], diagnoses, "not right.")
    diagnoses = {
        "of this rank's tokens alone. Gather x again.": own_gradient.T @ x,
        "added up over the ranks. Each has rows of its own.": d_weights.sum(0),
    }
    yield from unlike(
        "the gradient of weight", weight.grad, d_weights[rank], diagnoses, "not right."
    )


def _largest_kept(function):
    """The bytes of the largest tensor that an autograd function keeps for its backward."""
    kept = list(function.saved_tensors) + list(vars(function).values())
    return max(x.untyped_storage().nbytes() for x in kept if torch.is_tensor(x))


def _sends_little(when, messages, whole, most):
    # An all-reduce sends as much as a gather and a scatter.
    numbers = sum(x.numel * (2 if x.collective == "all_reduce" else 1) for x in messages)
    times = numbers / whole.numel()
    if times > most:
        yield f"{when} sends as much as {times:g} gathers of x; {most} would do."
