"""When the messages of a step leave: seen from inside a wrapper, on a tiny Transformer."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel import BucketedDDP, OverlappedDDP, WorkerContext, launch

MB = 2**20


def log_messages(
    world_size: int,
    bucket_sizes_mb: Iterable[float | None] = (None,),
    *,
    backend: str = "auto",
    steps: int = 2,
    timeout_s: float = 600.0,
) -> list[dict[str, Any]]:
    """The messages that a rank sends in the first steps of a tiny Transformer, in their order.

    Args:
        bucket_sizes_mb: of BucketedDDP, one after the other; None is OverlappedDDP.
        backend, timeout_s: as in `launch`.

    Returns:
        One dictionary a message: bucket_size_mb, step_index, message (both from 1), gradients (in it), mb
        (2**20 bytes), ready (how many of the step's gradients were ready when it left), last_gradient (the
        name of the last in it), buffers (pieces of memory in which all gradients of the step lie).
    """
    sizes = tuple(bucket_sizes_mb)
    return launch(_log_steps, world_size, sizes, steps, backend=backend, timeout_s=timeout_s)[0]


class _Logged:
    """Notes each message of the wrapper that it is mixed into."""

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


def _log_steps(
    context: WorkerContext, bucket_sizes_mb: tuple[float | None, ...], steps: int
) -> list[dict[str, Any]]:
    rows = []
    for size in bucket_sizes_mb:
        module = build_model(model_size("tiny"), 16, device=context.device)
        wrapper, options = (OverlappedDDP, {}) if size is None else (BucketedDDP, {"bucket_size_mb": size})
        wrapped = type("Logged", (_Logged, wrapper), {})(module, **options)
        tokens = torch.zeros(1, 16, dtype=torch.long, device=context.device)
        for step in range(1, steps + 1):
            wrapped.log = []
            wrapped.zero_grad()
            wrapped(tokens).sum().backward()
            wrapped.finish_gradient_synchronization()
            pointers = {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
            of_step = {"bucket_size_mb": size, "step_index": step, "buffers": len(pointers)}
            rows += [of_step | message for message in wrapped.log]
    return rows
