"""Which gradients a wrapper's messages carry, and how many gradients there are when each leaves."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import WorkerContext
from cs336_systems.traffic.watch import Message, watch_collectives

MIB = 2**20


def log_messages(
    context: WorkerContext, wrappers: Mapping[Any, Callable[[nn.Module], nn.Module]]
) -> list[dict[str, Any]]:
    """The all-reduces of gradients in two steps of a tiny Transformer, in their order, under each wrapper.

    Returns:
        One dictionary a message: wrapper, step_index, message (both from 1), gradients (in it), mib, ready
        and ready_mib (how many of the step's gradients were when it left), last_gradient (the name of the
        last in it), buffers (pieces of memory in which all gradients of the step lie).
    """
    rows = []
    for name, wrap in wrappers.items():
        module = build_model(model_size("tiny"), 16, device=context.device)
        ready: set[Tensor] = set()
        for parameter in module.parameters():  # before the wrapper's own hooks
            parameter.register_post_accumulate_grad_hook(ready.add)
        wrapped = wrap(module)
        for step in (1, 2):
            ready.clear()
            messages = _step(wrapped, module, ready, context.device)
            storages = {x.grad.untyped_storage().data_ptr() for x in module.parameters()}
            key = {"wrapper": name, "step_index": step, "buffers": len(storages)}
            rows += [key | {"message": n} | row for n, row in enumerate(messages, start=1)]
    return rows


def _step(
    wrapped: nn.Module, module: nn.Module, ready: set[Tensor], device: torch.device
) -> list[dict[str, Any]]:
    rows: list[dict[str, Any]] = []

    def note(message: Message) -> None:
        if carried := _carried(message, module):
            row = {"gradients": len(carried), "mib": _mib(carried.values())}
            row |= {"ready": len(ready), "ready_mib": _mib(ready)}
            rows.append(row | {"last_gradient": list(carried)[-1]})

    wrapped.zero_grad()
    with watch_collectives(notify=note):
        wrapped(torch.zeros(1, 16, dtype=torch.long, device=device)).sum().backward()
        wrapped.finish_gradient_synchronization()
    return rows


def _carried(message: Message, module: nn.Module) -> dict[str, Tensor]:
    """The parameters whose gradients lie in a message, in its order; flags and the like have none."""
    offsets = {
        name: parameter.grad.data_ptr() - message.address
        for name, parameter in module.named_parameters()
        if parameter.grad is not None
    }
    inside = [name for name, offset in offsets.items() if 0 <= offset < message.bytes]
    return {name: module.get_parameter(name) for name in sorted(inside, key=offsets.get)}


def _mib(tensors: Any) -> float:
    return sum(x.nbytes for x in tensors) / MIB
