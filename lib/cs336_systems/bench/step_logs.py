"""What a wrapper does in a step, in order, seen from inside it: on a tiny Transformer."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from cs336_systems.accounting import MB
from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import BucketedDDP, OverlappedDDP, WorkerContext, launch

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


def _tokens(context: WorkerContext) -> Tensor:
    return torch.zeros(1, CONTEXT_LENGTH, dtype=torch.long, device=context.device)
