"""Properties of a data-parallel wrapper, with error messages for its author."""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from cs336_systems.checks import data_parallel as shared
from cs336_systems.checks.data_parallel import Toy, Wrap
from cs336_systems.checks.on_ranks import Message, Property, check_on_ranks, close, holds, observed
from cs336_systems.parallel import WorkerContext


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

    It is called as `ddp_class(module, **wrapper_arguments)` and needs `.module`, `forward` and
    `finish_gradient_synchronization()`; see `check_on_ranks`.

    Args:
        thorough: also ask for what the assignment does not: parameters unused on some ranks or on all,
            several backward passes before a step, accumulation under `no_sync()`, float16, users' hooks.
        some_unused: of these only parameters that rank 0 alone uses.
        overlapped: also ask that messages leave during backward, which waits for none.
    """
    tried = properties(thorough, some_unused, overlapped)
    check_on_ranks(ddp_class, wrapper_arguments, tried, world_size, timeout_s)


def properties(thorough: bool, some_unused: bool = False, overlapped: bool = False) -> list[Property]:
    """What `check_ddp` tries, in this order."""
    several = {"passes": 3, "options": lambda rank, step, number: {"rarely": number != 1}}
    alternating = {"options": lambda rank, step, _: {"rarely": step % 2 == 1 and rank == 0}}
    plans: dict[str, dict[str, Any]] = {"one backward pass a step": {}}
    if thorough:
        plans["three backward passes before finish_gradient_synchronization()"] = several
        plans["three backward passes, two of them under no_sync()"] = several | {"silent": 2}
        plans["parameters that in a step only rank 0 uses, or no rank does"] = alternating
    elif some_unused:
        plans["parameters that only rank 0 uses"] = {"options": lambda rank, *_: {"rarely": rank == 0}}
    trained = [
        Property(
            f"{how}, with {name}",
            partial(shared.follow, weights=_weights, how=how, optimizer=name, **options),
        )
        for how, options in plans.items()
        for name in ("SGD", "AdamW")
    ]
    unusual = [shared.float16_means, shared.hooks_run] if thorough else []
    return [starts_from_rank_0, averages, *([overlaps] if overlapped else []), *trained, *unusual]


def _weights(wrapped: nn.Module) -> dict[str, Tensor]:
    return wrapped.module.state_dict()


@holds("parameters and buffers are rank 0's")
def starts_from_rank_0(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    hint = "Broadcast every parameter and buffer from rank 0 in __init__."
    return shared.starts_from_rank_0(context, wrap, Toy, _weights, hint)


@holds("gradients are the mean over the ranks")
def averages(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    wrapped = wrap(Toy(seed=0))
    shared.one_step(context, wrapped)
    before, gradients = Toy(seed=0), {}
    for (name, old), parameter in zip(before.named_parameters(), wrapped.module.parameters(), strict=True):
        gradients[name] = parameter.grad
        if not close(parameter, old):
            yield f"{name!r} has changed before any optimizer step. All-reduce parameter.grad, not parameter."
        if not old.requires_grad and parameter.grad is not None:
            yield f"the frozen parameter {name!r} was given a gradient. Skip those without requires_grad."
        if old.requires_grad and parameter.grad is None:
            yield f"{name!r} has no gradient after finish_gradient_synchronization()."
    yield from shared.average_mistakes(context, Toy, gradients)


@holds("messages leave during backward, which waits for none")
def overlaps(context: WorkerContext, wrap: Wrap) -> Iterator[str]:
    wrapped, sent = wrap(Toy(seed=0)), list[Message]()
    with observed(sent.append):
        shared.loss_of(wrapped, context.rank, 0).backward()
        early = len(sent)
        wrapped.finish_gradient_synchronization()
    if any(message.work is None for message in sent):
        yield "backward waits for each message. Send with async_op=True, and wait() at the end."
    if early < len(sent):
        yield (
            f"{len(sent) - early} of {len(sent)} messages leave only in finish_gradient_synchronization(), "
            "when backward is over. Send, while backward goes on, all that may leave."
        )
