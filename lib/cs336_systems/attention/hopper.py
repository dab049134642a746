"""Launching Hopper's own dK and dV kernel. Gluon is imported with it: the interpreter has no use for it."""

from collections.abc import Callable
from typing import TYPE_CHECKING

from triton.experimental.gluon import language as gl

from .kernels_hopper import hopper_dkdv_kernel
from .launch import Launch, describer, four_dims

if TYPE_CHECKING:
    from .flash_triton import Layout, Problem


def tile_layout(block_shape: tuple[int, ...], dtype: str) -> gl.NVMMASharedLayout:
    """How a tile of this shape and 16-bit dtype lies in shared memory for the matrix units."""
    return gl.NVMMASharedLayout.get_default_for(block_shape, getattr(gl, dtype))


def row_layout() -> gl.NVMMASharedLayout:
    """How a row of float32 numbers, of L or delta, lies in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def hopper_dkdv_plan(
    problem: "Problem", inputs: "tuple[Layout, ...]", outputs: "tuple[Layout, ...]"
) -> Callable[..., None]:
    """The launch for q, k, v, do of these layouts: call it with them, lse2, delta, dk, dv.

    lse2 and delta are (batch, heads, n_queries), contiguous, n_queries a multiple of four.
    """
    way, tile = problem.way, problem.way.by_hand
    strides = [stride for output in outputs for stride in four_dims(*output)[1]]
    launch = Launch(
        hopper_dkdv_kernel,
        problem.programs(problem.n_keys, tile.block_n),
        (*strides, *problem.sizes, problem.scale, problem.scale_log2),
        {
            "CAUSAL": problem.is_causal,
            "D": problem.d,
            "BLOCK_D": way.block_d,
            "BLOCK_M": tile.block_m,
            "BLOCK_N": tile.block_n,
            "STAGES": tile.num_stages,
        },
        tile,
    )
    shapes = [(1, 1, rows, way.block_d) for rows in (tile.block_m, tile.block_n, tile.block_n, tile.block_m)]
    dtype = str(way.dtype).removeprefix("torch.")
    tensors = [
        describer(*four_dims(*layout), shape, tile_layout(shape, dtype))
        for layout, shape in zip(inputs, shapes, strict=True)
    ]
    rows = (problem.batch * problem.heads, problem.n_queries)
    row = describer(rows, (problem.n_queries, 1), (1, tile.block_m), row_layout())
    describers = (*tensors, row, row)

    def run(*arguments):
        *sources, dk, dv = arguments
        described = (describe(x) for describe, x in zip(describers, sources, strict=True))
        launch(*described, dk, dv)

    return run
