"""When the messages of a step leave: seen from inside a wrapper, on a tiny Transformer."""

from collections.abc import Iterable
from typing import Any

import torch

from cs336_systems.configs import model_size
from cs336_systems.model import build_model
from cs336_systems.parallel.overlapped import BucketedDDP, OverlappedDDP
from cs336_systems.parallel.worker import WorkerContext


class _Watched:
    """Notes each message of the wrapper that it is mixed into."""

    def _send_next(self) -> None:
        bucket = self._buckets[len(self._under_way)]
        names = {parameter: name for name, parameter in self.module.named_parameters()}
        parameters = [self._trainable[place] for place in bucket]
        self.departures.append(
            {
                "message": 1 + len(self._under_way),
                "gradients": len(bucket),
                "mb": sum(p.numel() * p.element_size() for p in parameters) / 2**20,
                "ready": len(self._ready),
                "last gradient": names[parameters[-1]],
            }
        )
        super()._send_next()


class _WatchedOverlapped(_Watched, OverlappedDDP):
    pass


class _WatchedBucketed(_Watched, BucketedDDP):
    pass


def watch_departures(
    context: WorkerContext, bucket_sizes_mb: Iterable[float | None] = (None,), steps: int = 2
) -> list[dict[str, Any]]:
    """A worker for `launch`: the messages of the first steps of a tiny Transformer, in their order.

    Args:
        bucket_sizes_mb: of BucketedDDP, one after the other; None watches OverlappedDDP.

    Returns:
        One dictionary a message: bucket_size_mb, step, message (both from 1), gradients (in it), mb (2**20
        bytes), ready (how many of the step's gradients were ready when it left), last gradient (name of the
        last one in it), buffers (pieces of memory in which all gradients of the step lie).
    """
    rows = []
    for size in bucket_sizes_mb:
        module = build_model(model_size("tiny"), 16, device=context.device)
        wrapped = (
            _WatchedOverlapped(module) if size is None else _WatchedBucketed(module, bucket_size_mb=size)
        )
        tokens = torch.zeros(1, 16, dtype=torch.long, device=context.device)
        for step in range(1, steps + 1):
            wrapped.departures = []
            wrapped.zero_grad()
            wrapped(tokens).sum().backward()
            wrapped.finish_gradient_synchronization()
            pointers = {parameter.grad.untyped_storage().data_ptr() for parameter in module.parameters()}
            of_step = {"bucket_size_mb": size, "step": step, "buffers": len(pointers)}
            rows += [of_step | departure for departure in wrapped.departures]
    return rows
