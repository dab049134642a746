"""The time of compiling, apart from that of what it makes."""

import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from cs336_systems.measure.timing import Timing, one_line, time_steps


def time_compiled(step: Callable[..., Any], **options: Any) -> Timing:
    """`time_steps` of a step with compiled code inside, and `compile_s`: its first call less a steady one.

    It is compiled afresh, with empty caches and nothing left over from other configurations, so that the time
    is what a new user waits. Code that cannot be compiled gives the status "error".
    """
    # Imported here: the compiler imports triton, and that settles for good whether kernels are interpreted.
    from torch._dynamo.exc import TorchDynamoException
    from torch._inductor.utils import fresh_cache

    torch._dynamo.reset()
    try:
        with fresh_cache(), warnings.catch_warnings():
            # Whether TF32 is allowed is what is being compared.
            warnings.filterwarnings("ignore", message="TensorFloat32 tensor cores")
            first = time_steps(step, **options | {"warmup_steps": 0, "steps": 1})
            timing = time_steps(step, **options) if first.status == "ok" else first
    except TorchDynamoException as error:
        return Timing(status="error", reason=one_line(error))
    if timing.status != "ok":
        return timing
    return replace(timing, compile_s=max(0.0, first.mean_ms - timing.p50_ms) / 1e3)
