"""Attention alone: times, and the memory held between forward and backward. Rows of attention_times."""

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from cs336_systems import accounting
from cs336_systems.arguments import check_choice
from cs336_systems.attention.implementations import (
    ATTENTION,
    ATTENTION_PASSES,
    COMPILER,
    SIXTEEN_BITS,
    TRITON,
    sdpa_backend,
)
from cs336_systems.dtypes import DTYPES, torch_dtype
from cs336_systems.kernels import why_no_triton
from cs336_systems.measure.saved_tensors import saved_bytes
from labbook import timing
from labbook.machine import why_no_compile, why_no_memory, why_no_tf32
from labbook.rows import measured_in_order
from labbook.timing import MIB, Timing

Row = dict[str, Any]


def sweep_attention(
    *,
    context_lengths: Iterable[int],
    d_heads: Iterable[int],
    batch_size: int,
    passes: Iterable[str] = ("forward", "backward"),
    dtypes: Iterable[str] = ("float32",),
    implementations: Iterable[str] = ("plain",),
    is_causal: bool = False,
    device: str | torch.device = "auto",
    warmup_steps: int = 5,
    steps: int = 10,
) -> Iterator[list[Row]]:
    """Time attention over random q, k, v of (batch_size, context_length, d_head) at every combination.

    Args:
        passes: "forward", which saves for backward as in training; "backward", alone; or "forward_backward".
        dtypes: of the tensors; "tf32" is float32 with TF32 matmuls.
        implementations: of attention.implementations.ATTENTION.
        warmup_steps, steps: as in `time_steps`.

    Yields:
        The rows (attention_times) of all passes at one combination at a time. Beside the times, in MiB:
        saved_for_backward_mib, distinct storages that autograd keeps, q, k and v among them;
        memory_before_backward_mib: q, k, v, the output and all that is saved. Out of memory, and what the
        machine or the implementation cannot do, are a status.

    Raises:
        ValueError: a name is unknown or a number out of range. RuntimeError: the device is not there.
    """
    passes = tuple(passes)
    how = {"device": timing.resolve_device(device), "warmup_steps": warmup_steps, "steps": steps}
    for name, dtype, d_head, n in itertools.product(implementations, dtypes, d_heads, context_lengths):
        check_choice("implementation", name, ATTENTION)
        check_choice("dtype", dtype, DTYPES)
        what = (name, dtype, (batch_size, n, d_head), is_causal)
        yield measured_in_order(lambda what=what: [_benchmark(pass_, *what, **how) for pass_ in passes])


def _benchmark(
    pass_: str, name: str, dtype: str, shape: tuple[int, int, int], is_causal: bool, **how: Any
) -> Row:
    """The row of one pass."""
    check_choice("pass", pass_, ATTENTION_PASSES)
    key = {"implementation": name, "is_causal": is_causal, "dtype": dtype, "pass": pass_}
    key |= dict(zip(("batch_size", "context_length", "d_head"), shape, strict=True))
    key["warmup_steps"] = how["warmup_steps"]
    reason = why_no_attention(name, dtype, how["device"])
    if ATTENTION[name].holds_scores:
        needed = accounting.attention_peak_bytes(*shape, pass_, dtype, is_causal)
        reason = reason or why_no_memory(needed, how["device"])
    if reason:
        return key | Timing(status="skipped", reason=reason).as_row()
    try:
        with timing.matmul_precision(dtype), sdpa_backend(name):
            values, reason = timing.run_or_out_of_memory(
                lambda: _measure(pass_, name, dtype, shape, is_causal, **how), how["device"]
            )
    except RuntimeError as error:  # as PyTorch says that none of its kernels takes these tensors
        return key | Timing(status="error", reason=timing.one_line(error)).as_row()
    timing.release_memory(how["device"])
    return key | (values or Timing(status="oom", reason=reason).as_row())


def _measure(
    pass_: str, name: str, dtype: str, shape: tuple[int, int, int], is_causal: bool, **how: Any
) -> Row:
    factory = {"device": how["device"], "dtype": torch_dtype(dtype)}
    inputs = [torch.randn(shape, **factory, requires_grad=True) for _ in range(3)]
    gradient = torch.randn(shape, **factory)
    entry = ATTENTION[name]
    function = entry.load()

    def forward() -> Tensor:
        for tensor in inputs:
            tensor.grad = None
        return function(*inputs, is_causal)

    def backward(output: Tensor) -> None:
        output.backward(gradient)

    step, prepare = {
        "forward": (forward, None),
        "backward": (backward, forward),
        "forward_backward": (lambda: backward(forward()), None),
    }[pass_]
    timer = timing.time_compiled if COMPILER in entry.needs else timing.time_steps
    timed = timer(step, prepare=prepare, **how)
    if timed.status != "ok":
        return timed.as_row()
    # After the timing, so that compiled code is there and the hooks do not change it.
    for tensor in inputs:
        tensor.grad = None
    saved, in_use = saved_bytes(forward, inputs)
    memory = {"saved_for_backward_mib": saved / MIB, "memory_before_backward_mib": in_use / MIB}
    return timed.as_row() | memory


def why_no_attention(name: str, dtype: str, device: torch.device) -> str:
    """Why one of ATTENTION cannot run in this dtype on the device; others need nothing."""
    needs = ATTENTION[name].needs if name in ATTENTION else frozenset()
    if SIXTEEN_BITS in needs and torch_dtype(dtype).itemsize != 2:
        return f"{name} takes 16-bit tensors only"
    return (
        (why_no_tf32(device) if dtype == "tf32" else "")
        or (why_no_compile(device) if COMPILER in needs else "")
        or (why_no_triton(device) if TRITON in needs else "")
    )
