"""Properties of a sharded optimizer, with error messages for its author."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from cs336_systems.checks.on_ranks import Property, check_on_ranks, from_all, holds
from cs336_systems.parallel import WorkerContext

_WIDTH = 16
_SETTINGS = {"lr": 0.1, "betas": (0.8, 0.9), "weight_decay": 0.1}
# Of one parameter on one rank after a step.
_RIGHT, _AS_BEFORE, _WRONG = "right", "as before", "wrong"
Make = Callable[..., Optimizer]


def check_sharded_optimizer(
    optimizer_class: type[Optimizer],
    *,
    world_size: int = 2,
    only_states: bool = False,
    thorough: bool = False,
    **wrapper_arguments: Any,
) -> None:
    """Try a sharded optimizer in `world_size` CPU processes, against the optimizer that it shards.

    The class may be defined in a notebook. It is called as `optimizer_class(params, optimizer_cls,
    **kwargs)`. What holds is printed, property by property.

    Args:
        only_states: ask only whether it is an optimizer whose states are shared, not yet for the weights.
        thorough: also ask for what the assignment does not: two dtypes, and fewer parameters than ranks.

    Raises:
        AssertionError: what is wrong, where, and how to mend it.
    """
    asked = [is_an_optimizer, shares_states, clears_gradients] if only_states else properties(thorough)
    check_on_ranks(optimizer_class, wrapper_arguments, asked, world_size)


def properties(thorough: bool) -> list[Property]:
    """What `check_sharded_optimizer` tries, in this order."""
    asked = [is_an_optimizer, updates_everywhere, shares_states, goes_on, runs_closures, clears_gradients]
    asked += [leaves_others_alone, keeps_groups, takes_later_groups]
    return [*asked, *_UNUSUAL] if thorough else asked


class _Pair:
    """The same parameters twice, with their optimizers: one alone, and the candidate's.

    Matrices and vectors alternate: assigned in turn, all large ones would fall to one rank.

    Attributes:
        alone, sharded: the parameters of `optimizer` and of `candidate`.
        inside: the optimizers that the candidate has made.
    """

    def __init__(
        self,
        make: Make,
        kind: type[Optimizer] = AdamW,
        settings: dict[str, Any] = _SETTINGS,
        *,
        count: int = 8,
        dtypes: tuple[torch.dtype, ...] = (torch.float32,),
        groups: Callable[[list[nn.Parameter]], Any] = list,
    ):
        torch.manual_seed(0)
        shapes = [(_WIDTH, _WIDTH), (_WIDTH,)]
        self.before = [torch.randn(shapes[n % 2]).to(dtypes[n // 2 % len(dtypes)]) for n in range(count)]
        self.alone, self.sharded = ([nn.Parameter(x.clone()) for x in self.before] for _ in range(2))
        self.step_number, self.inside = 0, []
        made = self.inside

        class Recording(kind):
            def __init__(self, *args: Any, **settings: Any):
                super().__init__(*args, **settings)
                made.append(self)

        self.optimizer = kind(groups(self.alone), **settings)
        self.candidate = make(groups(self.sharded), Recording, **settings)

    def set_gradients(self, *, without: int | None = None) -> None:
        """The same on every rank, as data parallelism leaves them."""
        generator = torch.Generator().manual_seed(self.step_number)
        self.step_number += 1
        self.before = [x.detach().clone() for x in self.sharded]
        for number, (one, other) in enumerate(zip(self.alone, self.sharded, strict=True)):
            gradient = torch.randn(one.shape, generator=generator).to(one.dtype)
            one.grad, other.grad = (None, None) if number == without else (gradient, gradient.clone())

    def step(self, **options: Any) -> str:
        """A step of both: the first parameter that is then not right everywhere."""
        self.set_gradients(**options)
        self.optimizer.step()
        self.candidate.step()
        return self.mistake()

    def with_states(self) -> list[int]:
        """Numbers of the parameters that have states on this rank."""
        states = [optimizer.state for optimizer in self.inside]
        return [number for number, x in enumerate(self.sharded) if any(state.get(x) for state in states)]

    def statuses(self) -> list[tuple[str, ...]]:
        """For each parameter, what it is on each rank."""
        own = [
            _RIGHT if torch.equal(one, other) else _AS_BEFORE if torch.equal(other, before) else _WRONG
            for one, other, before in zip(self.alone, self.sharded, self.before, strict=True)
        ]
        return list(zip(*from_all(own), strict=True))

    def mistake(self) -> str:
        """The first parameter that is not right everywhere, and the usual reason; or ""."""
        for number, statuses in enumerate(self.statuses()):
            name, found = self.name(number), set(statuses)
            if found == {_AS_BEFORE}:
                return (
                    f"{name} is as before the step, on every rank. Its owner updates and sends it, src=owner."
                )
            if found == {_RIGHT, _AS_BEFORE}:
                where = ", ".join(str(rank) for rank, status in enumerate(statuses) if status == _RIGHT)
                return f"{name} is updated on rank {where} alone. broadcast each parameter from its owner."
            if _WRONG in found:
                return f"{name} is not what one optimizer alone makes of it."
        return ""

    def sharing_mistake(self) -> str:
        """The first parameter whose states not one rank keeps, or a rank that keeps too many; or ""."""
        kept = from_all(self.with_states())
        for number in range(len(self.sharded)):
            keepers = [str(rank) for rank, numbers in enumerate(kept) if number in numbers]
            if len(keepers) != 1:
                who = f"ranks {', '.join(keepers)}" if keepers else "no rank"
                return (
                    f"{who} keep states of {self.name(number)} where one rank should. Give the optimizer "
                    "inside only the parameters that this rank owns."
                )
        sizes = [parameter.nbytes for parameter in self.sharded]
        shares = [sum(sizes[number] for number in numbers) for numbers in kept]
        if max(shares) <= sum(sizes) / len(shares) + max(sizes):
            return ""
        rank, share = shares.index(max(shares)), max(shares) / sum(sizes)
        return f"rank {rank} keeps {share:.0%} of the states. Assign by bytes, not by number."

    def name(self, number: int) -> str:
        return f"parameter {number} of {len(self.sharded)}, of shape {tuple(self.sharded[number].shape)},"


def _told(*mistakes: str) -> Iterator[str]:
    return filter(None, mistakes)


@holds("It is a torch.optim.Optimizer, and its groups hold all parameters")
def is_an_optimizer(context: WorkerContext, make: Make) -> Iterator[str]:
    pair = _Pair(make)
    if not isinstance(pair.candidate, Optimizer):
        yield "it is no torch.optim.Optimizer. Derive from it and call super().__init__(params, kwargs)."
    groups = pair.candidate.param_groups
    held = {id(parameter) for group in groups for parameter in group["params"]}
    if held != {id(parameter) for parameter in pair.sharded}:
        yield (
            f"its param_groups hold {len(held)} parameters and were given {len(pair.sharded)}. zero_grad and "
            "clipping look there: only the optimizer inside holds this rank's shard alone."
        )
    if "lr" not in groups[0]:
        yield "its param_groups have no 'lr'. Hand the settings to super().__init__(params, kwargs)."


@holds("After a step every rank has the weights that one optimizer gives")
def updates_everywhere(context: WorkerContext, make: Make) -> Iterator[str]:
    pair = _Pair(make)
    mistake = pair.step()
    for reason, settings, steps in (
        ("the settings were AdamW's defaults. Hand **kwargs to optimizer_cls", {}, 1),
        ("it had been updated twice. Let one rank update it, once", _SETTINGS, 2),
    ):
        other = _Pair(lambda params, kind, **settings: kind(params, **settings), settings=settings)
        other.set_gradients()
        for _ in range(steps):
            other.optimizer.step()
        both = zip(pair.sharded, pair.alone, other.alone, strict=True)
        as_if = any(torch.equal(x, y) and not torch.equal(x, right) for x, right, y in both)
        if any(from_all(as_if)) and "not what" in mistake:
            mistake += f" It is as if {reason}."
    yield from _told(mistake)


@holds("The states of each parameter are kept by one rank, and by bytes all keep about as much")
def shares_states(context: WorkerContext, make: Make) -> Iterator[str]:
    pair = _Pair(make)
    pair.step()
    return _told(pair.sharing_mistake())


@holds("So it goes on, with AdamW and with SGD, bit for bit")
def goes_on(context: WorkerContext, make: Make) -> Iterator[str]:
    for kind, settings in ((AdamW, _SETTINGS), (SGD, {"lr": 0.1, "momentum": 0.9})):
        pair = _Pair(make, kind, settings)
        for number in range(4):
            if mistake := pair.step():  # the same on all ranks
                yield f"with {kind.__name__}, after step {number + 1}: {mistake}"


@holds("step(closure) runs the closure, once, before the update, and returns its loss")
def runs_closures(context: WorkerContext, make: Make) -> Iterator[str]:
    pair, calls = _Pair(make), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        pair.set_gradients()
        return torch.tensor(3.0)

    loss = pair.candidate.step(closure)
    pair.optimizer.step()
    mistake = pair.mistake()
    if len(calls) != 1:
        yield f"step(closure) called the closure {len(calls)} times. Call it once, on every rank."
    if not all(calls):
        yield "step(closure) called the closure under no_grad. Call it under torch.enable_grad()."
    if loss is None or float(loss) != 3:
        yield f"step(closure) returned {loss}, and the closure 3.0. Return the closure's loss."
    yield from _told(mistake)


@holds("zero_grad() clears every gradient, not only those of the shard")
def clears_gradients(context: WorkerContext, make: Make) -> Iterator[str]:
    pair = _Pair(make)
    pair.step()
    pair.candidate.zero_grad()
    left = [parameter.grad for parameter in pair.sharded if parameter.grad is not None]
    if any(gradient.any() for gradient in left):
        yield f"after zero_grad() {len(left)} of {len(pair.sharded)} gradients are there. Clear all of them."


@holds("A parameter without a gradient is left alone: no decay, no states, and still no gradient")
def leaves_others_alone(context: WorkerContext, make: Make) -> Iterator[str]:
    pair = _Pair(make)
    mistakes = [pair.step(without=2) for _ in range(2)]
    found = pair.sharded[2].grad is not None, not torch.equal(pair.sharded[2], pair.alone[2])
    given, changed, stateful = map(any, zip(*from_all((*found, 2 in pair.with_states())), strict=True))
    for wrong, what in ((given, "was given one"), (changed, "was changed"), (stateful, "has states")):
        if wrong:
            yield f"a parameter without a gradient {what}. Leave its .grad None: with zeros it decays."
    yield from _told(*mistakes)


@holds("Groups keep their settings, and what a scheduler changes in them arrives")
def keeps_groups(context: WorkerContext, make: Make) -> Iterator[str]:
    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[::2], "weight_decay": 0.5}, {"params": params[1::2], "lr": 0.01}]

    pair = _Pair(make, groups=groups)
    if mistake := pair.step():
        yield f"with two groups, {mistake} Hand the optimizer inside groups, each with its settings."
    for each in (pair.optimizer, pair.candidate):
        each.param_groups[0]["lr"] = 1e-3
    if mistake := pair.step():
        yield (
            f"after a change of param_groups[0]['lr'], as a scheduler makes it, {mistake} Copy the groups' "
            "settings into those of the optimizer inside before its step."
        )


@holds("A group that is added after some steps is trained with its settings, and sharded like the first")
def takes_later_groups(context: WorkerContext, make: Make) -> Iterator[str]:
    pair = _Pair(make, groups=lambda params: params[:4])
    pair.step()
    for each, parameters in ((pair.optimizer, pair.alone), (pair.candidate, pair.sharded)):
        each.add_param_group({"params": parameters[4:], "lr": 0.01})
    groups = len(pair.candidate.param_groups)
    mistake = [pair.step() for _ in range(2)][-1]
    later, sharing = {status for of_one in pair.statuses()[4:] for status in of_one}, pair.sharing_mistake()
    if groups != 2:
        yield f"after add_param_group there are {groups} groups. Call super().add_param_group."
    if later == {_AS_BEFORE}:
        yield "a group that was added after a step is not trained. The optimizer inside needs its part."
    if mistake:
        yield f"after add_param_group, {mistake} Give it its settings, keep the first one's states."
    yield from _told(sharing)


def _one_step(context: WorkerContext, make: Make, **options: Any) -> Iterator[str]:
    return _told(_Pair(make, **options).step())


_UNUSUAL = [
    Property(
        "Parameters of two dtypes are updated, each in its own",
        partial(_one_step, dtypes=(torch.float32, torch.bfloat16)),
    ),
    Property("A rank that owns nothing takes part", partial(_one_step, count=1)),
]
