"""One attention function at one size, timed the way the handout times it (triton.testing.do_bench).

What is wrong is not timed: what fails check_attention, or cannot run, gets a row that says why.
"""

import warnings
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from cs336_systems.accounting import attention_peak_bytes
from cs336_systems.attention.baselines import COMPILED, AttentionFunction, switched_to
from cs336_systems.bench.eligibility import DTYPES, cannot_compile, why_not
from cs336_systems.measure.clocks import watched_clocks
from cs336_systems.measure.host import why_no_memory
from cs336_systems.measure.timing import (
    MIB,
    Timing,
    matmul_precision,
    one_line,
    release_memory,
    resolve_device,
    run_or_out_of_memory,
    time_steps,
)
from cs336_systems.measure.validation import measured_in_order

PASSES = ("forward", "backward", "forward_backward")
DO_BENCH, GRAPH, WALL_CLOCK = "do_bench", "cuda graph", "wall clock"
LEADERBOARD = "leaderboard protocol"
WARMUP_MS, REPEAT_MS = 10, 40  # do_bench's; the spread of an H200 is so small that more would change nothing
GRAPH_MS = 5  # work in one graph, replayed ten times
SLOW_MS = 30  # a step longer than this is repeated SLOW_STEPS times only, and finds the cache cold anyway
SLOW_STEPS = 3
CPU_STEPS = 5
KEPT_BYTES = 2**33  # more than this in PyTorch's own cache is given back between two measurements


def case_name(device: torch.device, graph: bool = False) -> str:
    """How a cell is timed there: the value of its key column `case`."""
    return WALL_CLOCK if device.type == "cpu" else GRAPH if graph else DO_BENCH


def benchmark_cell(
    name: str,
    function: AttentionFunction,
    *,
    batch_size: int = 1,
    num_heads: int = 1,
    context_length: int,
    d_head: int,
    dtype: str = "bfloat16",
    passes: Iterable[str] = PASSES,
    is_causal: bool = True,
    graph: bool = False,
    device: str | torch.device = "auto",
) -> list[dict[str, Any]]:
    """Time one implementation at one size: every repetition with a cold L2 cache.

    Args:
        function: called as function(q, k, v, is_causal), with tensors (batch, heads, n, d), or (batch, n, d)
            for one head.
        graph: replay a CUDA graph instead: the kernels without the work of launching them from Python. It
            cannot split a step, so there is no pass "backward".
        device: "auto", "cuda" or "cpu"; a CPU is timed by the clock.

    Returns:
        A row a pass, keys and values, not saved yet. Out of memory, a wrong result and what an implementation
        does not take are a status.
    """
    device = resolve_device(device)
    key = {
        "implementation": name,
        "num_heads": num_heads,
        "batch_size": batch_size,
        "context_length": context_length,
        "d_head": d_head,
        "is_causal": is_causal,
        "dtype": dtype,
        "case": case_name(device, graph),
    }
    heads = (num_heads,) if num_heads > 1 else ()
    shape = (batch_size, *heads, context_length, d_head)

    def row(pass_: str) -> dict[str, Any]:
        timing = refused or _too_large(name, shape, pass_, dtype, device, is_causal)
        if timing is None:
            with switched_to(name):
                timing = _time_pass(function, shape, pass_, dtype, device, is_causal, graph)
        return key | {"pass": pass_} | timing.as_row()

    with matmul_precision(dtype):
        refused = why_not(name, function, dtype, d_head, device)
        return measured_in_order(lambda: [row(pass_) for pass_ in passes], dict)


def _too_large(
    name: str, shape: tuple[int, ...], pass_: str, dtype: str, device: torch.device, is_causal: bool
) -> Timing | None:
    """The status of a plain attention whose matrices of scores do not fit, without trying."""
    if name not in ("reference", "compiled"):
        return None
    sequences = shape[0] * (shape[1] if len(shape) == 4 else 1)
    needed = attention_peak_bytes(sequences, *shape[-2:], pass_, dtype, is_causal)
    if reason := why_no_memory(needed, device):
        return Timing(status="skipped", reason=reason)
    if name == "compiled" or device.type == "cpu":
        return None
    memory = torch.cuda.get_device_properties(device).total_memory
    if needed <= memory:
        return None
    reason = f"predicted, not tried: needs {needed / 2**30:.1f} GiB of {memory / 2**30:.1f} GiB"
    return Timing(status="oom", reason=reason)


