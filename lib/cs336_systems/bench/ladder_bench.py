"""The optimisation ladder, measured: every rung of `attention.techniques` timed on its own, and checked."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention import flash_triton
from cs336_systems.attention import launch_plans as plans
from cs336_systems.attention.launcher import Launch, layout, on
from cs336_systems.attention.techniques import SHIPPED, STEPS, Rung, all_rungs
from cs336_systems.attention.variants import kernels
from cs336_systems.measure.subprocesses import in_processes
from cs336_systems.measure.timing import Timing, one_line, resolve_device, time_steps
from cs336_systems.names import check_choice

TOLERANCE = 0.02  # relative, to the shipped kernels: what is wrong is off by far more


def climb(passes: Iterable[str] = tuple(STEPS), **size: Any) -> Iterator[list[dict[str, Any]]]:
    """Rows of every rung, and of the kernels as they are shipped.

    Args:
        size: num_heads, context_length, d_head, device, steps, as in `benchmark_rung`.
    """
    work = [(kernel, rung.name) for kernel in passes for rung in all_rungs(kernel)]
    if resolve_device(size.get("device", "auto")).type == "cuda":
        in_processes(partial(benchmark_rung, **size | {"context_length": 512, "steps": 1}), work)
    for kernel, name in work:
        yield [benchmark_rung(kernel, name, **size)]


def benchmark_rung(
    kernel: str,
    name: str,
    *,
    num_heads: int = 16,
    context_length: int = 16_384,
    d_head: int = 64,
    device: str | torch.device = "auto",
    steps: int = 20,
) -> dict[str, Any]:
    """Time one rung: causal, bfloat16 (in the interpreter float16). A wrong result is an error."""
    device = resolve_device(device)
    numbered = {rung.name: (number, rung) for number, rung in enumerate(all_rungs(kernel))}
    check_choice(f"{kernel} rung", name, numbered)
    number, rung = numbered[name]
    dtype = "float16" if device.type == "cpu" else "bfloat16"
    key = {
        "implementation": "flash_triton",
        "num_heads": num_heads,
        "batch_size": 1,
        "context_length": context_length,
        "d_head": d_head,
        "is_causal": True,
        "dtype": dtype,
        "case": name,
        "kernel": kernel,
        "pass": kernel,
        "step": number,
    }
    shape = (1, num_heads, context_length, d_head)
    if reason := _why_not(rung, device):
        return key | Timing(status="skipped", reason=reason).as_row()
    try:
        with on(device):
            run, outputs, wanted = _prepare(rung, shape, getattr(torch, dtype), device)
            run()
            error = max(_distance(*pair) for pair in zip(outputs, wanted, strict=True))
            if not error < TOLERANCE:
                return key | Timing(status="error", reason=f"off by {error:.2g}, relative").as_row()
            return key | time_steps(run, device=device, warmup_steps=3, steps=steps).as_row()
    except Exception as error:  # the compiler and the launcher raise what they like
        return key | Timing(status="error", reason=one_line(error)).as_row()


def _why_not(rung: Rung, device: torch.device) -> str:
    """Why a rung cannot run there; empty if it can."""
    if device.type == "cpu" and rung.sums_dq == "descriptor":
        return "the interpreter has no copy engine that adds"
    on_hopper = device.type == "cuda" and torch.cuda.get_device_capability(device)[0] >= 9
    if rung.dependent_launch and not on_hopper:
        return "dependent launches need a Hopper GPU or a later one"
    return ""


def _distance(mine: Tensor, right: Tensor) -> float:
    return ((mine.float() - right.float()).norm() / right.float().norm()).item()


def _prepare(
    rung: Rung, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
) -> tuple[Callable[[], None], list[Tensor], list[Tensor]]:
    """A function that runs a rung, what it writes, and what the shipped kernels write."""
    q, k, v, do = (torch.randn(shape, device=device, dtype=dtype) for _ in range(4))
    o, logsumexp = flash_triton.flash_forward(q, k, v, True)
    wanted = [o, logsumexp]
    if rung.kernel == "backward":
        wanted = list(flash_triton.flash_backward(do, q, k, v, o, logsumexp, True))
    outputs = [torch.full_like(tensor, math.nan) for tensor in wanted]
    if rung.name == SHIPPED[rung.kernel].name:
        outputs = wanted
        run = partial(flash_triton.flash_forward, q, k, v, True)
        if rung.kernel == "backward":
            run = partial(flash_triton.flash_backward, do, q, k, v, o, logsumexp, True)
    elif rung.kernel == "forward":
        run = _forward(rung, (q, k, v), outputs)
    else:
        run = _backward(rung, (q, k, v, do), o, logsumexp, outputs)
    return run, outputs, wanted


def _problem(rung: Rung, q: Tensor) -> plans.Problem:
    way = plans.way_for(q.dtype, q.shape[-1], q.device)
    way = replace(way, descriptors=rung.copy_engine)
    return plans.Problem(layout(q), layout(q), way, is_causal=True)


def _forward(rung: Rung, inputs: tuple[Tensor, ...], outputs: list[Tensor]) -> Callable[[], None]:
    problem, tile = _problem(rung, inputs[0]), dict(rung.tiles)["forward"]
    layouts = tuple(layout(x) for x in inputs)
    launch = Launch(
        kernels(rung.changes)["forward"],
        problem.programs(problem.n_queries, tile.block_m),
        (*inputs[0].stride(), *problem.sizes, problem.scale * plans.LOG2E),
        problem.constants(tile, EVEN_KEYS=problem.n_keys % tile.block_n == 0),
        tile,
    )
    run = problem.loading(launch, layouts, (tile.block_m, tile.block_n, tile.block_n))
    return lambda: run(*inputs, *outputs)


def _backward(
    rung: Rung, inputs: tuple[Tensor, ...], o: Tensor, logsumexp: Tensor, outputs: list[Tensor]
) -> Callable[[], None]:
    problem, changed = _problem(rung, inputs[0]), kernels(rung.changes)
    layouts = tuple(layout(x) for x in inputs)
    lse2, delta = (torch.empty_like(logsumexp) for _ in range(2))
    dq, dk, dv = outputs

    def prepared(name: str, programs: int, options: dict[str, bool], **constants: bool):
        tile = dict(rung.tiles)[name]
        numbers = (
            *o.stride(),
            *o.stride(),
            *problem.sizes,
            problem.scale,
            problem.scale * plans.LOG2E,
        )
        launch = Launch(changed[name], programs, numbers, problem.constants(tile, **constants), tile)
        launch.options |= options
        rows = tile.block_m, tile.block_n, tile.block_n, tile.block_m
        return partial(problem.loading(launch, layouts, rows), *inputs)

    tiles = dict(rung.tiles)
    even = problem.n_keys % tiles["dq"].block_n == 0
    run_dq = prepared("dq", problem.programs(problem.n_queries, tiles["dq"].block_m), {}, EVEN_KEYS=even)
    dependent = {"launch_pdl": True} if rung.dependent_launch else {}
    run_dkdv = prepared("dkdv", problem.programs(problem.n_keys, tiles["dkdv"].block_n), dependent)
    sums = _SumsOfDq(rung, problem, dq) if rung.sums_dq else None

    def run() -> None:
        if not rung.own_delta:
            torch.sum(o.float() * inputs[3].float(), -1, out=delta)  # what a first version does
        run_dq(o, logsumexp, lse2, delta, dq)
        if sums is None:
            run_dkdv(lse2, delta, dk, dv)
        else:
            sums.clear()
            run_dkdv(lse2, delta, dk, dv, sums.target)
            sums.round_into(dq)

    return run


class _SumsOfDq:
    """dQ^T in float32, (batch * heads, BLOCK_D, n): programs of one fused kernel add to it."""

    def __init__(self, rung: Rung, problem: plans.Problem, dq: Tensor) -> None:
        heads, block_d = problem.batch * problem.heads, problem.way.block_d
        self.sums = dq.new_empty((heads * block_d, problem.n_queries), dtype=torch.float32)
        self.target, self.scale = self.sums, problem.scale
        if rung.sums_dq == "descriptor":
            block = [block_d, dict(rung.tiles)["dkdv"].block_m]
            self.target = TensorDescriptor(self.sums, list(self.sums.shape), [problem.n_queries, 1], block)

    def clear(self) -> None:
        self.sums.zero_()

    def round_into(self, dq: Tensor) -> None:
        batch, heads, n, d = dq.shape
        torch.mul(self.sums.view(batch, heads, -1, n)[:, :, :d].mT, self.scale, out=dq)
