"""What comes before and after Hopper's backward kernel: dq_accum cleared, and dQ made of it.

o, do, dq [BLOCK_M, BLOCK_D]    lse, delta [BLOCK_M]
dq_accum: float32; of each tile BLOCK_M * BLOCK_D numbers, in the order of hopper_backward's registers
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_common import LOG2E, pointers, program_tile, store_tile


@triton.jit
def bwd_preprocess_kernel(
    do_ptr,
    o_ptr,
    lse_ptr,
    lse2_ptr,
    delta_ptr,
    dq_accum_ptr,
    do_strides,
    o_strides,
    n_heads,
    n_queries,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """delta, L in powers of two, and a cleared dq_accum. Grid: (query tiles * batch * heads,).

    Past the last query L is infinite, so that P is zero there.
    """
    place = program_tile(tl.program_id(0), n_queries, n_heads, BLOCK_M, False)
    batch_head = place[1].to(tl.int64)
    rows = place[0] * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < n_queries) & (dims[None, :] < D)
    o_tile = pointers(o_ptr, o_strides, place, rows, dims)
    o = tl.load(o_tile, mask=inside, other=0.0).to(tl.float32)
    do_tile = pointers(do_ptr, do_strides, place, rows, dims)
    do = tl.load(do_tile, mask=inside, other=0.0).to(tl.float32)
    in_range = rows < n_queries
    lse = tl.load(lse_ptr + batch_head * n_queries + rows, mask=in_range, other=float("inf"))
    # What TMA loads has whole tiles of queries: without them a head's last tile would reach into the next.
    padded = batch_head * tl.cdiv(n_queries, BLOCK_M) * BLOCK_M + rows
    tl.store(lse2_ptr + padded, lse * LOG2E)
    tl.store(delta_ptr + padded, tl.sum(o * do, 1))
    # Cleared here, not by a launch of its own: TMA's additions begin with what lies there.
    accum_tile = dq_accum_ptr + padded[:, None] * BLOCK_D + dims[None, :]
    tl.store(accum_tile, tl.zeros([BLOCK_M, BLOCK_D], tl.float32))


@triton.jit
def bwd_postprocess_kernel(
    dq_accum_ptr,
    dq_ptr,
    dq_strides,
    n_heads,
    n_queries,
    scale,
    D: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """dQ = scale * dq_accum, brought into rows. Grid: (query tiles * batch * heads,)."""
    # One load in memory's order; the dimensions that `in_register_order` exchanged are exchanged back. It was
    # given up to 64 columns at a time (DQ_COLUMNS).
    place = program_tile(tl.program_id(0), n_queries, n_heads, BLOCK_M, False)
    start = dq_accum_ptr + tl.program_id(0).to(tl.int64) * (BLOCK_M * BLOCK_D)
    pieces = tl.load(start + tl.arange(0, BLOCK_M * BLOCK_D)) * scale
    PARTS: tl.constexpr = (BLOCK_D + 63) // 64
    # Part of the columns, 16 rows, 8 columns; row of 8, pair of columns, lower or upper 8 rows, column of it.
    pieces = tl.reshape(pieces, [PARTS, BLOCK_M // 16, BLOCK_D // PARTS // 8, 8, 4, 2, 2])
    dq = tl.reshape(tl.permute(pieces, [1, 5, 3, 0, 2, 4, 6]), [BLOCK_M, BLOCK_D])
    rows = place[0] * BLOCK_M + tl.arange(0, BLOCK_M)
    store_tile(dq_ptr, dq_strides, place, rows, rows < n_queries, dq, D)
