"""What a kernel's tile sizes, warps and pipeline stages do to its time: the study behind the tuning table."""

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention import flash_triton
from cs336_systems.attention import launch_plans as plans
from cs336_systems.attention.config import KERNELS, Tile
from cs336_systems.attention.launcher import layout
from cs336_systems.measure.subprocesses import in_processes
from cs336_systems.measure.timing import (
    Timing,
    matmul_precision,
    one_line,
    resolve_device,
    time_steps,
)
from cs336_systems.names import check_choice

DTYPES = {
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "tf32": torch.float32,
    "float32": torch.float32,
}
# (block_m, block_n, num_warps, num_stages): a tensor core of Hopper's takes 64 rows, four warps at a time.
TILES = tuple(
    Tile(block_m, block_n, warps, stages)
    for block_m in (64, 128)
    for block_n in (32, 64, 128)
    for warps in (4, 8)
    for stages in (2, 3)
)
TOLERANCE = 0.02  # relative, to the tile of the table: a wrong tile is off by far more


def benchmark_tile(
    kernel: str,
    tile: Tile,
    *,
    batch_size: int = 1,
    num_heads: int = 16,
    context_length: int = 16_384,
    d_head: int = 64,
    dtype: str = "bfloat16",
    is_causal: bool = True,
    device: str | torch.device = "auto",
    steps: int = 20,
) -> dict[str, Any]:
    """Time one kernel alone with one tile, as a row. A tile that does not fit the GPU is a status.

    Args:
        kernel: "forward", "dq" or "dkdv".
        tile: instead of the table's for this kernel.
    """
    check_choice("kernel", kernel, KERNELS)
    device = resolve_device(device)
    key = {
        "implementation": "flash_triton",
        "num_heads": num_heads,
        "batch_size": batch_size,
        "context_length": context_length,
        "d_head": d_head,
        "is_causal": is_causal,
        "dtype": dtype,
        "case": tile.case,
        "kernel": kernel,
        "block_m": tile.block_m,
        "block_n": tile.block_n,
        "num_warps": tile.num_warps,
        "num_stages": tile.num_stages,
        "pass": "forward" if kernel == "forward" else "backward",
    }
    shape = (batch_size, num_heads, context_length, d_head)
    with matmul_precision(dtype):
        try:
            run, outputs, wanted = _prepare(kernel, tile, shape, dtype, device, is_causal)
            run()
            error = max(
                ((mine - right).norm() / right.norm()).item()
                for mine, right in zip(outputs, wanted, strict=True)
            )
            if not error < TOLERANCE:
                return key | Timing(status="error", reason=f"off by {error:.2g}, relative").as_row()
            return key | time_steps(run, device=device, warmup_steps=3, steps=steps).as_row()
        except (
            Exception
        ) as error:  # the compiler and the launcher raise what they like when a tile is too large
            return key | Timing(status="error", reason=one_line(error)).as_row()


def sweep_tiles(
    kernels: Iterable[str] = KERNELS,
    tiles: Iterable[Tile] = TILES,
    *,
    dtype: str = "bfloat16",
    d_head: int = 64,
    device: str | torch.device = "auto",
    **size: Any,
) -> Iterator[list[dict[str, Any]]]:
    """Rows of every kernel with every tile, one at a time; the table's own tiles first.

    Args:
        size: batch_size, num_heads, context_length, is_causal and steps, as in `benchmark_tile`.
    """
    device, tiles = resolve_device(device), tuple(tiles)
    size |= {"dtype": dtype, "d_head": d_head, "device": str(device)}
    with matmul_precision(dtype):
        way = plans.way_for(DTYPES[dtype], d_head, device, dtype == "tf32")
    work = [(kernel, tile) for kernel in kernels for tile in dict.fromkeys((*way.tiles_of(kernel), *tiles))]
    if device.type == "cuda":  # on a short sequence: the compiler needs longer than the kernels
        in_processes(partial(benchmark_tile, **size | {"context_length": 512, "steps": 1}), work)
    for kernel, tile in work:
        yield [benchmark_tile(kernel, tile, **size)]


def _prepare(
    kernel: str, tile: Tile, shape: tuple[int, ...], dtype: str, device: torch.device, is_causal: bool
) -> tuple[Callable[[], None], list[Tensor], list[Tensor]]:
    """A function that runs the kernel with this tile, what it writes, and what the table's tiles write."""
    q, k, v, do = (torch.randn(shape, device=device, dtype=DTYPES[dtype]) for _ in range(4))
    way = plans.way_for(q.dtype, shape[-1], device, dtype == "tf32")
    chosen = tuple((tile,) if name == kernel else way.tiles_of(name) for name in KERNELS)
    way = dataclasses.replace(way, tiles=chosen, forward_by_hand=None)
    o, logsumexp = flash_triton.flash_forward(q, k, v, is_causal)
    if kernel == "forward":
        plan = plans.forward_plan((layout(q),) * 4, way, is_causal)
        outputs = [torch.full_like(o, math.nan), torch.full_like(logsumexp, math.nan)]
        return lambda: plan(q, k, v, *outputs), outputs, [o, logsumexp]
    dq, dk, dv = flash_triton.flash_backward(do, q, k, v, o, logsumexp, is_causal)
    dq_plan, dkdv_plan = plans.split_plans((layout(q),) * 8, way, is_causal)
    lse2, delta = logsumexp * plans.LOG2E, (o.float() * do.float()).sum(-1)
    if kernel == "dq":
        outputs = [torch.full_like(q, math.nan)]
        return lambda: dq_plan(q, k, v, do, o, logsumexp, lse2, delta, *outputs), outputs, [dq]
    outputs = [torch.full_like(k, math.nan), torch.full_like(v, math.nan)]
    return lambda: dkdv_plan(q, k, v, do, lse2, delta, *outputs), outputs, [dk, dv]
