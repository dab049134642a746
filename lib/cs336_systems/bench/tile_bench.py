"""What a kernel's tile sizes, warps and pipeline stages do to its time: the study behind attention.config."""

import math
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention import flash_triton
from cs336_systems.attention.config import HOPPER_KERNELS, KERNELS, Tile
from cs336_systems.attention.launcher import LOG2E, Backward, Forward, config_for, layout
from cs336_systems.measure import Timing, in_processes, matmul_precision, resolve_device, time_steps
from cs336_systems.measure.timing import one_line
from cs336_systems.names import check_choice, torch_dtype

# A tensor core of Hopper's takes 64 rows, four warps at a time.
TILES = tuple(
    Tile(block_m, block_n, num_warps, num_stages)
    for block_m in (64, 128)
    for block_n in (32, 64, 128)
    for num_warps in (4, 8)
    for num_stages in (2, 3)
)
TOLERANCE = 0.02  # relative, to the shipped tile: a wrong tile is off by far more


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
        tile: instead of the shipped one for this kernel.
    """
    check_choice("kernel", kernel, KERNELS)
    device = resolve_device(device)
    sizes = {"batch_size": batch_size, "num_heads": num_heads, "context_length": context_length}
    sizes["d_head"] = d_head
    key = {"kernel": kernel, **sizes, "is_causal": is_causal, "dtype": dtype, **tile.row()}
    with matmul_precision(dtype):
        try:
            run, outputs, wanted = _prepare(kernel, tile, (*sizes.values(),), dtype, device, is_causal)
            run()
            pairs = zip(outputs, wanted, strict=True)
            off = max(((mine - right).norm() / right.norm()).item() for mine, right in pairs)
            if off < TOLERANCE:
                timing = time_steps(run, device=device, warmup_steps=3, steps=steps)
            else:
                timing = Timing(status="error", reason=f"off by {off:.2g}, relative")
        except Exception as error:  # what compiler and launcher raise for a tile that is too large
            timing = Timing(status="error", reason=one_line(error))
    return key | timing.as_row()


def sweep_tiles(
    kernels: Iterable[str] = KERNELS,
    tiles: Iterable[Tile] = TILES,
    *,
    dtype: str = "bfloat16",
    d_head: int = 64,
    device: str | torch.device = "auto",
    **size: Any,
) -> Iterator[list[dict[str, Any]]]:
    """Rows of table tile_times of every kernel with every tile, one at a time; the shipped tiles first.

    Args:
        size: batch_size, num_heads, context_length, is_causal and steps, as in `benchmark_tile`.
    """
    device, tiles = resolve_device(device), tuple(tiles)
    size |= {"dtype": dtype, "d_head": d_head, "device": str(device)}
    shipped = config_for(torch_dtype(dtype), d_head, device, dtype == "tf32").tiles
    work = [(kernel, tile) for kernel in kernels for tile in dict.fromkeys((*shipped[kernel], *tiles))]
    if device.type == "cuda":  # on a short sequence: the compiler needs longer than the kernels
        in_processes(partial(benchmark_tile, **size | {"context_length": 512, "steps": 1}), work)
    for kernel, tile in work:
        yield [benchmark_tile(kernel, tile, **size)]


def _prepare(
    kernel: str, tile: Tile, shape: tuple[int, ...], dtype: str, device: torch.device, is_causal: bool
) -> tuple[Callable[[], None], list[Tensor], list[Tensor]]:
    """A function that runs the kernel with this tile, what it writes, and what the shipped tiles write."""
    q, k, v, do = (torch.randn(shape, device=device, dtype=torch_dtype(dtype)) for _ in range(4))
    config = config_for(q.dtype, shape[-1], device, dtype == "tf32")
    config = config.with_tiles(**dict.fromkeys(HOPPER_KERNELS), **{kernel: tile})
    o, logsumexp = flash_triton.flash_forward(q, k, v, is_causal)
    if kernel == "forward":
        launch = Forward((layout(q),) * 4, config, is_causal)
        outputs = [torch.full_like(o, math.nan), torch.full_like(logsumexp, math.nan)]
        return lambda: launch(q, k, v, *outputs), outputs, [o, logsumexp]
    dq, dk, dv = flash_triton.flash_backward(do, q, k, v, o, logsumexp, is_causal)
    launch = Backward((layout(q),) * 8, config, is_causal)
    lse2, delta = logsumexp * LOG2E, (o.float() * do.float()).sum(-1)
    if kernel == "dq":
        outputs = [torch.full_like(q, math.nan)]
        return lambda: launch.dq(q, k, v, do, o, logsumexp, lse2, delta, *outputs), outputs, [dq]
    outputs = [torch.full_like(k, math.nan), torch.full_like(v, math.nan)]
    return lambda: launch.dkdv(q, k, v, do, lse2, delta, *outputs), outputs, [dk, dv]
