"""Which gradients a wrapper's messages carry, and how many gradients there are when each leaves."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import WorkerContext
from cs336_systems.traffic.watch import Message, watch_collectives

Rows = list[dict[str, Any]]


def log_messages(
    context: WorkerContext, wrappers: Mapping[Any, Callable[[nn.Module], nn.Module]]
) -> Rows:
    """The all-reduces of gradients in two steps of a tiny Transformer, in their order, under each wrapper.

    Returns:
        One dictionary a message: wrapper, step_index, message (both from 1), gradients (in it), mib, ready
        and ready_mib (how many of the step's gradients were when it left), last_gradient (the name of the
        last in it), buffers (pieces of memory in which all gradients of the step lie).
    """
    rows: Rows = []
    for name, wrap in wrappers.items():
        module = build_model(model_size("tiny"), 16, device=context.device)
        ready: set[Tensor] = set()
        # Before the wrapper's own hooks: when a message leaves, the gradient that it waited for counts.
        for parameter in module.parameters():
            parameter.register_post_accumulate_grad_hook(ready.add)
        wrapped = wrap(module)
        for step in (1, 2):
            ready.clear()
            messages = _messages_of_step(wrapped, module, ready)
            buffers = {x.grad.untyped_storage().data_ptr() for x in module.parameters()}
            key = {"wrapper": name, "step_index": step, "buffers": len(buffers)}
            rows += [key | {"message": n} | row for n, row in enumerate(messages, start=1)]
    return rows


def _messages_of_step(wrapped: nn.Module, module: nn.Module, ready: set[Tensor]) -> Rows:
    rows: Rows = []

    def note(message: Message) -> None:
        names = _gradients_in(message, module)
        if names:  # flags and the like carry none
            carried = map(module.get_parameter, names)
            row = {"gradients": len(names), "mib": _mib(carried), "last_gradient": names[-1]}
            rows.append(row | {"ready": len(ready), "ready_mib": _mib(ready)})

    wrapped.zero_grad()
    tokens = torch.zeros(1, 16, dtype=torch.long, device=next(module.parameters()).device)
    with watch_collectives(notify=note):
        wrapped(tokens).sum().backward()
        wrapped.finish_gradient_synchronization()
    return rows


def _gradients_in(message: Message, module: nn.Module) -> list[str]:
    """The parameters whose gradients lie in a message, in its order."""
    offsets = {
        name: parameter.grad.data_ptr() - message.address
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    inside = [name for name, offset in offsets.items() if 0 <= offset < message.bytes]
    return sorted(inside, key=offsets.get)


def _mib(parameters: Iterable[Tensor]) -> float:
    return sum(parameter.nbytes for parameter in parameters) / 2**20
