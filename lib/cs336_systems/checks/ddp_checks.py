"""What a correct data-parallel wrapper does, said in sentences to whoever wrote one."""

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from cs336_systems.checks.on_ranks import Case, Message, check_on_ranks, close, observed
from cs336_systems.checks.one_process import Losses, follow_one_process, gradient_mistake
from cs336_systems.parallel import WorkerContext

Wrap = Callable[[nn.Module], nn.Module]
_SHARE = 3  # samples of one rank in one backward pass


def check_ddp(
    ddp_class: type[nn.Module],
    *,
    world_size: int = 2,
    thorough: bool = False,
    some_unused: bool = False,
    overlapped: bool = False,
    timeout_s: float = 60.0,
    **wrapper_arguments: Any,
) -> None:
    """Try a data-parallel wrapper on a small model, in `world_size` CPU processes, against one process.

    The class may be defined in a notebook. It is called as `ddp_class(module, **wrapper_arguments)` and needs
    `.module`, `forward` and `finish_gradient_synchronization()`.

    Args:
        thorough: also ask for what the assignment does not: parameters unused on some ranks or on all,
            several backward passes before a step, and gradient accumulation under a `no_sync()` context.
        some_unused: of these only parameters that rank 0 alone uses.
        overlapped: also ask that messages leave during backward, which waits for none.

    Raises:
        AssertionError: what is wrong, where, and how to mend it.
    """
    check_on_ranks(
        ddp_class, wrapper_arguments, cases(thorough, some_unused, overlapped), world_size, timeout_s
    )


def cases(thorough: bool, some_unused: bool = False, overlapped: bool = False) -> list[Case]:
    """What `check_ddp` tries, in this order."""
    sgd = partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    adamw = partial(torch.optim.AdamW, lr=0.01)
    plans: list[tuple[Losses, int]] = [(_one_pass, 0)]
    if thorough:
        plans += [(_several_passes, 0), (_several_passes, 2), (_unused, 0)]
    elif some_unused:
        plans += [(_unused_elsewhere, 0)]
    trainings = [
        partial(_weights_follow_one_process, losses=losses, silent=silent, make_optimizer=optimizer)
        for losses, silent in plans
        for optimizer in (sgd, adamw)
    ]
    overlap = [_sends_during_backward] if overlapped else []
    return [_starts_from_rank_0, _averages_gradients, *overlap, *trainings]


