"""One attention function at one size, timed the way the handout times it: a `Cell` gives rows of flash_times.

    time_cell(Cell("flash_triton", context_length=4096, d_head=64))
    time_cell(Cell("mine", context_length=4096, d_head=64), MyFlashAttention.apply)

What is wrong is not timed: what fails check_attention, or cannot run, gets rows that say why.
"""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

import torch
from torch import Tensor

from cs336_systems.accounting import attention_peak_bytes
from cs336_systems.arguments import check_choice
from cs336_systems.attention.implementations import ATTENTION, ATTENTION_PASSES, COMPILER, OURS, sdpa_backend
from cs336_systems.bench.attention_bench import why_no_attention
from cs336_systems.checks.attention_checks import AttentionCase, check_attention
from cs336_systems.dtypes import torch_dtype
from labbook import timing
from labbook.machine import why_no_memory
from labbook.rows import measured_in_order, pass_order_errors
from labbook.timing import MIB, Timing, time_cold_cache

DO_BENCH, CUDA_GRAPH, WALL_CLOCK = "do_bench", "cuda_graph", "wall_clock"
# A CUDA graph cannot split a step: there is no backward by itself.
PASSES = dict.fromkeys((DO_BENCH, WALL_CLOCK), ATTENTION_PASSES) | {CUDA_GRAPH: ("forward_backward",)}
GRAPH_MS = 5  # work in one graph, replayed ten times
KEPT_BYTES = 2**33  # more than this in PyTorch's own cache is given back between two measurements

# Relative. TF32 keeps ten bits of a factor; plain attention rounds at every step, fused attention does not.
TF32_ERROR = 5e-3
BASELINE_ERROR = {torch.bfloat16: 2e-2, torch.float16: 2e-2, torch.float32: 1e-5}
AttentionFunction = Callable[[Tensor, Tensor, Tensor, bool], Tensor]


@dataclass(frozen=True)
class Cell:
    """One implementation at one size, timed in one way.

    protocol: "do_bench", every repetition with a cold L2 cache; "cuda_graph", replayed, without the work of
        launching from Python. On a CPU both are "wall_clock".
    """

    implementation: str
    context_length: int
    d_head: int
    dtype: str = "bfloat16"
    batch_size: int = 1
    num_heads: int = 1
    is_causal: bool = True
    protocol: str = DO_BENCH

    @property
    def shape(self) -> tuple[int, ...]:
        """Of q, k and v: (batch, heads, n, d), or (batch, n, d) for one head."""
        heads = (self.num_heads,) if self.num_heads > 1 else ()
        return (self.batch_size, *heads, self.context_length, self.d_head)

    def on(self, device: torch.device) -> "Cell":
        """The cell as that device can time it."""
        return replace(self, protocol=WALL_CLOCK) if device.type == "cpu" else self


def time_cell(
    cell: Cell,
    function: AttentionFunction | None = None,
    *,
    device: str | torch.device = "auto",
) -> list[dict[str, Any]]:
    """Time every pass of one cell.

    Args:
        function: called as function(q, k, v, is_causal); by default the registry's of that name.
        device: "auto", "cuda" or "cpu"; a CPU is timed by the clock.

    Returns:
        Rows of flash_times, one a pass. Out of memory, a wrong result, what an implementation does not take,
        and a pass faster than one inside it (something else had the machine) are a status.

    Raises:
        ValueError: the implementation is unknown and no function is given; or the protocol is unknown.
    """
    check_choice("protocol", cell.protocol, PASSES)
    if function is None:
        check_choice("implementation", cell.implementation, ATTENTION)
        function = ATTENTION[cell.implementation].load()
    device = timing.resolve_device(device)
    cell = cell.on(device)
    refused = None

    def row(pass_: str) -> dict[str, Any]:
        stopped = refused or _too_large(cell, pass_, device)
        values = stopped.as_row() if stopped else _timed(cell, function, pass_, device)
        return asdict(cell) | {"pass": pass_} | values

    with timing.matmul_precision(cell.dtype):
        refused = why_not(cell.implementation, function, cell.dtype, cell.d_head, device)
        rows = measured_in_order(lambda: [row(pass_) for pass_ in PASSES[cell.protocol]])
    if contradictions := pass_order_errors(rows):
        failed = Timing(status="error", reason=contradictions[0]).as_row()
        rows = [asdict(cell) | {"pass": row["pass"]} | failed for row in rows]
    return rows


def backend_of(name: str) -> AbstractContextManager:
    """`implementations.sdpa_backend`; nothing for an attention that the registry does not know."""
    return sdpa_backend(name) if name in ATTENTION else nullcontext()


