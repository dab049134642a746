"""Launching Hopper's own kernels. Gluon is imported with them: the interpreter has no use for it."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from torch import Tensor
from triton.experimental.gluon import language as gl

from .kernels_hopper import hopper_dkdv_kernel, hopper_dq_kernel
from .launch import Launch, describer, four_dims
from .tuning import Tile

if TYPE_CHECKING:
    from .flash_triton import Layout, Problem

    Layouts = tuple[Layout, ...]


def tile_layout(block_shape: tuple[int, ...], dtype: str) -> gl.NVMMASharedLayout:
    """How a tile of this shape and 16-bit dtype lies in shared memory for the matrix units."""
    return gl.NVMMASharedLayout.get_default_for(block_shape, getattr(gl, dtype))


def row_layout() -> gl.NVMMASharedLayout:
    """How a row of float32 numbers, of L or delta, lies in shared memory."""
    return gl.NVMMASharedLayout(swizzle_byte_width=0, element_bitwidth=32, rank=2)


def hopper_dq_plan(
    problem: "Problem", tile: Tile, inputs: "Layouts", outputs: "Layouts"
) -> Callable[..., None]:
    """The launch for these layouts: call it with q, k, v, do, o, L, lse2, delta, dq."""
    even = problem.n_keys % tile.block_n == 0
    programs = problem.programs(problem.n_queries, tile.block_m)
    launch = _launch(hopper_dq_kernel, problem, tile, programs, outputs, EVEN_KEYS=even)
    return _describing(_tiles(problem, tile, inputs), launch)


def hopper_dkdv_plan(
    problem: "Problem", tile: Tile, inputs: "Layouts", outputs: "Layouts"
) -> Callable[..., None]:
    """The launch for these layouts: call it with q, k, v, do, lse2, delta, dk, dv.

    lse2 and delta are (batch, heads, n_queries), contiguous, n_queries a multiple of four.
    """
    programs = problem.programs(problem.n_keys, tile.block_n)
    launch = _launch(hopper_dkdv_kernel, problem, tile, programs, outputs)
    rows = (problem.batch * problem.heads, problem.n_queries)
    row = describer(rows, (problem.n_queries, 1), (1, tile.block_m), row_layout())
    return _describing([*_tiles(problem, tile, inputs), row, row], launch)


def _launch(
    kernel: Any, problem: "Problem", tile: Tile, programs: int, outputs: "Layouts", **only_some: bool
) -> Launch:
    strides = [stride for output in outputs for stride in four_dims(*output)[1]]
    constants = {"CAUSAL": problem.is_causal, **only_some} | {
        "D": problem.d,
        "BLOCK_D": problem.way.block_d,
        "BLOCK_M": tile.block_m,
        "BLOCK_N": tile.block_n,
        "STAGES": tile.num_stages,
    }
    numbers = (*strides, *problem.sizes, problem.scale, problem.scale_log2)
    return Launch(kernel, programs, numbers, constants, tile)


def _tiles(problem: "Problem", tile: Tile, inputs: "Layouts") -> list[Callable[[Tensor], Any]]:
    """What describes q, k, v and do."""
    rows = (tile.block_m, tile.block_n, tile.block_n, tile.block_m)
    shapes = [(1, 1, n, problem.way.block_d) for n in rows]
    dtype = str(problem.way.dtype).removeprefix("torch.")
    return [
        describer(*four_dims(*layout), shape, tile_layout(shape, dtype))
        for layout, shape in zip(inputs, shapes, strict=True)
    ]


def _describing(describers: list[Callable[[Tensor], Any]], launch: Launch) -> Callable[..., None]:
    """Launch with the first tensors described, and the others as they are."""
    count = len(describers)

    def run(*tensors: Tensor) -> None:
        described = (describe(x) for describe, x in zip(describers, tensors[:count], strict=True))
        launch(*described, *tensors[count:])

    return run
