"""The attention kernels against their peers, in the handout's two protocols; or your own kernel.

    python -m cs336_systems bench                                          all that this machine can run
    python -m cs336_systems bench leaderboard --implementations flash_triton sdpa_cudnn

    from cs336_systems.bench import benchmark_cell
    benchmark_cell("mine", MyFlashAttention.apply, context_length=4096, d_head=64)

What is wrong is not timed: what fails check_attention, or cannot run, gets a row that says why, and no ratio.
"""

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import cache
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from cs336_systems.attention import attention
from cs336_systems.attention.peers import HALF_ONLY, PEERS, AttentionFunction
from cs336_systems.checks import AttentionCase, check_attention
from cs336_systems.measure.host import check_choice
from cs336_systems.measure.rows import save_rows
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

OURS = "flash_triton"
IMPLEMENTATIONS: dict[str, AttentionFunction] = {
    OURS: lambda q, k, v, is_causal: attention(q, k, v, is_causal, implementation=OURS),
    **PEERS,
}
PASSES = ("forward", "backward", "forward_backward")
DTYPES = {name: getattr(torch, name) for name in ("bfloat16", "float16", "float32")} | {"tf32": torch.float32}
TF32_ERROR = 5e-3  # relative; TF32 keeps ten bits of a factor
GRID_LENGTHS = tuple(2**power for power in range(7, 17))
GRID_HEADS = (16, 32, 64, 128)
MODEL_SHAPES = ((1, 16, 16_384, 64), (1, 16, 16_384, 128), (4, 16, 4096, 128))  # batch, heads, tokens, d_head
WARMUP_MS, REPEAT_MS = 25, 100


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
    """Time one implementation at one size: every repetition with a cold L2 cache (triton.testing.do_bench).

    Args:
        function: called as function(q, k, v, is_causal), with tensors (batch, heads, n, d), or (batch, n, d)
            for one head.
        graph: replay a CUDA graph instead: the kernels without the work of launching them from Python.
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
        "case": "wall clock" if device.type == "cpu" else "cuda graph" if graph else "do_bench",
    }
    if name in HALF_ONLY and DTYPES[dtype] == torch.float32:
        refused = Timing(status="skipped", reason=f"{name} takes 16-bit tensors only")
    elif wrong := why_wrong(function, dtype, d_head, device):
        refused = Timing(status="error", reason=wrong)
    else:
        heads = (num_heads,) if num_heads > 1 else ()
        shape = (batch_size, *heads, context_length, d_head)
        return [
            key
            | {"pass": pass_}
            | _time_pass(function, shape, pass_, dtype, device, is_causal, graph).as_row()
            for pass_ in passes
        ]
    return [key | {"pass": pass_} | refused.as_row() for pass_ in passes]


@cache
def why_wrong(function: AttentionFunction, dtype: str, d_head: int, device: torch.device) -> str:
    """What check_attention or PyTorch says against it at this dtype and head size; "" when all is well."""
    cases = [
        AttentionCase("whole tiles", (2,), 256, 256, d_head, is_causal=True),
        AttentionCase("large scores", (1,), 128, 128, d_head, is_causal=True, logit_scale=30.0),
    ]
    allowed = TF32_ERROR if dtype == "tf32" else None
    try:
        with matmul_precision(dtype):
            check_attention(
                function,
                cases=cases[: 1 if allowed else 2],
                dtype=DTYPES[dtype],
                device=device,
                allowed_error=allowed,
            )
    except (AssertionError, RuntimeError) as error:
        return one_line(error)
    return ""


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
        if pass_ == "backward":
            output = function(*inputs, is_causal)
            return _time(lambda: output.backward(do, retain_graph=True), inputs, graph=graph)
        if pass_ == "forward":
            return _time(lambda: function(*inputs, is_causal), inputs, graph=graph)
        return _time(lambda: function(*inputs, is_causal).backward(do), inputs, graph=graph)

    with matmul_precision(dtype):
        timing, reason = run_or_out_of_memory(measure, device)
    release_memory(device)
    return timing or Timing(status="oom", reason=reason)


def _time(
    step: Callable[[], Any],
    to_clear: list[Tensor],
    *,
    graph: bool = False,
    warmup_ms: float = WARMUP_MS,
    repeat_ms: float = REPEAT_MS,
) -> Timing:
    """Times of a step, the gradients of `to_clear` cleared before each."""
    device = to_clear[0].device
    if device.type == "cpu":
        return time_steps(step, device=device, warmup_steps=1, steps=3)
    from triton.testing import do_bench, do_bench_cudagraph

    step()
    torch.cuda.synchronize(device)
    torch.cuda.reset_peak_memory_stats(device)
    step()
    peak = torch.cuda.max_memory_allocated(device) / MIB
    options = {"rep": repeat_ms, "grad_to_none": to_clear, "return_mode": "all"}
    times = do_bench_cudagraph(step, **options) if graph else do_bench(step, warmup=warmup_ms, **options)
    return Timing(step_ms=tuple(times), peak_memory_mib=peak)


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
    """flash_leaderboard's protocol to the letter, as a row.

    One leaf in three slices, a compiled function, o.sum().backward(), gradients never cleared.
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
        "case": "leaderboard protocol",
        "pass": "forward_backward",
    }
    if wrong := why_wrong(function, "bfloat16", d_head, device):
        return key | Timing(status="error", reason=wrong).as_row()
    shape = (3, num_heads, context_length, d_head)
    q, k, v = torch.randn(shape, device=device, dtype=torch.bfloat16, requires_grad=True)
    compiled = torch.compile(function)

    def step() -> None:
        compiled(q, k, v, True).sum().backward()

    nothing = [torch.empty(0, device=device)]
    timing, reason = run_or_out_of_memory(
        lambda: _time(step, nothing, warmup_ms=warmup_ms, repeat_ms=repeat_ms), device
    )
    return key | (timing or Timing(status="oom", reason=reason)).as_row()


