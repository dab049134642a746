"""Timing with a cold cache: what a kernel takes when its inputs come from memory, not from the last call."""

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cs336_systems.measure.timing import Timing, time_steps

SLOW_MS = 30  # a step longer than this finds the cache cold anyway, and is repeated SLOW_STEPS times only
SLOW_STEPS = 3
CPU_STEPS = 5


def time_cold_cache(
    step: Callable[[], Any],
    *,
    device: torch.device,
    to_clear: Iterable[Tensor] = (),
    warmup_ms: float = 10,
    repeat_ms: float = 40,
) -> Timing:
    """Times of a step, the L2 cache flushed before each repetition (triton.testing.do_bench).

    Its peak memory is that of the second call, without the buffer that flushes the cache.

    Args:
        to_clear: tensors whose gradients are dropped before each repetition.
        warmup_ms, repeat_ms: about how long the step runs, uncounted and counted. A CPU, which is timed by
            the clock and with whatever its caches hold, takes one step and then CPU_STEPS.

    Returns:
        The timing; with status "oom" where memory ran out. Other errors propagate.
    """
    to_clear = list(to_clear)

    def clear() -> None:
        for x in to_clear:
            x.grad = None

    def few(warmup_steps: int, steps: int) -> Timing:
        return time_steps(
            lambda _: step(), device=device, warmup_steps=warmup_steps, steps=steps, prepare=clear
        )

    first = few(1, CPU_STEPS if device.type == "cpu" else 1)
    if device.type == "cpu" or first.status != "ok":
        return first
    if first.p50_ms > SLOW_MS:
        return replace(few(0, SLOW_STEPS), peak_memory_mib=first.peak_memory_mib)
    from triton.testing import do_bench  # settles for good whether kernels are interpreted

    times = do_bench(step, warmup=warmup_ms, rep=repeat_ms, grad_to_none=to_clear, return_mode="all")
    return Timing(tuple(times), peak_memory_mib=first.peak_memory_mib)
