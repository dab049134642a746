"""What a correct sharded optimizer does, said in sentences to whoever wrote one."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import SGD, AdamW, Optimizer

from cs336_systems.checks.on_ranks import Case, check_on_ranks, from_all
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
    asked = [_is_an_optimizer, _states_are_shared, _zero_grad] if only_states else cases(thorough)
    check_on_ranks(optimizer_class, wrapper_arguments, asked, world_size)


def cases(thorough: bool) -> list[Case]:
    """What `check_sharded_optimizer` tries, in this order."""
    asked = [_is_an_optimizer, _weights_after_a_step, _states_are_shared, _more_steps, _closure, _zero_grad]
    asked += [_no_gradient, _groups, _later_group]
    return [*asked, _two_dtypes, _few_parameters] if thorough else asked


class _Pair:
    """The same parameters twice, with their optimizers: one alone, and the candidate's.

    Matrices and vectors alternate: dealt by turns, all large ones would fall to one rank.

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
        for number, (one, other) in enumerate(zip(self.alone, self.sharded, strict=True)):
            self.before[number] = other.detach().clone()
            gradient = torch.randn(one.shape, generator=generator).to(one.dtype)
            one.grad, other.grad = (None, None) if number == without else (gradient, gradient.clone())

    def step(self, **options: Any) -> str | None:
        """A step of both: the first parameter that is then not right everywhere."""
        self.set_gradients(**options)
        self.optimizer.step()
        self.candidate.step()
        return self.mistake()

    def with_states(self) -> list[int]:
        """Numbers of the parameters that have states on this rank."""
        states = [optimizer.state for optimizer in self.inside]
        return [number for number, x in enumerate(self.sharded) if any(state.get(x) for state in states)]

    def statuses(self) -> list[list[str]]:
        """For each parameter, what it is on each rank."""
        own = []
        for one, other, before in zip(self.alone, self.sharded, self.before, strict=True):
            same = torch.equal(one, other)
            own.append(_RIGHT if same else _AS_BEFORE if torch.equal(other, before) else _WRONG)
        return [list(statuses) for statuses in zip(*from_all(own), strict=True)]

    def mistake(self) -> str | None:
        """The first parameter that is not right everywhere, and the usual reason."""
        for number, statuses in enumerate(self.statuses()):
            name = self.name(number)
            if all(status == _AS_BEFORE for status in statuses):
                return (
                    f"{name} is as before the step, on every rank. Its owner has to update it and then "
                    "to send it: broadcast with src=owner, for any other rank sends the old value."
                )
            if _RIGHT in statuses and _AS_BEFORE in statuses:
                where = ", ".join(str(rank) for rank, status in enumerate(statuses) if status == _RIGHT)
                return (
                    f"{name} is updated on rank {where} alone. After its own step, each rank has to send "
                    "what it updated to the others: broadcast every parameter from its owner."
                )
            if _WRONG in statuses:
                return f"{name} is not what one optimizer alone makes of it."
        return None

    def name(self, number: int) -> str:
        return f"parameter {number} of {len(self.sharded)}, of shape {tuple(self.sharded[number].shape)},"


def _is_an_optimizer(context: WorkerContext, make: Make) -> str | None:
    """It is a torch.optim.Optimizer, and its groups hold all parameters"""
    pair = _Pair(make)
    optimizer = pair.candidate
    if not isinstance(optimizer, Optimizer):
        return (
            "it is no torch.optim.Optimizer, so learning rate schedulers refuse it. Derive the class from it "
            "and call super().__init__(params, kwargs)."
        )
    held = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    if {id(parameter) for parameter in held} != {id(parameter) for parameter in pair.sharded}:
        return (
            f"its param_groups hold {len(held)} parameters and were given {len(pair.sharded)}. zero_grad and "
            "clipping look there: only the optimizer inside holds this rank's shard alone."
        )
    if "lr" not in optimizer.param_groups[0]:
        return "its param_groups have no 'lr'. Hand the settings to super().__init__(params, kwargs)."
    return None


def _weights_after_a_step(context: WorkerContext, make: Make) -> str | None:
    """After a step every rank has the weights that one optimizer gives"""
    pair = _Pair(make)
    mistake = pair.step()
    if mistake and "not what" in mistake:
        for reason, settings, steps in (
            ("the settings were AdamW's defaults. Hand **kwargs to optimizer_cls", {}, 1),
            ("it had been updated twice. Let one rank update it, once", _SETTINGS, 2),
        ):
            if any(from_all(_is_as_if(pair, settings, steps))):
                return f"{mistake} It is as if {reason}."
    return mistake


def _is_as_if(pair: _Pair, settings: dict[str, Any], steps: int) -> bool:
    """Whether a parameter is not right, but is what these settings give, or the step repeated."""
    other = _Pair(lambda params, kind, **settings: kind(params, **settings), settings=settings)
    other.set_gradients()
    for _ in range(steps):
        other.optimizer.step()
    both = zip(pair.sharded, pair.alone, other.alone, strict=True)
    return any(torch.equal(found, as_if) and not torch.equal(found, right) for found, right, as_if in both)


def _states_are_shared(context: WorkerContext, make: Make) -> str | None:
    """The states of each parameter are kept by one rank, and by bytes all keep about as much"""
    pair = _Pair(make)
    pair.step()
    return _sharing_mistake(pair)


