"""Collectives: what they should cost, how long they take, and the two numbers that describe a link.

A message is the largest buffer that a collective touches on a rank, as in NVIDIA's nccl-tests: the tensor of
an all-reduce or a broadcast, the gathered output of an all-gather, the input of a reduce-scatter. Sizes in MB
count 2**20 bytes, like PyTorch's buckets; bandwidths in GB/s count 10**9, like data sheets.
"""

import itertools
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pandas as pd
import torch
import torch.distributed as dist

from cs336_systems.measure.rows import save_rows
from cs336_systems.measure.timing import Timing
from cs336_systems.parallel.worker import WorkerContext

SLUG = "distributed_communication_single_node"  # under which rows are saved
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "broadcast")
MB = 2**20

# PyTorch 2.13 renamed these two and warns about the old names.
_all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
_reduce_scatter = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def bus_factor(collective: str, world_size: int) -> float:
    """Bytes that cross each link for each byte of the message, at best (nccl-tests, PERFORMANCE.md).

    In an all-reduce each of the n parts crosses n - 1 links to be summed, and again to be spread.

    Raises:
        ValueError: the collective is unknown, or world_size is below 1.
    """
    if world_size < 1:
        raise ValueError(f"world_size is {world_size}; allowed: 1 or more")
    around = (world_size - 1) / world_size
    factors = {"all_reduce": 2 * around, "all_gather": around, "reduce_scatter": around, "broadcast": 1.0}
    if collective not in factors:
        raise ValueError(f"collective {collective!r} is unknown; allowed: {', '.join(COLLECTIVES)}")
    return factors[collective]


def algorithm_bandwidth_gbps(message_bytes: float, seconds: float) -> float:
    """Message over time, in GB/s: what the caller sees. It falls with more ranks, even on perfect links."""
    return message_bytes / seconds / 1e9


def bus_bandwidth_gbps(collective: str, message_bytes: float, seconds: float, world_size: int) -> float:
    """Bytes over each link and second, in GB/s: to compare with the link's rate, for any number of ranks."""
    return bus_factor(collective, world_size) * algorithm_bandwidth_gbps(message_bytes, seconds)


def ring_seconds(
    collective: str, message_bytes: float, world_size: int, *, hop_s: float, link_bytes_per_s: float
) -> float:
    """Time of a collective around a ring: a latency for every hop, and the bytes over the link's rate.

    An all-reduce is a reduce-scatter and an all-gather, n - 1 hops each, with a message of 1/n in each hop. A
    broadcast streams through the n - 1 hops in small pieces.
    """
    hops = (world_size - 1) * (2 if collective == "all_reduce" else 1)
    return hops * hop_s + bus_factor(collective, world_size) * message_bytes / link_bytes_per_s


@dataclass(frozen=True)
class AlphaBeta:
    """seconds = latency_s + message_bytes * seconds_per_byte, fitted to measured times.

    `residuals` are (predicted - measured) / measured, in the order of the measurements.
    """

    latency_s: float
    seconds_per_byte: float
    residuals: tuple[float, ...]

    @property
    def bandwidth_gbps(self) -> float:
        """Algorithm bandwidth of an endless message."""
        return 1e-9 / self.seconds_per_byte if self.seconds_per_byte else math.inf

    @property
    def half_bandwidth_bytes(self) -> float:
        """The message that takes as long to start as to send, and so gets half the bandwidth."""
        return self.latency_s / self.seconds_per_byte if self.seconds_per_byte else math.inf

    def seconds(self, message_bytes: float) -> float:
        return self.latency_s + message_bytes * self.seconds_per_byte


def fit_alpha_beta(message_bytes: Sequence[float], seconds: Sequence[float]) -> AlphaBeta:
    """Fit latency and bandwidth by least squares of the *relative* errors, neither below zero.

    With absolute errors, the largest message would decide alone and the latency would be noise.

    Raises:
        ValueError: fewer than two different sizes, or a size or time that is not above zero.
    """
    sizes, times = np.asarray(message_bytes, float), np.asarray(seconds, float)
    values = np.concatenate([sizes, times])
    if len(sizes) != len(times) or len(set(sizes)) < 2 or not (np.isfinite(values) & (values > 0)).all():
        raise ValueError(
            f"sizes {sizes.tolist()} and times {times.tolist()} cannot be fitted; allowed: one time for each "
            "size, two or more different sizes, all finite and above 0"
        )
    largest = sizes.max()
    columns = np.stack([1 / times, sizes / largest / times], axis=1)  # (alpha + beta size) / time = 1
    alpha, beta = np.linalg.lstsq(columns, np.ones(len(times)))[0]
    if alpha < 0 or beta < 0:  # then the best fit lies on the border, with that one at zero
        kept = 1 if alpha < 0 else 0
        best = columns[:, kept].sum() / np.square(columns[:, kept]).sum()
        alpha, beta = (0.0, best) if kept else (best, 0.0)
    residuals = columns @ (alpha, beta) - 1
    return AlphaBeta(float(alpha), float(beta / largest), tuple(map(float, residuals)))


