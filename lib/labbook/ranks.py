"""The clock of what several ranks do together: they start together, and the slowest counts."""

import math
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import forkserver
from typing import Protocol

import torch
import torch.distributed as dist

from labbook.timing import MIB, Timing, clock_ms

# Of installed packages, for the server keeps what it imported: nobody edits these. Optimizers, and torch's
# switch for deterministic algorithms, import the last but one, and that imports Triton.
_PRELOADED = [
    "torch.distributed.fsdp",
    "pandas",
    "einops",
    "cloudpickle",
    "torch._dynamo",
    "triton.experimental.gluon.nvidia.hopper",
]


class Context(Protocol):
    """What a launcher hands to each rank."""

    world_size: int
    device: torch.device


def preload() -> None:
    """Start the server that ranks are forked from: it imports what they do while the caller goes on.

    The environment of now decides whether Triton's kernels are interpreted. With a GPU ranks are no forks.
    """
    if sys.platform == "linux" and not torch.cuda.is_available():
        forkserver.set_forkserver_preload(_PRELOADED)
        with suppress(OSError):  # the folder of temporary files has a long name
            forkserver.ensure_running()


def time_together(
    operation: Callable,
    context: Context,
    *,
    warmup_steps: int,
    steps: int,
    prepare: Callable | None = None,
    calls: int = 1,
    limit_s: float = math.inf,
) -> Timing:
    """Time an operation in which all ranks take part; each step's time is that of the slowest rank.

    prepare: run before each step, outside of its time; the step's operations are passed what it returned.
    calls: operations in one step, one right after the other; the step's time is that of one of them.
    limit_s: steps are limited by an estimate from the first. What does not fit is left out, measured
        steps first of all, but one is always measured. With 5 + 10 steps, a limit of 1 s and a first step of
        300 ms three run: two to warm up, one measured.
    """
    first = slowest(
        [one_step_ms(operation, context, calls, prepare)], context
    )  # the same on all ranks
    # In steps, the first included; its time is that of one operation, and a step has `calls` of them.
    fitting = min(limit_s * 1e3 / (first[0] * calls), warmup_steps + steps)
    others = [
        one_step_ms(operation, context, calls, prepare) for _ in range(max(int(fitting), 1) - 1)
    ]
    # No message about no steps.
    times_ms = first + (slowest(others, context) if others else [])
    warmup_steps = min(warmup_steps, len(times_ms) - 1)
    return Timing(tuple(times_ms[warmup_steps:]))


def one_step_ms(
    operation: Callable, context: Context, calls: int, prepare: Callable | None = None
) -> float:
    """Milliseconds of one of the operations in a step that all ranks begin together."""
    arguments = () if prepare is None else (prepare(),)

    def step():
        for _ in range(calls):
            operation(*arguments)

    dist.barrier()
    return clock_ms(step, context.device) / calls


def reset_peaks(context: Context) -> None:
    """Let `peaks` count from here."""
    if context.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(context.device)


def peaks(context: Context) -> dict[str, float]:
    """The value column of the most memory that the fullest rank held; on a CPU none."""
    if context.device.type != "cuda":
        return {}
    (most,) = slowest([torch.cuda.max_memory_allocated(context.device) / MIB], context)
    return {"peak_memory_mib": most}


def slowest(times_ms: list[float], context: Context) -> list[float]:
    """Of each step, the longest of all ranks' times; the same on every rank."""
    longest = torch.tensor(times_ms, dtype=torch.float64, device=context.device)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return longest.tolist()