class _Toy(nn.Module):
    """Tied, frozen and (on request) unused parameters, and buffers, in the fewest lines."""

    def __init__(self, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.first = nn.Linear(4, 8)
        self.tied_1 = nn.Linear(8, 8, bias=False)
        self.tied_2 = nn.Linear(8, 8)
        self.tied_2.weight = self.tied_1.weight
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.last = nn.Linear(8, 2)
        self.rarely = nn.Linear(8, 2)
        self.register_buffer("shift", torch.randn(8))
        self.register_buffer("mask", torch.rand(8) < 0.5)

    def forward(self, x: Tensor, rarely: bool = True) -> Tensor:
        x = self.first(x).tanh() * self.frozen + torch.where(self.mask, self.shift, -self.shift)
        x = self.tied_2(self.tied_1(x).tanh()).tanh()
        if not rarely:
            return self.last(x)
        return self.rarely(x) + self.last(x)  # so gradients come in another order than parameters, reversed


def _loss(model: nn.Module, rank: int, step: int, **options: bool) -> Tensor:
    """The loss on one rank's share of a step's batch; every process can compute every share."""
    generator = torch.Generator("cpu").manual_seed(1000 * step + rank)
    inputs, targets = (
        torch.randn(_SHARE, width, generator=generator, device="cpu").to(next(model.parameters()).device)
        for width in (4, 2)
    )
    return F.mse_loss(model(inputs, **options), targets)


def _one_pass(model: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """one backward pass a step"""
    yield _loss(model, rank, step)


def _several_passes(model: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """three backward passes before finish_gradient_synchronization()"""
    for part in range(3):
        yield _loss(model, rank, step + 100 * part, rarely=part != 1)


def _unused(model: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """parameters that in a step only rank 0 uses, or no rank does"""
    yield _loss(model, rank, step, rarely=step % 2 == 1 and rank == 0)


def _unused_elsewhere(model: nn.Module, rank: int, step: int) -> Iterator[Tensor]:
    """parameters that only rank 0 uses"""
    yield _loss(model, rank, step, rarely=rank == 0)


def _starts_from_rank_0(context: WorkerContext, wrap: Wrap) -> str | None:
    module = _Toy(seed=context.rank)
    expected, wrapped = _Toy(seed=0).state_dict(), wrap(module)
    if getattr(wrapped, "module", None) is not module:
        return "`.module` is not the module that was wrapped. Set self.module = module in __init__."
    buffers = dict(module.named_buffers())
    for name, value in module.state_dict().items():
        if not torch.equal(value, expected[name]):
            kind = "buffer" if name in buffers else "parameter"
            return (
                f"after wrapping, the {kind} {name!r} is not that of rank 0. "
                f"Broadcast every {kind} from rank 0 in __init__."
            )
    return None


def _averages_gradients(context: WorkerContext, wrap: Wrap) -> str | None:
    own, total, wrapped = _Toy(seed=0), _Toy(seed=0), wrap(_Toy(seed=0))
    _loss(own, context.rank, 0).backward()
    for rank in range(context.world_size):
        _loss(total, rank, 0).backward()
    _loss(wrapped, context.rank, 0).backward()
    wrapped.finish_gradient_synchronization()
    names = [name for name, _ in own.named_parameters()]
    parameters = zip(names, wrapped.module.parameters(), own.parameters(), total.parameters(), strict=True)
    return next(filter(None, (_mistake(*each, context.world_size) for each in parameters)), None)


def _sends_during_backward(context: WorkerContext, wrap: Wrap) -> str | None:
    wrapped, sent = wrap(_Toy(seed=0)), list[Message]()
    with observed(sent.append):
        _loss(wrapped, context.rank, 0).backward()
        early = len(sent)
        wrapped.finish_gradient_synchronization()
    if any(message.work is None for message in sent):
        return "backward waits for each message. Send with async_op=True, and wait() at the end."
    if early < len(sent):
        return (
            f"{len(sent) - early} of {len(sent)} messages leave only in finish_gradient_synchronization(), "
            "when backward is over. Send, while backward goes on, all that may leave."
        )
    return None


def _mistake(
    name: str, parameter: nn.Parameter, own: nn.Parameter, total: nn.Parameter, ranks: int
) -> str | None:
    if not close(parameter, own):
        return (
            f"finish_gradient_synchronization() changed the parameter itself, {name!r}, before any "
            "optimizer step. All-reduce parameter.grad, not the parameter."
        )
    if own.grad is None and parameter.grad is not None:
        return f"the frozen parameter {name!r} was given a gradient. Skip those without requires_grad."
    if own.grad is None:
        return None
    if parameter.grad is None:
        return f"{name!r} has no gradient after finish_gradient_synchronization()."
    return gradient_mistake(name, parameter.grad, own.grad, total.grad, ranks)


def _weights_follow_one_process(
    context: WorkerContext,
    wrap: Wrap,
    *,
    losses: Losses,
    silent: int,
    make_optimizer: Callable[..., torch.optim.Optimizer],
) -> str | None:
    alone, wrapped = _Toy(seed=0), wrap(_Toy(seed=context.rank))
    how = f"{losses.__doc__}{f', {silent} of them under no_sync()' if silent else ''}"
    return follow_one_process(context, alone, wrapped, losses, make_optimizer, _weights, how, silent)


def _weights(wrapped: nn.Module) -> dict[str, Tensor]:
    return dict(wrapped.module.named_parameters())
