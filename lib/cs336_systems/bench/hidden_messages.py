"""What messages cost the backward pass beside which they travel, when no gradient waits for them."""

import itertools
import statistics
import time
from collections.abc import Iterable, Iterator
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from cs336_systems.bench.ddp_bench import check_run
from cs336_systems.bench.model_bench import model_key
from cs336_systems.configs import model_size as find_size
from cs336_systems.model import build_model
from cs336_systems.parallel import WorkerContext, bucket_bytes, choose_backend, stream
from cs336_systems.training.steps import ModelSteps
from labbook.ranks import measure_on_all, slowest, time_together

Row = dict[str, Any]


def benchmark_hidden_messages(
    world_size: int,
    *,
    backend: str = "auto",
    model_size: str = "tiny",
    edition: int = 2025,
    context_length: int = 128,
    batch_sizes: Iterable[int] = (4,),
    dtypes: Iterable[str] = ("float32",),
    bucket_sizes_mb: Iterable[float] = (1, 10, 25, 100, 1000),
    warmup_steps: int = 5,
    steps: int = 10,
) -> Iterator[list[Row]]:
    """Time forward and backward in `world_size` processes beside the all-reduces of `BucketedDDP`.

    The messages have the sizes of its buckets and leave when those would be full, but nothing is copied, and
    no gradient is sent or waited for. Yields a row of the table "hidden_messages" for each bucket size, where
    `p50_ms` is the step with its messages and `no_comm_ms` the same without: the difference is what backward
    loses to them. `issue_ms` is the host's time for starting one, the median of the slowest rank.

    Args:
        batch_sizes: sequences in the global batch, shared equally by the ranks.

    Raises:
        ValueError: a name is unknown, or a batch cannot be shared equally.
    """
    config, batch_sizes, dtypes = find_size(model_size, edition), tuple(batch_sizes), tuple(dtypes)
    check_run(world_size, batch_sizes, dtypes, implementations=(), known=())
    group = {"world_size": world_size, "backend": choose_backend(backend, world_size)}
    keys = [
        model_key(config, context_length, batch_size, "forward_backward", dtype, warmup_steps=warmup_steps)
        | group
        | {"bucket_size_mb": size}
        for dtype, batch_size, size in itertools.product(dtypes, batch_sizes, tuple(bucket_sizes_mb))
    ]
    how = {"backend": group["backend"], "timeout_s": 3600.0}
    yield from stream(_measure_all, world_size, keys, steps, **how)


class HiddenMessages(ModelSteps):
    """Forward and backward, with or without messages that leave as gradients become ready.

    Attributes:
        sizes: of a step's messages in bytes, the first one first.
        issue_ms: host time of every start so far.
    """

    def __init__(self, model: torch.nn.Module, bucket_size_mb: float, *batch: Any):
        super().__init__(model, *batch)
        self.sizes = bucket_bytes(model.parameters(), bucket_size_mb)
        self.issue_ms: list[float] = []
        self._due = list(itertools.accumulate(self.sizes))  # bytes of gradients that a message waits for
        self._zeros = torch.zeros(max(self.sizes), dtype=torch.uint8, device=self.device).view(torch.float32)
        self._in_flight: list[dist.Work] = []
        self._ready = float("-inf")  # bytes of gradients; no message is due
        for parameter in model.parameters():
            parameter.register_post_accumulate_grad_hook(self._accumulated)

    def with_messages(self) -> None:
        """The end is that of backward: messages may still travel, and the next step begins by waiting."""
        for work in self._in_flight:
            work.wait()
        self._in_flight, self._ready = [], 0
        self.forward_backward()
        self._ready = float("-inf")

    def _accumulated(self, parameter: Tensor) -> None:
        self._ready += parameter.nbytes
        while len(self._in_flight) < len(self._due) and self._due[len(self._in_flight)] <= self._ready:
            message = self._zeros[: self.sizes[len(self._in_flight)] // 4]
            started = time.perf_counter()
            self._in_flight.append(dist.all_reduce(message, async_op=True))
            self.issue_ms.append((time.perf_counter() - started) * 1e3)


def _measure_all(context: WorkerContext, keys: list[Row], steps: int) -> None:
    """The worker: the rows come out the same on every rank."""
    reason = ""
    for key in keys:
        values, reason = measure_on_all(partial(_time, context, key, steps), context, key["dtype"], reason)
        context.send([key | values])


def _time(context: WorkerContext, key: Row, steps: int) -> Row:
    config = find_size(key["model_size"], key["edition"])
    model = build_model(config, key["context_length"], device=context.device)
    batch = (key["batch_size"] // context.world_size, key["context_length"], key["dtype"])
    run = HiddenMessages(model, key["bucket_size_mb"], *batch)
    how = {"warmup_steps": key["warmup_steps"], "steps": steps}
    beside = time_together(run.with_messages, context, **how)
    without = time_together(run.forward_backward, context, **how)
    (issue_ms,) = slowest([statistics.median(run.issue_ms)], context)
    return beside.as_row() | {
        "no_comm_ms": without.p50_ms,
        "calls": len(run.sizes),
        "issue_ms": issue_ms,
    }
