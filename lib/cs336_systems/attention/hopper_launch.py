"""Launching Hopper's own kernels. Gluon is imported with it: the interpreter has no use for it."""

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as gl

from cs336_systems.attention.config import AROUND_SUMS, Tile
from cs336_systems.attention.dq_accum import dq_from_sums_kernel, prepare_kernel
from cs336_systems.attention.hopper_backward import hopper_backward_kernel
from cs336_systems.attention.hopper_forward import hopper_forward_kernel
from cs336_systems.attention.launcher import Launch, Layout, describer, four_dims

if TYPE_CHECKING:
    from cs336_systems.attention.launch_plans import Problem


def tile_layout(block_shape: tuple[int, ...], dtype: str) -> gl.NVMMASharedLayout:
    """How a tile of this shape and 16-bit dtype lies in shared memory for the matrix units."""
    return gl.NVMMASharedLayout.get_default_for(block_shape, getattr(gl, dtype))


def row_layout() -> gl.NVMMASharedLayout:
    """How a row of float32 numbers, of L or delta, lies in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def _constants(problem: "Problem", tile: Tile) -> dict[str, Any]:
    """The constexprs, in both kernels' order."""
    return {
        "CAUSAL": problem.is_causal,
        "EVEN_KEYS": problem.n_keys % tile.block_n == 0,
        "D": problem.d,
        "BLOCK_D": problem.way.block_d,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
    }


def _describers(
    problem: "Problem", layouts: Sequence[Layout], rows: tuple[int, ...]
) -> list[Callable[[Tensor], Any]]:
    """For each layout a function that describes such a tensor as tiles of so many rows."""
    dtype = str(problem.way.dtype).removeprefix("torch.")
    shapes = [(1, 1, n, problem.way.block_d) for n in rows]
    return [
        describer(*four_dims(*layout), shape, tile_layout(shape, dtype))
        for layout, shape in zip(layouts, shapes, strict=True)
    ]


def hopper_forward_plan(problem: "Problem", layouts: tuple[Layout, ...]) -> Callable[..., None]:
    """The launch for q, k, v, o of these layouts; as plans.forward_plan."""
    *inputs, o = layouts
    tile = problem.way.forward_by_hand
    launch = Launch(
        hopper_forward_kernel,
        problem.programs(problem.n_queries, tile.block_m),
        (*four_dims(*o)[1], *problem.sizes, problem.scale_log2),
        _constants(problem, tile),
        tile,
    )
    tiles = _describers(problem, inputs, (tile.block_m, tile.block_n, tile.block_n))

    def run(q: Tensor, k: Tensor, v: Tensor, o: Tensor, lse: Tensor) -> None:
        described = (describe(x) for describe, x in zip(tiles, (q, k, v), strict=True))
        launch(*described, o, lse)

    return run


def hopper_backward_plan(problem: "Problem", layouts: tuple[Layout, ...]) -> Callable[..., None]:
    """The three launches for q, k, v, do, o, dq, dk, dv of these layouts; as plans.backward_plan."""
    way, tile = problem.way, problem.way.backward_by_hand
    _, _, _, do, o, dq, dk, dv = (four_dims(*layout) for layout in layouts)
    sizes = {"D": problem.d, "BLOCK_D": way.block_d, "BLOCK_M": tile.block_m}
    programs = problem.programs(problem.n_queries, tile.block_m)
    heads_and_queries = problem.sizes[:2]
    prepare = Launch(prepare_kernel, programs, (*do[1], *o[1], *heads_and_queries), sizes, AROUND_SUMS)
    finish = Launch(
        dq_from_sums_kernel, programs, (*dq[1], *heads_and_queries, problem.scale), sizes, AROUND_SUMS
    )
    backward = Launch(
        hopper_backward_kernel,
        problem.programs(problem.n_keys, tile.block_n),
        (*dk[1], *dv[1], *problem.sizes, problem.scale, problem.scale_log2),
        _constants(problem, tile),
        tile,
    )
    tiles = _describers(problem, layouts[:4], (tile.block_m, tile.block_n, tile.block_n, tile.block_m))
    rows = problem.batch * problem.heads, triton.cdiv(problem.n_queries, tile.block_m) * tile.block_m
    row = describer(rows, (rows[1], 1), (1, tile.block_m), row_layout())

    def run(*tensors: Tensor) -> None:
        q, k, v, do, o, lse, dq, dk, dv = tensors
        workspace = torch.empty((2 + way.block_d, *rows), dtype=torch.float32, device=q.device)
        lse2, delta, sums = workspace[0], workspace[1], workspace[2:]
        prepare(do, o, lse, lse2, delta, sums)
        described = (describe(x) for describe, x in zip(tiles, (q, k, v, do), strict=True))
        backward(*described, row(lse2), row(delta), sums, dk, dv)
        finish(sums, dq)

    return run
