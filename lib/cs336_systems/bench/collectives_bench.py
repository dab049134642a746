"""Collectives of several processes: rows of collective_times."""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist

from cs336_systems.accounting.collective_costs import (
    COLLECTIVES,
    MB,
    bus_bandwidth_gbps,
)
from cs336_systems.arguments import check_choice
from cs336_systems.parallel import WorkerContext, stream
from cs336_systems.parallel.ddp import ALL_GATHER, REDUCE_SCATTER
from labbook.ranks import time_together


def benchmark_collectives(
    world_size: int,
    *,
    backend: str = "auto",
    collectives: Iterable[str] = COLLECTIVES,
    **options: Any,
) -> Iterator[list[dict[str, Any]]]:
    """Time collectives of float32 in `world_size` processes; yields a row for each size and collective.

    Args:
        backend: as in `launch`.
        options: message_mb, warmup_steps, steps and limit_s, as in `time_collectives`.

    Raises:
        ValueError: a collective is unknown.
    """
    options["collectives"] = tuple(collectives)
    for name in options["collectives"]:
        check_choice("collective", name, COLLECTIVES)
    yield from stream(time_collectives, world_size, backend=backend, timeout_s=3600.0, **options)


def time_collectives(
    context: WorkerContext,
    *,
    collectives: Iterable[str] = COLLECTIVES,
    message_mb: Iterable[float] = (1, 10, 100),
    warmup_steps: int = 5,
    steps: int = 10,
    limit_s: float = math.inf,
) -> None:
    """The worker of `benchmark_collectives`, also for torchrun: sends its rows one by one.

    All ranks start together, each waits until it is done, and the slowest rank counts. On GPUs a step is 20
    collectives in a row, as in nccl-tests: a small one alone would be shorter than the wait for its end.
    Bandwidths are those of the median time.

    Args:
        message_mb: sizes in MB of 2**20 bytes, rounded up to whole elements on every rank.
        limit_s: time for one row, see `time_together`.
    """
    how = {"warmup_steps": warmup_steps, "steps": steps, "limit_s": limit_s}
    how["calls"] = 20 if context.device.type == "cuda" else 1
    for size_mb, collective in itertools.product(message_mb, tuple(collectives)):
        elements = context.world_size * math.ceil(size_mb * MB / 4 / context.world_size)
        timing = time_together(_operation(collective, elements, context), context, **how)
        sent = (4 * elements, timing.p50_ms / 1e3)
        row = {"collective": collective, "message_mb": size_mb, "dtype": "float32"}
        row |= {"world_size": context.world_size, "backend": context.backend, "warmup_steps": warmup_steps}
        row |= timing.as_row()
        row["algorithm_bandwidth_gbps"] = 4e-6 * elements / timing.p50_ms
        row["bus_bandwidth_gbps"] = bus_bandwidth_gbps(collective, *sent, context.world_size)
        context.send([row])


def _operation(collective: str, elements: int, context: WorkerContext) -> Callable[[], None]:
    whole = torch.zeros(
        elements, device=context.device, dtype=torch.float32
    )  # zeros: sums of sums stay finite
    part = torch.zeros(elements // context.world_size, device=context.device, dtype=torch.float32)
    operations: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: getattr(dist, ALL_GATHER)(whole, part),
        "reduce_scatter": lambda: getattr(dist, REDUCE_SCATTER)(part, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
        "all_to_all": lambda: dist.all_to_all_single(torch.empty_like(whole), whole),
    }
    return operations[collective]
