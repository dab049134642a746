"""Properties of a sharded optimizer, with error messages for its author."""

from copy import deepcopy

import torch
import torch.distributed as dist
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from cs336_systems.checks.on_ranks import (
    MEET,
    Property,
    checker_in_any_world,
    from_all,
    observed,
    unlike,
)

# They alternate: assigned in turn, all large ones would fall to one rank.
_SHAPES = 4 * ((16, 16), (16,))


@checker_in_any_world
def check_sharded_optimizer(make, *, only_states=False):
    """Try a sharded optimizer in `world_size` CPU processes, against the optimizer that it shards.

    It is called as `make(params, optimizer_cls, **kwargs)`; see `on_ranks.checker`.
    only_states: ask only whether it is an optimizer whose states are shared, and of the weights only whether
        each rank updates those that are its own by the candidate's `owners`.
    """
    yield from _shares_states(make)
    if only_states:
        yield from _updates_its_own(make)
        return
    for properties in (_updates_all, _leaves_unused_alone, _has_groups, _runs_closures):
        yield from properties(make)


def _shares_states(make):
    pair = _Pair(make, groups=_first)
    candidate = pair.candidate
    if not isinstance(candidate, Optimizer):
        yield "it is no torch.optim.Optimizer. Derive from it and call super().__init__(params, kwargs)."
    if "lr" not in candidate.param_groups[0]:
        yield "its param_groups have no 'lr'. Hand the settings to super().__init__(params, kwargs)."
    pair.step_and_add_others()
    held = sum(len(group["params"]) for group in candidate.param_groups)
    if held != len(_SHAPES):
        yield f"its param_groups hold {held} parameters of 8. Only the optimizer inside holds a shard."
    yield Property("It is a torch.optim.Optimizer, and its groups hold all parameters")
    pair.step()
    candidate.zero_grad()
    left = sum(x.grad is not None and bool(x.grad.any()) for x in pair.sharded)
    if left:
        yield f"after zero_grad() {left} of 8 gradients are there. Clear all of them."
    yield from pair.sharing_mistakes()
    yield Property(
        "The states of each parameter are kept by one rank, and by bytes all keep about as much"
    )


def _updates_its_own(make):
    pair = _Pair(make, groups=_first)
    pair.step_and_add_others()
    pair.step()
    owners = pair.candidate.owners
    if len(owners) != len(_SHAPES):
        yield f"owners has {len(owners)} parameters of 8. Keep those of every group."
    for name, x, alone, before in pair.tensors():
        wanted = alone if owners[x] == dist.get_rank() else before
        if not torch.equal(x, wanted):
            yield f"{name} is not updated by owner {owners[x]} alone, with its group's settings."
    yield Property("A rank updates what `owners` gives it, with the settings of its group")


def _updates_all(make):
    for pair in (_Pair(make), _Pair(make, kind=SGD, lr=0.1, momentum=0.9)):
        nbytes = sum(x.nbytes for x in pair.sharded)
        for n in range(4):
            with observed() as sent:
                mistakes = pair.step(f"with {type(pair.optimizer).__name__}, step {n + 1}:")
            yield from mistakes
            # Of equal shares each may be filled up.
            if sum(message.bytes for message in sent) >= 2 * nbytes:
                yield "step() sends the parameters twice, or more. Broadcast each once, from its owner."
            yield MEET
    yield Property("Every rank has the weights that one AdamW gives, or one SGD, bit for bit")


def _leaves_unused_alone(make):
    pair = _Pair(make)
    for _ in range(2):
        mistakes = pair.step("without a gradient of parameter 2,", without=2)
        if pair.sharded[2].grad is not None:
            yield "a parameter without a gradient was given one. Leave its .grad None: with zeros it decays."
        yield from mistakes
    yield Property("A parameter without a gradient is left alone: no decay, and still no gradient")


def _has_groups(make):
    pair = _Pair(
        make,
        groups=lambda params: [
            {"params": params[::2], "weight_decay": 0.5},
            {"params": params[1::2], "lr": 0.01},
        ],
    )
    yield from pair.step("with two groups,", "Hand the one inside groups, each with its settings.")
    yield MEET
    for optimizer in (pair.optimizer, pair.candidate):
        optimizer.param_groups[0]["lr"] = 1e-3
        optimizer.param_groups[1] |= {"betas": (0.5, 0.7), "weight_decay": 0.9}
    yield from pair.step(
        "after changes of settings in param_groups, as schedulers make them,",
        "Copy all settings into all groups of the optimizer inside before its step.",
    )
    yield Property("Groups keep their settings, and what a scheduler changes in them arrives")

    pair = _Pair(make, groups=_first)
    pair.step_and_add_others()
    for _ in range(2):
        yield from pair.step(
            "after add_param_group,",
            "Give the optimizer inside its part, with its settings; keep the first group's states.",
        )
        yield MEET
    yield from pair.sharing_mistakes()
    yield Property(
        "A group that is added after some steps is trained with its settings, and sharded like the first"
    )


