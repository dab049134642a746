"""What a kernel's tile sizes, warps and pipeline stages do to its time: the study behind attention.config."""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch import Tensor

from cs336_systems.attention import flash_triton
from cs336_systems.attention.config import HOPPER_KERNELS, Tile
from cs336_systems.attention.launcher import Launcher, config_for, layout
from cs336_systems.dtypes import torch_dtype
from labbook.timing import Timing, matmul_precision, one_line, resolve_device, time_steps

STUDIED = ("forward", "dq", "dkdv")  # "backward" is the last two in one launch
TOLERANCE = 0.02  # relative, to the shipped tile: a wrong tile is off by far more


def sweep_tiles(
    tiles: Iterable[Tile],
    *,
    num_heads: int = 16,
    context_length: int = 16_384,
    d_head: int = 64,
    dtype: str = "bfloat16",
    device: str | torch.device = "auto",
    steps: int = 20,
) -> Iterator[list[dict[str, Any]]]:
    """Time each kernel alone, causal, with each tile; yields rows of table tile_times one at a time.

    The shipped tiles come first. A tile that does not fit the GPU, or computes something else, is a status.
    """
    device, tiles = resolve_device(device), tuple(tiles)
    shipped = config_for(torch_dtype(dtype), d_head, device, dtype == "tf32").tiles
    size = {"batch_size": 1, "num_heads": num_heads, "context_length": context_length, "d_head": d_head}
    for kernel in STUDIED:
        for tile in dict.fromkeys((*shipped[kernel], *tiles)):
            timing = _time(kernel, tile, (*size.values(),), dtype, device, steps)
            key = {"kernel": kernel, **size, "is_causal": True, "dtype": dtype, **tile.row()}
            yield [key | timing.as_row()]


def _time(
    kernel: str, tile: Tile, shape: tuple[int, ...], dtype: str, device: torch.device, steps: int
) -> Timing:
    with matmul_precision(dtype):
        try:
            run, outputs, wanted = _prepare(kernel, tile, shape, dtype, device)
            run()
            pairs = zip(outputs, wanted, strict=True)
            off = max(((mine - right).norm() / right.norm()).item() for mine, right in pairs)
            if off < TOLERANCE:
                return time_steps(run, device=device, warmup_steps=3, steps=steps)
            return Timing(status="error", reason=f"off by {off:.2g}, relative")
        except Exception as error:  # what compiler and launcher raise for a tile that is too large
            return Timing(status="error", reason=one_line(error))


def _prepare(
    kernel: str, tile: Tile, shape: tuple[int, ...], dtype: str, device: torch.device
) -> tuple[Callable[[], None], list[Tensor], list[Tensor]]:
    """A function that runs the kernel with this tile, what it writes, and what the shipped tiles write."""
    q, k, v, do = (torch.randn(shape, device=device, dtype=torch_dtype(dtype)) for _ in range(4))
    config = config_for(q.dtype, shape[-1], device, dtype == "tf32")
    config = config.with_tiles(**dict.fromkeys(HOPPER_KERNELS), **{kernel: tile})
    o, logsumexp, *residuals = flash_triton.flash_forward(q, k, v, True)
    residual = residuals[0] if residuals else logsumexp
    if kernel == "forward":
        launch = Launcher([layout(q)] * 4, config, True, kernels=("forward",))
        outputs = [torch.full_like(o, math.nan), torch.full_like(logsumexp, math.nan)]
        return lambda: launch.run(q, k, v, *outputs, residual), outputs, [o, logsumexp]
    dq, dk, dv = flash_triton.flash_backward(do, q, k, v, o, logsumexp, True, *residuals)
    launches = Launcher([layout(q)] * 8, config, True, kernels=("dq", "dkdv")).launches
    delta = (o.float() * do.float()).sum(-1)
    if kernel == "dq":
        outputs, wanted = [torch.full_like(q, math.nan)], [dq]
        inputs = q, k, v, do, o, logsumexp, residual, delta
    else:
        outputs, wanted = [torch.full_like(k, math.nan), torch.full_like(v, math.nan)], [dk, dv]
        inputs = q, k, v, do, logsumexp, residual, delta
    return lambda: launches[kernel].run(*inputs, *outputs), outputs, wanted