def _sharing_mistake(pair: _Pair) -> str | None:
    kept = from_all(pair.with_states())
    for number in range(len(pair.sharded)):
        keepers = [rank for rank, numbers in enumerate(kept) if number in numbers]
        if len(keepers) != 1:
            who = "no rank" if not keepers else f"ranks {', '.join(map(str, keepers))}"
            return (
                f"{who} keep states of {pair.name(number)} where one rank should. Give the optimizer inside "
                "only the parameters that this rank owns."
            )
    sizes = [parameter.nbytes for parameter in pair.sharded]
    shares = [sum(sizes[number] for number in numbers) for numbers in kept]
    if max(shares) > sum(sizes) / len(shares) + max(sizes):
        rank = shares.index(max(shares))
        return (
            f"rank {rank} keeps {max(shares) / sum(sizes):.0%} of the states. Deal by bytes, not by number: "
            "each parameter to the rank that has least so far."
        )
    return None


def _more_steps(context: WorkerContext, make: Make) -> str | None:
    """So it goes on, with AdamW and with SGD, bit for bit"""
    for kind, settings in ((AdamW, _SETTINGS), (SGD, {"lr": 0.1, "momentum": 0.9})):
        pair = _Pair(make, kind, settings)
        for number in range(4):
            if mistake := pair.step():
                return f"with {kind.__name__}, after step {number + 1}: {mistake}"
    return None


def _closure(context: WorkerContext, make: Make) -> str | None:
    """step(closure) runs the closure, once, before the update, and returns its loss"""
    pair, calls = _Pair(make), []

    def closure() -> Tensor:
        calls.append(torch.is_grad_enabled())
        pair.set_gradients()
        return torch.tensor(3.0)

    loss = pair.candidate.step(closure)
    pair.optimizer.step()
    returned = None if loss is None else float(loss)
    for times, with_gradients, what in from_all((len(calls), all(calls), returned)):
        if times != 1:
            return f"step(closure) called the closure {times} times. Call it once, on every rank."
        if not with_gradients:
            return (
                "step(closure) called the closure under no_grad, where loss.backward() does not work. Call "
                "it under torch.enable_grad()."
            )
        if what != 3:
            return f"step(closure) returned {what}, and the closure 3.0. Return the closure's loss."
    return pair.mistake()


def _zero_grad(context: WorkerContext, make: Make) -> str | None:
    """zero_grad() clears every gradient, not only those of the shard"""
    pair = _Pair(make)
    pair.step()
    pair.candidate.zero_grad()
    left = [parameter.grad for parameter in pair.sharded if parameter.grad is not None]
    if any(gradient.any() for gradient in left):
        count = f"{len(left)} of {len(pair.sharded)}"
        return f"after zero_grad() {count} gradients are there. Clear those of all parameters."
    return None


def _no_gradient(context: WorkerContext, make: Make) -> str | None:
    """A parameter without a gradient is left alone: no decay, no states, and still no gradient"""
    pair = _Pair(make)
    for _ in range(2):
        mistake = pair.step(without=2)
    parameter = pair.sharded[2]
    if any(from_all(parameter.grad is not None)):
        return "a parameter without a gradient was given one. Leave its .grad None."
    if any(from_all(not torch.equal(parameter, pair.alone[2]))):
        return "a parameter without a gradient was changed. Leave its .grad None: with zeros it decays."
    if any(from_all(2 in pair.with_states())):
        return "a parameter without a gradient has states. Leave its .grad None."
    return mistake


def _groups(context: WorkerContext, make: Make) -> str | None:
    """Groups keep their settings, and what a scheduler changes in them arrives"""

    def groups(params: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": params[::2], "weight_decay": 0.5}, {"params": params[1::2], "lr": 0.01}]

    pair = _Pair(make, groups=groups)
    if mistake := pair.step():
        return (
            f"with two groups, {mistake} Hand the optimizer inside groups too, each with its settings and "
            "this rank's part of its parameters."
        )
    for each in (pair.optimizer, pair.candidate):
        each.param_groups[0]["lr"] = 1e-3
    if mistake := pair.step():
        return (
            f"after a change of param_groups[0]['lr'], as a scheduler makes it, {mistake} Copy the groups' "
            "settings into those of the optimizer inside before its step."
        )
    return None


def _later_group(context: WorkerContext, make: Make) -> str | None:
    """A group that is added after some steps is trained with its settings, and sharded like the first"""
    pair = _Pair(make, groups=lambda params: params[:4])
    pair.step()
    for each, parameters in ((pair.optimizer, pair.alone), (pair.candidate, pair.sharded)):
        each.add_param_group({"params": parameters[4:], "lr": 0.01})
    groups = len(pair.candidate.param_groups)
    for _ in range(2):
        mistake = pair.step()
    if any(count != 2 for count in from_all(groups)):
        return f"after add_param_group there are {groups} groups. Call super().add_param_group."
    if all(status == _AS_BEFORE for of_one in pair.statuses()[4:] for status in of_one):
        return (
            "the parameters of a group that was added after a step are not trained. In add_param_group deal "
            "them out too, and add this rank's part to the optimizer inside."
        )
    if mistake:
        return (
            f"after add_param_group, {mistake} Give the new group its settings, keep the first one's states."
        )
    return _sharing_mistake(pair)


def _two_dtypes(context: WorkerContext, make: Make) -> str | None:
    """Parameters of two dtypes are updated, each in its own"""
    return _Pair(make, dtypes=(torch.float32, torch.bfloat16)).step()


def _few_parameters(context: WorkerContext, make: Make) -> str | None:
    """A rank that owns nothing takes part"""
    return _Pair(make, count=1).step()