def _time_pass(
    function: AttentionFunction,
    shape: tuple[int, ...],
    pass_: str,
    dtype: str,
    device: torch.device,
    is_causal: bool,
    graph: bool,
) -> Timing:
    def measure() -> Timing:
        inputs = [
            torch.randn(shape, device=device, dtype=DTYPES[dtype], requires_grad=True) for _ in range(3)
        ]
        do = torch.randn(shape, device=device, dtype=DTYPES[dtype])
        if graph:
            return _time_graph(function, inputs, do, pass_, is_causal)
        if pass_ == "backward":
            output = function(*inputs, is_causal)
            return _time(lambda: output.backward(do, retain_graph=True), inputs, device)
        if pass_ == "forward":
            return _time(lambda: function(*inputs, is_causal), inputs, device)
        return _time(lambda: function(*inputs, is_causal).backward(do), inputs, device)

    if device.type == "cpu":
        return _attempt(measure, device)
    if torch.cuda.memory_reserved(device) > KEPT_BYTES:
        release_memory(device)
    before = torch.cuda.memory_allocated(device) / MIB
    timing = _attempt(measure, device)
    peak = timing.peak_memory_mib
    return replace(timing, peak_memory_mib=peak if peak is None else peak - before)


def _attempt(measure: Callable[[], Timing], device: torch.device) -> Timing:
    """What it measures, or the status that says why it could not."""
    try:
        timing, reason = run_or_out_of_memory(measure, device)
    except Exception as error:  # compilers and launchers raise what they like
        return Timing(status="error", reason=one_line(error))
    return timing or Timing(status="oom", reason=reason)


def _time(
    step: Callable[[], Any],
    to_clear: list[Tensor],
    device: torch.device,
    *,
    warmup_ms: float = WARMUP_MS,
    repeat_ms: float = REPEAT_MS,
) -> Timing:
    """Times of a step, the gradients of `to_clear` cleared before each, and the most memory it held."""

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
    from triton.testing import do_bench

    times = do_bench(step, warmup=warmup_ms, rep=repeat_ms, grad_to_none=to_clear, return_mode="all")
    return Timing(tuple(times), peak_memory_mib=first.peak_memory_mib)


def _time_graph(
    function: AttentionFunction, inputs: list[Tensor], do: Tensor, pass_: str, is_causal: bool
) -> Timing:
    """Times of a step replayed from a CUDA graph of many."""
    from triton.testing import do_bench_cudagraph

    def step() -> Any:
        output = function(*inputs, is_causal)
        return output if pass_ == "forward" else torch.autograd.grad(output, inputs, do)

    torch.cuda.reset_peak_memory_stats(do.device)
    step()
    peak = torch.cuda.max_memory_allocated(do.device) / MIB
    times = do_bench_cudagraph(step, rep=GRAPH_MS, return_mode="all")
    return Timing(tuple(times), peak_memory_mib=peak)


def benchmark_leaderboard(
    name: str,
    function: AttentionFunction,
    *,
    num_heads: int = 16,
    context_length: int = 16_384,
    d_head: int = 64,
    device: str | torch.device = "auto",
    warmup_ms: float = 1000,
    repeat_ms: float = 10_000,
) -> dict[str, Any]:
    """flash_leaderboard's protocol to the letter, as a row; its score is the mean.

    One leaf in three slices, torch.compile(function), o.sum().backward(), gradients never cleared. What is
    already the work of torch.compile is not compiled once more.
    """
    device = resolve_device(device)
    key = {
        "implementation": name,
        "num_heads": num_heads,
        "batch_size": 1,
        "context_length": context_length,
        "d_head": d_head,
        "is_causal": True,
        "dtype": "bfloat16",
        "case": LEADERBOARD,
        "pass": "forward_backward",
    }

    def measure() -> Timing:
        shape = (3, num_heads, context_length, d_head)
        q, k, v = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
        torch.compiler.reset()  # what is compiled does not remember which of SDPA's backends was switched on
        compiled = function if name in COMPILED else torch.compile(function)

        def step() -> None:
            compiled(q, k, v, True).sum().backward()

        return _time(step, [], device, warmup_ms=warmup_ms, repeat_ms=repeat_ms)

    refused = cannot_compile(device) or why_not(name, function, "bfloat16", d_head, device)
    if refused:
        return key | refused.as_row()
    no_caches = torch.compiler.config.patch(force_disable_caches=True)  # nor do they remember it
    with switched_to(name), no_caches, watched_clocks(device) as clocks, warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="dynamo_pgo force disabled")
        timing = _attempt(measure, device)
    return key | timing.as_row() | clocks.as_row()
