"""Timing with a cold cache: what a kernel takes when its inputs come from memory, not from the last call."""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from cs336_systems.measure.timing import MIB, Timing, time_steps


def time_cold(
    step: Callable[[], Any],
    *,
    device: torch.device,
    to_clear: Iterable[Tensor] = (),
    warmup_ms: float = 10,
    repeat_ms: float = 20,
) -> Timing:
    """Times of a step, the L2 cache flushed before each repetition (triton.testing.do_bench).

    Args:
        to_clear: tensors whose gradients are dropped before each repetition.
        warmup_ms, repeat_ms: about how long the step runs, uncounted and counted. A CPU, which is timed by
            the clock and with whatever its caches hold, takes one step and then five.
    """
    to_clear = list(to_clear)
    if device.type == "cpu":
        return time_steps(step, device=device, prepare=None, warmup_steps=1, steps=5)
    from triton.testing import do_bench

    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    times = do_bench(step, warmup=warmup_ms, rep=repeat_ms, grad_to_none=to_clear, return_mode="all")
    return Timing(step_ms=tuple(times), peak_memory_mib=torch.cuda.max_memory_allocated(device) / MIB)