def _runs_closures(make):
    pair = _Pair(make)
    calls = []

    def closure():
        calls.append(torch.is_grad_enabled())
        pair.set_gradients()
        return torch.tensor(3.0)

    for optimizer in (pair.optimizer, pair.candidate):
        optimizer.param_groups[0]["lr"] = 0.2
    loss = pair.candidate.step(closure)
    pair.optimizer.step()
    if len(calls) != 1:
        yield f"step(closure) called the closure {len(calls)} times. Call it once, on every rank."
    if not all(calls):
        yield "step(closure) called the closure under no_grad. Call it under torch.enable_grad()."
    if loss != 3:
        yield f"step(closure) returned {loss}, and the closure 3.0. Return the closure's loss."
    for mistake in pair.mistakes():
        yield f"step(closure), with another lr: {mistake} Run it first; copy settings there, too."
    yield Property("step(closure) runs the closure, once, before the update, and returns its loss")


def _first(params):
    """The first of two groups, a small and a large parameter; `step_and_add_others` adds the second.

    If that dealt all parameters anew, the small one would get another owner, which lacks its states.
    """
    return [{"params": params[1:3], "weight_decay": 0.5}]


class _Pair:
    """The same parameters twice: `alone`, of one `optimizer`, and `sharded`, of the `candidate`.

    inside: the optimizers that the candidate has made. before: the parameters before the last step.
    """

    def __init__(self, make, kind=AdamW, groups=list, **settings):
        torch.manual_seed(0)
        settings = settings or {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1}
        self.alone = [nn.Parameter(torch.randn(shape)) for shape in _SHAPES]
        self.sharded = deepcopy(self.alone)
        self.generator = torch.Generator(torch.get_default_device()).manual_seed(0)
        self.inside = inside = []

        class Recording(kind):
            def __init__(self, *args, **settings):
                super().__init__(*args, **settings)
                inside.append(self)

        self.optimizer = kind(groups(self.alone), **settings)
        self.candidate = make(groups(self.sharded), Recording, **settings)

    def set_gradients(self, without=None):
        """The same on every rank, as data parallelism leaves them; `before` is set to the parameters."""
        self.before = [x.clone() for x in self.sharded]
        for n, parameter in enumerate(self.alone):
            gradient = torch.randn(parameter.shape, generator=self.generator)
            parameter.grad = None if n == without else gradient
            self.sharded[n].grad = deepcopy(parameter.grad)

    def step(self, when="", mend="", without=None):
        """A step of both, and the mistakes of this rank after it."""
        self.set_gradients(without)
        self.optimizer.step()
        self.candidate.step()
        return [f"{when} {mistake} {mend}".strip() for mistake in self.mistakes()]

    def step_and_add_others(self):
        """A step with the first group of `_first`, and the second one."""
        self.step()
        for optimizer, params in ((self.optimizer, self.alone), (self.candidate, self.sharded)):
            optimizer.add_param_group({"params": params[3:] + params[:1], "lr": 0.01})

    def tensors(self):
        """Of each parameter its name, and it as the candidate left it, one optimizer, and the last step."""
        names = [f"parameter {n} of 8, of shape {shape}," for n, shape in enumerate(_SHAPES)]
        return zip(names, self.sharded, self.alone, self.before, strict=True)

    def mistakes(self):
        """Which parameters are not, bit for bit, what one optimizer makes of them."""
        not_sent = "as before the step: updated by its owner, if at all. Broadcast with src=owner."
        otherwise = "not what one optimizer alone makes of it."
        for name, sharded, alone, before in self.tensors():
            yield from unlike(name, sharded, alone, {not_sent: before}, otherwise, torch.equal)

    def sharing_mistakes(self):
        """By the bytes of states: an optimizer inside may keep them of slices of all parameters."""
        shares = from_all(sum(_state_bytes(self.inside)))
        sizes = _state_bytes([self.optimizer])
        whole = sum(sizes)
        if abs(sum(shares) / whole - 1) > 0.01:
            yield f"the ranks keep {sum(shares)} bytes of states, one optimizer {whole}. Keep what it owns."
        most = max(shares)
        if most > whole / len(shares) + max(sizes):
            yield f"rank {shares.index(most)} keeps {most / whole:.0%} of the states. Assign by bytes."


def _state_bytes(optimizers):
    """Of the moments of each parameter; a count of steps is one number."""
    # By identity: optimizers of single buckets may share a state.
    return {
        id(state): sum(x.nbytes for x in state.values() if x.numel() > 1)
        for optimizer in optimizers
        for state in optimizer.state.values()
    }.values()
