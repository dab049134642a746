"""What a wrapper does in a step, in order, seen from inside it: on a tiny Transformer."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cs336_systems.accounting import MB
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import FSDP, BucketedDDP, OverlappedDDP, WorkerContext, launch
from cs336_systems.parallel.parameter_group import ParameterGroup

Rows = list[dict[str, Any]]
CONTEXT_LENGTH = 16


def log_messages(
    world_size: int, bucket_sizes_mb: Sequence[float | None] = (None,), *, backend: str = "auto"
) -> Rows:
    """The messages that a rank sends in the first two steps, in their order.

    Args:
        bucket_sizes_mb: of BucketedDDP, one after the other; None is OverlappedDDP.
        backend: as in `launch`.

    Returns:
        One dictionary a message: bucket_size_mb, step_index, message (both from 1), gradients (in it), mb
        (2**20 bytes), ready (how many of the step's gradients were ready when it left), last_gradient (the
        name of the last in it), buffers (pieces of memory in which all gradients of the step lie).
    """
    return launch(_log_messages, world_size, tuple(bucket_sizes_mb), backend=backend)[0]


class _LoggedMessages:
    """Notes each message of the DDP that it is mixed into."""

    def _message(self, number: int) -> Tensor:
        bucket = [self._trainable[index] for index in self._buckets[number]]
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        self.log.append(
            {
                "message": 1 + number,
                "gradients": len(bucket),
                "mb": sum(parameter.nbytes for parameter in bucket) / MB,
                "ready": len(self._pass.ready),
                "last_gradient": names[bucket[-1]],
            }
        )
        return super()._message(number)


def _log_messages(context: WorkerContext, bucket_sizes_mb: Sequence[float | None]) -> Rows:
    rows = []
    for size in bucket_sizes_mb:
        module = build_model(model_size("tiny"), CONTEXT_LENGTH, device=context.device)
        wrapper, options = (OverlappedDDP, {}) if size is None else (BucketedDDP, {"bucket_size_mb": size})
        wrapped = type("Logged", (_LoggedMessages, wrapper), {})(module, **options)
        for step in (1, 2):
            wrapped.log = []
            wrapped.zero_grad()
            wrapped(_tokens(context)).sum().backward()
            wrapped.finish_gradient_synchronization()
            pointers = {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
            of_step = {"bucket_size_mb": size, "step_index": step, "buffers": len(pointers)}
            rows += [of_step | message for message in wrapped.log]
    return rows


def log_gathers(world_size: int, options: Mapping[str, Mapping[str, Any]], *, num_layers: int = 6) -> Rows:
    """What happens to the units of an FSDP in its second step over Gloo, and how much a rank holds.

    Args:
        options: by name, arguments of `FSDP`, one after the other.

    Returns:
        One dictionary for each thing that happens to a unit: implementation (the name of the options), pass
        ("forward" or "backward"), event ("gather", "use", "free" or "reduce"), unit (the name of its module),
        messages (weights that are gathered or reduced), mb (2**20 bytes of its whole weights), held_mb (of
        all units that are gathered from then on), and total_mb (of all units there are).
    """
    return launch(_log_gathers, world_size, dict(options), num_layers, backend="gloo")[0]


class _LoggedFSDP(FSDP):
    """Notes what happens to its units, once it has a log."""

    def _note(self, event: str, unit: ParameterGroup) -> None:
        if self.log is None:
            return
        index = self._order.index(unit)
        module = next(module for module, position in self._positions.items() if position == index)
        names = {other: name for name, other in self.module.named_modules()}
        row = {"pass": self.of_pass, "event": event, "unit": names[module]}
        row |= {"messages": len(unit.weights), "mb": unit.nbytes / MB}
        self.log.append(row | {"held_mb": sum(other.nbytes for other in self._gathered) / MB})

    def _collect(self, unit: ParameterGroup, following: Sequence[ParameterGroup]) -> None:
        started = [other for other in (unit, *following) if not other.is_gathered]
        super()._collect(unit, following)
        for other in started:
            self._note("gather", other)
        self._note("use", unit)

    def _free(self, unit: ParameterGroup) -> None:
        super()._free(unit)
        self._note("free", unit)

    def _start_reduction(self, unit: ParameterGroup) -> None:
        super()._start_reduction(unit)
        self._note("reduce", unit)


def _log_gathers(context: WorkerContext, options: dict[str, Mapping[str, Any]], num_layers: int) -> Rows:
    config, rows = replace(model_size("tiny"), num_layers=num_layers), []
    for name, arguments in options.items():
        wrapped = _LoggedFSDP(build_model(config, CONTEXT_LENGTH, device=context.device), **arguments)
        for log in (None, []):  # in the first step the order is not known
            wrapped.log, wrapped.of_pass = log, "forward"
            loss = wrapped(_tokens(context)).sum()
            wrapped.of_pass = "backward"
            loss.backward()
            wrapped.finish_gradient_synchronization()
        total = sum(unit.nbytes for unit in wrapped._groups) / MB
        rows += [{"implementation": name} | row | {"total_mb": total} for row in wrapped.log]
    return rows


def _tokens(context: WorkerContext) -> Tensor:
    return torch.zeros(1, CONTEXT_LENGTH, dtype=torch.long, device=context.device)