def fit_rows(
    rows: pd.DataFrame, *, collective: str = "all_reduce", world_size: int = 2, backend: str = "nccl"
) -> AlphaBeta:
    """Fit the median times of one collective in rows of `time_collectives`.

    Raises:
        ValueError: there are fewer than two sizes of it.
    """
    mine = (rows["case"] == collective) & (rows["world_size"] == world_size) & (rows["backend"] == backend)
    measured = rows[mine & (rows["status"] == "ok")].sort_values("message_mb")
    return fit_alpha_beta(
        measured["message_mb"].astype(float).to_numpy() * MB, measured["p50_ms"].to_numpy() / 1e3
    )


def time_collectives(
    context: WorkerContext,
    *,
    collectives: Iterable[str] = COLLECTIVES,
    message_mb: Iterable[float] = (1, 10, 100),
    warmup_steps: int = 5,
    steps: int = 10,
    limit_s: float = math.inf,
    machine: str | None = None,
) -> list[dict[str, Any]]:
    """A worker for `launch`: time collectives of float32 tensors, one row for each collective and size.

    All ranks start together, each waits until it is done, and the slowest rank counts. On GPUs a step is 20
    collectives in a row, as in nccl-tests: a small one alone would be shorter than the wait for its end.
    Bandwidths are those of the median time.

    Args:
        message_mb: sizes in MB of 2**20 bytes, rounded up to whole elements on every rank.
        limit_s: time for one row, see `time_together`.
        machine: save each row as it comes, as one of this machine's (`collectives.SLUG`), and print it.
    """
    rows = []
    calls = 20 if context.device.type == "cuda" else 1
    collectives = tuple(collectives)
    for collective in collectives:
        bus_factor(collective, context.world_size)  # refuses an unknown name before anything is timed
    for size_mb, collective in itertools.product(message_mb, collectives):
        elements = context.world_size * math.ceil(size_mb * MB / 4 / context.world_size)
        operation = _operation(collective, elements, context)
        counts = {"warmup_steps": warmup_steps, "steps": steps}
        timing = time_together(operation, context, **counts, calls=calls, limit_s=limit_s)
        message_bytes, median_s = 4 * elements, timing.p50_ms / 1e3
        row = {
            "case": collective,
            "message_mb": size_mb,
            "dtype": "float32",
            "world_size": context.world_size,
            "backend": context.backend,
            "warmup_steps": warmup_steps,
            **timing.as_row(),
            "algorithm_bandwidth_gbps": algorithm_bandwidth_gbps(message_bytes, median_s),
            "bus_bandwidth_gbps": bus_bandwidth_gbps(collective, message_bytes, median_s, context.world_size),
        }
        rows.append(row)
        if machine and context.rank == 0:
            save_rows([row], SLUG, machine=machine)
            print(
                f"{context.backend}, {context.world_size} ranks, {collective} of {size_mb:g} MB: "
                f"{timing.p50_ms:.3g} ms, bus {row['bus_bandwidth_gbps']:.3g} GB/s"
            )
    return rows


def time_together(
    operation: Callable[[], None],
    context: WorkerContext,
    *,
    warmup_steps: int,
    steps: int,
    calls: int = 1,
    limit_s: float = math.inf,
) -> Timing:
    """Time an operation in which all ranks take part; each step's time is that of the slowest rank.

    Args:
        calls: operations in one step, one right after the other; the step's time is that of one of them.
        limit_s: the first step's time foretells how many fit in here. What does not fit is left out, measured
            steps first of all, but one is always measured.

    Raises:
        ValueError: no measured steps, or a negative number of warm-up steps.
    """
    if warmup_steps < 0 or steps < 1:
        raise ValueError(f"warmup_steps={warmup_steps}, steps={steps}; allowed: 0 or more, and 1 or more")
    first = _slowest([_one_step_ms(operation, context, calls)], context)  # the same on all ranks
    fitting = min(limit_s * 1e3 / (first[0] * calls), warmup_steps + steps)
    others = [_one_step_ms(operation, context, calls) for _ in range(max(int(fitting), 1) - 1)]
    times_ms = first + (_slowest(others, context) if others else [])
    warmup_steps = min(warmup_steps, len(times_ms) - 1)
    return Timing(step_ms=tuple(times_ms[warmup_steps:]), warmup_ms=tuple(times_ms[:warmup_steps]))


def _slowest(times_ms: list[float], context: WorkerContext) -> list[float]:
    slowest = torch.tensor(times_ms, dtype=torch.float64, device=context.device)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    return slowest.tolist()


def _one_step_ms(operation: Callable[[], None], context: WorkerContext, calls: int) -> float:
    """On a GPU between events of the current stream, which waits for what was communicated on others."""
    on_gpu = context.device.type == "cuda"
    dist.barrier()
    if on_gpu:
        torch.cuda.synchronize(context.device)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
    start_s = time.perf_counter()
    for _ in range(calls):
        operation()
    if not on_gpu:
        return (time.perf_counter() - start_s) * 1e3 / calls
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / calls


def _operation(collective: str, elements: int, context: WorkerContext) -> Callable[[], None]:
    whole = torch.zeros(elements, device=context.device)  # zeros: sums of sums stay finite
    part = torch.zeros(elements // context.world_size, device=context.device)
    operations: dict[str, Callable[[], Any]] = {
        "all_reduce": lambda: dist.all_reduce(whole),
        "all_gather": lambda: _all_gather(whole, part),
        "reduce_scatter": lambda: _reduce_scatter(part, whole),
        "broadcast": lambda: dist.broadcast(whole, src=0),
    }
    return operations[collective]
