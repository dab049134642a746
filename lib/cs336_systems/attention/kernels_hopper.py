"""dK and dV for Hopper, its asynchronous units driven by hand (Gluon: Triton's lower-level language).

The algorithm and the notation are those of kernels_backward.dkdv_kernel. What differs is *when* things
happen. Triton waits for each matrix product right where it is written; here a product is issued and left
running while the exponentials of its tile are computed, and the copy engine fills a ring of STAGES buffers
ahead of both. K and V stay in registers, where the matrix units can read them.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_init,
    warpgroup_mma_wait,
)

barrier_of_block = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.7 renamed it


@gluon.constexpr_function
def _accumulator(num_warps, n):
    """The registers of a (16 * num_warps, n) product: every warp owns 16 whole rows."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, n, 16])


@gluon.jit
def _start_loading(
    descriptors, buffers, ready, batch, head, batch_head, first_query, tile, BLOCK_M: gl.constexpr,
    STAGES: gl.constexpr, pred,
):  # fmt: skip
    """Start the copies of one tile of Q, dO, L and delta; the stage's barrier tells when all are there."""
    stage = tile % STAGES
    barrier = ready.index(stage)
    row = first_query + tile * BLOCK_M
    q, do, lse, delta = descriptors
    qs, dos, lses, deltas = buffers
    mbarrier.expect(barrier, 2 * q.block_type.nbytes + 2 * lse.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(q, [batch, head, row, 0], barrier, qs.index(stage), pred=pred)
    tma.async_copy_global_to_shared(lse, [batch_head, row], barrier, lses.index(stage), pred=pred)
    tma.async_copy_global_to_shared(do, [batch, head, row, 0], barrier, dos.index(stage), pred=pred)
    tma.async_copy_global_to_shared(delta, [batch_head, row], barrier, deltas.index(stage), pred=pred)


@gluon.jit
def _add_tile(
    dk, dv, k, v, descriptors, buffers, ready, zeros, batch, head, batch_head, keys, queries, first_query,
    tiles, tile, scale_log2,
    DIAGONAL: gl.constexpr, BLOCK_M: gl.constexpr, STAGES: gl.constexpr, operand: gl.constexpr,
):  # fmt: skip
    """Issue the products that add one tile of queries to dK and dV; both are still running on return."""
    per_query: gl.constexpr = gl.SliceLayout(0, zeros.type.layout)
    stage = tile % STAGES
    mbarrier.wait(ready.index(stage), (tile // STAGES) & 1)
    qs, dos, lses, deltas = buffers
    q = qs.index(stage)
    do = dos.index(stage)
    st = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
    dpt = warpgroup_mma(v, do.permute([1, 0]), zeros, use_acc=False, is_async=True)
    # S^T is there, and so are dK and dV of the tile before: nobody reads that tile's buffers any more.
    st, dk, dv = warpgroup_mma_wait(1, deps=[st, dk, dv])
    barrier_of_block()
    ahead = tile + STAGES - 1
    _start_loading(
        descriptors, buffers, ready, batch, head, batch_head, first_query, ahead, BLOCK_M, STAGES,
        ahead < tiles,
    )  # fmt: skip

    lse = lses.index(stage).reshape([BLOCK_M]).load(per_query)
    pt = gl.exp2(st * scale_log2 - lse[None, :])
    if DIAGONAL:
        pt = gl.where(first_query + tile * BLOCK_M + queries[None, :] >= keys[:, None], pt, 0.0)
    dv = warpgroup_mma(gl.convert_layout(pt.to(q.dtype), operand), do, dv, is_async=True)
    dpt = warpgroup_mma_wait(1, deps=[dpt])
    delta = deltas.index(stage).reshape([BLOCK_M]).load(per_query)
    dst = pt * (dpt - delta[None, :])
    dk = warpgroup_mma(gl.convert_layout(dst.to(q.dtype), operand), q, dk, is_async=True)
    return dk, dv


@gluon.jit
def _store(
    ptr, value, batch, head, rows, n_rows, stride_b, stride_h, stride_n, stride_d,
    D: gl.constexpr, layout: gl.constexpr,
):  # fmt: skip
    dims = gl.arange(0, value.shape[1], gl.SliceLayout(0, layout))
    start = ptr + batch.to(gl.int64) * stride_b + head.to(gl.int64) * stride_h
    tile = start + rows[:, None].to(gl.int64) * stride_n + dims[None, :] * stride_d
    value = gl.convert_layout(value.to(ptr.dtype.element_ty), layout)
    gl.store(tile, value, mask=(rows[:, None] < n_rows) & (dims[None, :] < D))


@gluon.jit
def hopper_dkdv_kernel(
    q_src, k_src, v_src, do_src, lse2_src, delta_src, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, n_queries, n_keys, scale, scale_log2,
    CAUSAL: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dK and dV. Grid: (key tiles * batch * heads,). L and delta come as (batch * heads, n_queries)."""
    dtype: gl.constexpr = q_src.dtype
    scores: gl.constexpr = _accumulator(gl.num_warps(), BLOCK_M)
    gradients: gl.constexpr = _accumulator(gl.num_warps(), BLOCK_D)
    tile_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    kv_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)

    key_tiles = gl.cdiv(n_keys, BLOCK_N)
    first_key = gl.program_id(0) % key_tiles * BLOCK_N  # causal: the first keys have the most queries
    batch_head = gl.program_id(0) // key_tiles
    batch = batch_head // n_heads
    head = batch_head % n_heads

    k = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], kv_shape)
    v = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], kv_shape)
    buffers = (
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], tile_shape),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], tile_shape),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse2_src.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_src.layout),
    )
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    barrier_of_block()

    first_query = 0
    masked = 0  # tiles that the diagonal crosses; they come first
    if CAUSAL:
        first_query = first_key // BLOCK_M * BLOCK_M
        masked = gl.cdiv(first_key + BLOCK_N - 1 - first_query, BLOCK_M)
    tiles = gl.maximum(gl.cdiv(n_queries - first_query, BLOCK_M), 0)
    descriptors = (q_src, do_src, lse2_src, delta_src)
    mbarrier.expect(kv_ready, 2 * k_src.block_type.nbytes)
    tma.async_copy_global_to_shared(k_src, [batch, head, first_key, 0], kv_ready, k)
    tma.async_copy_global_to_shared(v_src, [batch, head, first_key, 0], kv_ready, v)
    for stage in gl.static_range(STAGES - 1):
        _start_loading(
            descriptors, buffers, ready, batch, head, batch_head, first_query, stage, BLOCK_M, STAGES,
            stage < tiles,
        )  # fmt: skip

    keys = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores))
    queries = gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores))
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores)
    dk = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_D], gl.float32, gradients))
    dv = warpgroup_mma_init(gl.zeros([BLOCK_N, BLOCK_D], gl.float32, gradients))
    mbarrier.wait(kv_ready, 0)
    k = k.load(gl.DotOperandLayout(0, scores, 2))
    v = v.load(gl.DotOperandLayout(0, scores, 2))
    operand: gl.constexpr = gl.DotOperandLayout(0, gradients, 2)
    for tile in range(0, gl.minimum(masked, tiles)):
        dk, dv = _add_tile(
            dk, dv, k, v, descriptors, buffers, ready, zeros, batch, head, batch_head, keys, queries,
            first_query, tiles, tile, scale_log2, True, BLOCK_M, STAGES, operand,
        )  # fmt: skip
    for tile in range(masked, tiles):
        dk, dv = _add_tile(
            dk, dv, k, v, descriptors, buffers, ready, zeros, batch, head, batch_head, keys, queries,
            first_query, tiles, tile, scale_log2, False, BLOCK_M, STAGES, operand,
        )  # fmt: skip
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])

    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, stored))
    dk *= scale
    _store(dk_ptr, dk, batch, head, rows, n_keys, stride_dkb, stride_dkh, stride_dkn, stride_dkd, D, stored)
    _store(dv_ptr, dv, batch, head, rows, n_keys, stride_dvb, stride_dvh, stride_dvn, stride_dvd, D, stored)