def why_not(
    name: str, function: AttentionFunction, dtype: str, d_head: int, device: torch.device
) -> Timing | None:
    """The status of what must not be timed: it does not take the dtype, cannot run here, or is wrong.

    A verdict of check_attention is remembered for each function, dtype, head size and device.
    """
    if name in ATTENTION and COMPILER in ATTENTION[name].needs:
        torch._dynamo.reset()  # it stops compiling after eight sizes
    if reason := why_no_attention(name, dtype, device):
        return Timing(status="skipped", reason=reason)
    wrong = why_wrong(name, function, dtype, d_head, device)
    return Timing(status="error", reason=wrong) if wrong else None


@cache
def why_wrong(name: str, function: AttentionFunction, dtype: str, d_head: int, device: torch.device) -> str:
    """What check_attention, a compiler or a launcher says against it; "" when all is well.

    Ours, and whatever the registry does not know, must be as near to float64 as check_attention demands;
    baselines need only be right by and large.
    """
    cases = [AttentionCase("whole tiles", (2,), 256, 256, d_head, is_causal=True)]
    strict = name == OURS or name not in ATTENTION
    if strict and dtype != "tf32":
        cases.append(AttentionCase("large scores", (8,), 128, 128, d_head, is_causal=True, logit_scale=30.0))
    allowed = None if strict else BASELINE_ERROR[torch_dtype(dtype)]
    allowed = TF32_ERROR if dtype == "tf32" else allowed

    def switched(q: Tensor, k: Tensor, v: Tensor, is_causal: bool) -> Tensor:
        with backend_of(name):  # not around the check itself, whose yardstick is PyTorch's choice
            return function(q, k, v, is_causal)

    how = {"dtype": torch_dtype(dtype), "device": device, "allowed_error": allowed}
    try:
        check_attention(switched, cases=cases, **how)
    except Exception as error:  # a wrong result, or whatever a compiler or a launcher raises
        return timing.one_line(error)
    return ""


def _too_large(cell: Cell, pass_: str, device: torch.device) -> Timing | None:
    """The status of an attention whose scores do not fit into a CPU's memory, without trying."""
    known = ATTENTION.get(cell.implementation)
    if not known or not known.holds_scores:
        return None
    shape = cell.batch_size * cell.num_heads, cell.context_length, cell.d_head
    needed = attention_peak_bytes(*shape, pass_, cell.dtype, cell.is_causal)
    reason = why_no_memory(needed, device)
    return Timing(status="skipped", reason=reason) if reason else None


def _timed(cell: Cell, function: AttentionFunction, pass_: str, device: torch.device) -> dict[str, Any]:
    """The values of one pass."""
    if device.type == "cuda" and torch.cuda.memory_reserved(device) > KEPT_BYTES:
        timing.release_memory(device)
    before = torch.cuda.memory_allocated(device) / MIB if device.type == "cuda" else 0

    def measure() -> Timing:
        factory = {"device": device, "dtype": torch_dtype(cell.dtype)}
        q, k, v = (torch.randn(cell.shape, **factory, requires_grad=True) for _ in range(3))
        do = torch.randn(cell.shape, **factory)
        if cell.protocol == CUDA_GRAPH:
            return _time_graph(lambda: torch.autograd.grad(function(q, k, v, cell.is_causal), (q, k, v), do))
        output = function(q, k, v, cell.is_causal) if pass_ == "backward" else None
        step = {
            "forward": lambda: function(q, k, v, cell.is_causal),
            "backward": lambda: output.backward(do, retain_graph=True),
            "forward_backward": lambda: function(q, k, v, cell.is_causal).backward(do),
        }[pass_]
        return time_cold_cache(step, device=device, to_clear=(q, k, v))

    with backend_of(cell.implementation):
        timed = timing.timing_or_status(measure, device, errors=Exception)  # compilers raise what they like
    if timed.peak_memory_mib is not None:
        timed = replace(timed, peak_memory_mib=timed.peak_memory_mib - before)
    return timed.as_row()


def _time_graph(step: Callable[[], Any]) -> Timing:
    """Times of a step replayed from a CUDA graph of many."""
    from triton.testing import do_bench_cudagraph

    torch.cuda.reset_peak_memory_stats()
    step()
    peak = torch.cuda.max_memory_allocated() / MIB
    times = do_bench_cudagraph(step, rep=GRAPH_MS, return_mode="all")
    return Timing(tuple(times), peak_memory_mib=peak)