def benchmark_grid(
    names: Iterable[str],
    *,
    context_lengths: Iterable[int] = GRID_LENGTHS,
    d_heads: Iterable[int] = GRID_HEADS,
    dtypes: Iterable[str] = ("bfloat16", "float32"),
    **options: Any,
) -> Iterator[list[dict[str, Any]]]:
    """flash_benchmarking: batch 1, one head, causal; the rows of one implementation and size at a time."""
    for dtype, d_head, length, name in itertools.product(dtypes, d_heads, context_lengths, names):
        yield benchmark_cell(
            name,
            IMPLEMENTATIONS[name],
            context_length=length,
            d_head=d_head,
            dtype=dtype,
            **options,
        )


def summary(rows: Iterable[dict[str, Any]]) -> pd.DataFrame:
    """Median ms per size and implementation, and how many times as long as ours each takes."""
    frame = pd.DataFrame(rows)
    size = ["case", "dtype", "batch_size", "num_heads", "context_length", "d_head", "pass"]
    frame["time"] = frame.p50_ms.map("{:.3f}".format).where(frame.status == "ok", frame.status)
    ours = frame[(frame.implementation == OURS) & (frame.status == "ok")].set_index(size).p50_ms
    base = frame.set_index(size).index.map(ours.to_dict())
    ratio = pd.Series(frame.p50_ms.to_numpy() / pd.Series(base, dtype=float).to_numpy())
    others = (frame.status == "ok") & (frame.implementation != OURS) & ratio.notna()
    frame["time"] += ratio.map(" ({:.2f}x)".format).where(others, "")
    order = list(dict.fromkeys(frame.implementation))
    return frame.pivot(index=size, columns="implementation", values="time")[order].fillna("")


def run(protocols: Iterable[str] = (), names: Iterable[str] = ()) -> None:
    """Measure, save every row as it comes, print a table a protocol. Nothing given: everything.

    Raises:
        ValueError: the name of a protocol or of an implementation is unknown; the message lists the names.
    """
    names, protocols = list(names) or list(IMPLEMENTATIONS), list(protocols) or list(PROTOCOLS)
    for protocol in protocols:
        check_choice("protocol", protocol, PROTOCOLS)
    for name in names:
        check_choice("implementation", name, IMPLEMENTATIONS)
    for protocol in protocols:
        slug, batches = PROTOCOLS[protocol](names)
        rows = []
        for batch in batches:
            save_rows(batch, slug)
            rows += batch
        print(f"\n{protocol}: median ms (times ours)\n{summary(rows).to_string()}", flush=True)


def _leaderboard(names: list[str]) -> tuple[str, Iterator[list[dict]]]:
    return "flash_leaderboard", ([benchmark_leaderboard(name, IMPLEMENTATIONS[name])] for name in names)


def _models(names: list[str]) -> tuple[str, Iterator[list[dict]]]:
    return "flash_leaderboard", (
        benchmark_cell(
            name,
            IMPLEMENTATIONS[name],
            batch_size=batch,
            num_heads=heads,
            context_length=length,
            d_head=d_head,
        )
        for batch, heads, length, d_head in MODEL_SHAPES
        for name in names
    )


def _grid(names: list[str]) -> tuple[str, Iterator[list[dict]]]:
    return "flash_benchmarking", benchmark_grid(names)


PROTOCOLS = {"leaderboard": _leaderboard, "models": _models, "grid": _grid}
