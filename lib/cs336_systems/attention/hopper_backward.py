"""FlashAttention-2's backward for Hopper in one kernel, in Gluon, Triton's lower-level language.

It is the one for heads of 65 to 128 dimensions; hopper_backward_narrow is the one for smaller heads.

The algorithm and the notation are those of triton_backward; as in FlashAttention-3 (Shah et al. 2024) a
program owns keys, walks over the queries that see them, and computes dQ too: five matmuls instead of seven,
and each exponential once. All programs add their part of dQ to dq_accum in float32 (see dq_accum.py), in the
order in which they come: dQ's last bits vary.

    q, do, dq [BLOCK_M, BLOCK_D]    k, v, dk, dv [BLOCK_N, BLOCK_D]    lse, delta [BLOCK_M]
    st, pt, dpt, dst [BLOCK_N, BLOCK_M]: S, P, dP and dS, transposed
    qs, dos [STAGES, BLOCK_M, BLOCK_D], lses, deltas [STAGES, 1, BLOCK_M], dss [2, BLOCK_N, BLOCK_M]: shared

What makes it fast is *when* things happen. Matmuls run in the order in which they are issued:

    S(t+1)  dQ(t)  dK(t)  dP(t+1)  dV(t+1)  S(t+2) ...

where t is a tile of queries. P(t+1) is computed while dQ(t) and dK(t) run, dQ(t) added up while dK(t) runs,
dS(t+1) is computed while dV(t+1) runs. TMA fills a ring of STAGES buffers ahead of all that. dS crosses
shared memory, for dQ needs it across the warps: two buffers, so that one barrier a tile is enough.

What functions pass on together is a tuple:

    loads      (descriptors, buffers, ready, position), each of them of four: of Q, dO, L and delta; position
               is (batch, head, batch_head, first_query); ready holds the two mbarriers of a stage
    constants  (BLOCK_M, STAGES, layout of a left operand in registers)
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

block_barrier = getattr(gl, "thread_barrier", None) or gl.barrier  # Triton 3.7 renamed it


@gluon.constexpr_function
def _accumulator_layout(num_warps, m, n):
    """The registers of an (m, n) matmul: a warp for every 16 rows; what warps are left share the columns."""
    rows = max(4, min(num_warps, m // 16))
    columns = num_warps // rows
    return gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[rows, columns], instr_shape=[16, n // columns, 16]
    )


@gluon.jit
def _start_loading(loads, tile, stage, BLOCK_M: gl.constexpr, pred):
    """Start loading one tile by TMA: Q and L arrive at one barrier of the stage, dO and delta at another."""
    descriptors, buffers, ready, position = loads
    batch, head, batch_head, first_query = position
    row = first_query + tile * BLOCK_M
    q_ready = ready[0].index(stage)
    do_ready = ready[1].index(stage)
    q, do, lse, delta = descriptors
    qs, dos, lses, deltas = buffers
    mbarrier.expect(q_ready, q.block_type.nbytes + lse.block_type.nbytes, pred=pred)
    mbarrier.expect(do_ready, do.block_type.nbytes + delta.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(q, [batch, head, row, 0], q_ready, qs.index(stage), pred=pred)
    tma.async_copy_global_to_shared(do, [batch, head, row, 0], do_ready, dos.index(stage), pred=pred)
    tma.async_copy_global_to_shared(lse, [batch_head, row], q_ready, lses.index(stage), pred=pred)
    tma.async_copy_global_to_shared(delta, [batch_head, row], do_ready, deltas.index(stage), pred=pred)


@gluon.jit
def _probabilities(st, lse, queries, seen_from, scale_log2, MASKED: gl.constexpr):
    """P^T of one tile. L is infinite for rows past the last query: their P is 0.

    seen_from: the first query that sees a key. One comparison tells all: another for the last key, and one
    by keys alone, took registers that are not there.
    """
    pt = gl.exp2(st * scale_log2 - lse[None, :])
    if MASKED:
        pt = gl.where(queries[None, :] >= seen_from[:, None], pt, 0.0)
    return pt


@gluon.jit
def first_queries(keys, n_keys, CAUSAL: gl.constexpr):
    """Of each key the first query that sees it; none sees keys past the last."""
    seen_from = keys if CAUSAL else keys * 0
    return gl.where(keys < n_keys, seen_from, 0x7FFFFFFF)


@gluon.jit
def atomic_add_dq(dq_accum, dq):
    """Add a tile of dQ to dq_accum, which is in the order of the registers: 16 bytes a thread, 512 a warp.

    A thread's four neighbours are two columns of two rows, eight apart (`bwd_postprocess_kernel`).
    """
    m: gl.constexpr = dq.shape[0]
    n: gl.constexpr = dq.shape[1]
    pieces = dq.reshape([m // 16, 2, 8, n // 8, 4, 2]).permute([0, 3, 2, 4, 1, 5]).reshape([m * n])
    gl.atomic_add(dq_accum + gl.arange(0, m * n, pieces.type.layout), pieces, sem="relaxed")


@gluon.jit
def add_tile(
    state, kv, loads, dss, zeros, index, tiles, tile, scale_log2,
    LAST: gl.constexpr, MASKED: gl.constexpr, constants: gl.constexpr,
):  # fmt: skip
    """From P and dP of this tile, and dV still running, to those of the next; this one's dQ, dK are added.

    state: (dk, dv, pt, dpt, dq_accum, stage, phase), also what it returns. The place in dq_accum, the stage
    and its phase go from tile to tile too: what is computed from the number of the tile, the compiler keeps
    in registers, one for each use. kv: (k, v, K's buffer). zeros: of st and of dq. index: (queries of a
    tile, seen_from).
    """
    dk, dv, pt, dpt, dq_accum, stage, phase = state
    k, v, ks = kv
    _, buffers, ready, position = loads
    zeros, zeros_dq = zeros
    queries, seen_from = index
    BLOCK_M, STAGES, operand = constants
    BLOCK_D: gl.constexpr = zeros_dq.shape[1]
    first_query = position[3]
    qs, dos, lses, deltas = buffers
    following = gl.where(stage == STAGES - 1, 0, stage + 1)
    q = qs.index(stage)
    delta = deltas.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, zeros.type.layout))
    dst = (pt.to(gl.float32) * (dpt - delta[None, :])).to(q.dtype)
    ds = dss.index(tile & 1)
    ds.store(dst)
    fence_async_shared()
    # All of dS is there for the matrix units; and all warps have waited for dK and dV of the tile before.
    block_barrier()
    if not LAST:
        q_ready = ready[0].index(following)
        do_ready = ready[1].index(following)
        phase ^= (following == 0).to(gl.int32)
        mbarrier.wait(q_ready, phase)
        st = warpgroup_mma(k, qs.index(following).permute([1, 0]), zeros, use_acc=False, is_async=True)
    # 0, which the compiler cannot know: it would keep the places of K's 8 parts in 16 registers.
    k_rows = ks.index(tile >> 30)
    dq = warpgroup_mma(ds.permute([1, 0]), k_rows, zeros_dq, use_acc=False, is_async=True)
    dk = warpgroup_mma(ds, q, dk, is_async=True)  # dS in registers would take more than there are
    if LAST:
        dq, dv = warpgroup_mma_wait(1, deps=[dq, dv])
        atomic_add_dq(dq_accum, dq)
        dk = warpgroup_mma_wait(0, deps=[dk])
    else:
        ahead = tile + STAGES - 1  # into the buffers of the tile before
        before = gl.where(stage == 0, STAGES - 1, stage - 1)
        _start_loading(loads, ahead, before, BLOCK_M, ahead < tiles)
        st, dv = warpgroup_mma_wait(2, deps=[st, dv])
        lse = lses.index(following).reshape([BLOCK_M]).load(gl.SliceLayout(0, st.type.layout))
        pt = _probabilities(
            st, lse, first_query + (tile + 1) * BLOCK_M + queries, seen_from, scale_log2, MASKED
        )
        pt = pt.to(q.dtype)  # half the registers; dS becomes as exact as P itself is in the matmul with dO
        mbarrier.wait(q_ready, phase)  # it is over; but the compiler moves nothing across a wait
        dq = warpgroup_mma_wait(1, deps=[dq])
        atomic_add_dq(dq_accum, dq)
        mbarrier.wait(do_ready, phase)
        do = dos.index(following)
        dpt = warpgroup_mma(v, do.permute([1, 0]), zeros, use_acc=False, is_async=True)
        dv = warpgroup_mma(gl.convert_layout(pt, operand), do, dv, is_async=True)
        dpt, dk = warpgroup_mma_wait(1, deps=[dpt, dk])
    return dk, dv, pt, dpt, dq_accum + BLOCK_M * BLOCK_D, following, phase


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
def hopper_backward_kernel(
    q_src, k_src, v_src, do_src, lse2_src, delta_src, dq_accum_ptr, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, n_queries, n_keys, scale, scale_log2,
    CAUSAL: gl.constexpr, EVEN_KEYS: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dK, dV and dq_accum. Grid: (key tiles * batch * heads,). STAGES is at least 3.

    L in powers of two, delta and dq_accum, cleared, come for whole tiles of queries, by batch * heads.
    """
    dtype: gl.constexpr = q_src.dtype
    warps: gl.constexpr = gl.num_warps()
    scores: gl.constexpr = _accumulator_layout(warps, BLOCK_N, BLOCK_M)
    gradients: gl.constexpr = _accumulator_layout(warps, BLOCK_N, BLOCK_D)
    tile_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    kv_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    ds_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_M], dtype)

    key_tiles = gl.cdiv(n_keys, BLOCK_N)
    first_key = gl.program_id(0) % key_tiles * BLOCK_N  # causal: the first keys have the most queries
    batch_head = gl.program_id(0) // key_tiles
    batch = batch_head // n_heads
    head = batch_head % n_heads

    ks = gl.allocate_shared_memory(dtype, [1, BLOCK_N, BLOCK_D], kv_shape)
    vs = gl.allocate_shared_memory(dtype, [BLOCK_N, BLOCK_D], kv_shape)
    buffers = (
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], tile_shape),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], tile_shape),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse2_src.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_src.layout),
    )
    dss = gl.allocate_shared_memory(dtype, [2, BLOCK_N, BLOCK_M], ds_shape)
    ready = (
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout()),
    )
    kv_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(kv_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready[0].index(stage), count=1)
        mbarrier.init(ready[1].index(stage), count=1)
    fence_async_shared()
    block_barrier()

    query_tiles = gl.cdiv(n_queries, BLOCK_M)
    first_query = 0
    masked = 0  # tiles that need a mask; they come first
    if CAUSAL:  # at least one tile, so that keys that no query sees get their zeros
        first_query = gl.minimum(first_key // BLOCK_M, query_tiles - 1) * BLOCK_M
        masked = gl.cdiv(first_key + BLOCK_N - 1 - first_query, BLOCK_M)
    if not EVEN_KEYS:
        masked = gl.where(first_key + BLOCK_N > n_keys, query_tiles, masked) if CAUSAL else query_tiles
    tiles = query_tiles - first_query // BLOCK_M
    descriptors = (q_src, do_src, lse2_src, delta_src)
    loads = (descriptors, buffers, ready, (batch, head, batch_head, first_query))
    mbarrier.expect(kv_ready, 2 * k_src.block_type.nbytes)
    tma.async_copy_global_to_shared(k_src, [batch, head, first_key, 0], kv_ready, ks.index(0))
    tma.async_copy_global_to_shared(v_src, [batch, head, first_key, 0], kv_ready, vs)
    for stage in gl.static_range(STAGES - 1):
        _start_loading(loads, stage, stage, BLOCK_M, stage < tiles)

    seen_from = first_queries(first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, scores)), n_keys, CAUSAL)
    queries = gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores))
    zeros = gl.zeros([BLOCK_N, BLOCK_M], gl.float32, scores)
    zeros_dq = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, _accumulator_layout(warps, BLOCK_M, BLOCK_D))
    dk = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, gradients)
    dv = gl.zeros([BLOCK_N, BLOCK_D], gl.float32, gradients)
    operand: gl.constexpr = gl.DotOperandLayout(0, gradients, 2)
    constants: gl.constexpr = (BLOCK_M, STAGES, operand)
    first_row = batch_head.to(gl.int64) * query_tiles * BLOCK_M + first_query
    dq_accum = dq_accum_ptr + first_row * BLOCK_D

    mbarrier.wait(kv_ready, 0)
    k = ks.index(0)
    mbarrier.wait(ready[0].index(0), 0)
    mbarrier.wait(ready[1].index(0), 0)
    st = warpgroup_mma(k, buffers[0].index(0).permute([1, 0]), zeros, use_acc=False, is_async=True)
    st = warpgroup_mma_wait(0, deps=[st])
    lse = buffers[2].index(0).reshape([BLOCK_M]).load(gl.SliceLayout(0, scores))
    pt = _probabilities(st, lse, first_query + queries, seen_from, scale_log2, CAUSAL or not EVEN_KEYS)
    pt = pt.to(dtype)
    do = buffers[1].index(0)
    dpt = warpgroup_mma(vs, do.permute([1, 0]), zeros, use_acc=False, is_async=True)
    dv = warpgroup_mma(gl.convert_layout(pt, operand), do, dv, is_async=True)
    dpt = warpgroup_mma_wait(1, deps=[dpt])
    stage = 0
    phase = 0
    last_masked = gl.maximum(gl.minimum(masked, tiles) - 1, 0)
    kv = (k, vs, ks)
    all_zeros = (zeros, zeros_dq)
    index = (queries, seen_from)
    if CAUSAL or not EVEN_KEYS:
        for tile in range(0, last_masked):
            dk, dv, pt, dpt, dq_accum, stage, phase = add_tile(
                (dk, dv, pt, dpt, dq_accum, stage, phase), kv, loads, dss, all_zeros, index, tiles, tile,
                scale_log2, False, True, constants,
            )  # fmt: skip
    if CAUSAL or EVEN_KEYS:  # else all tiles have been masked: a second loop would spill registers
        for tile in range(last_masked, tiles - 1):
            dk, dv, pt, dpt, dq_accum, stage, phase = add_tile(
                (dk, dv, pt, dpt, dq_accum, stage, phase), kv, loads, dss, all_zeros, index, tiles, tile,
                scale_log2, False, False, constants,
            )  # fmt: skip
    dk, dv, pt, dpt, dq_accum, stage, phase = add_tile(
        (dk, dv, pt, dpt, dq_accum, stage, phase), kv, loads, dss, all_zeros, index, tiles, tiles - 1,
        scale_log2, True, False, constants,
    )  # fmt: skip

    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [warps, 1], [1, 0])
    rows = first_key + gl.arange(0, BLOCK_N, gl.SliceLayout(1, stored))
    dk *= scale
    _store(dk_ptr, dk, batch, head, rows, n_keys, stride_dkb, stride_dkh, stride_dkn, stride_dkd, D, stored)
    _store(dv_ptr, dv, batch, head, rows, n_keys, stride_dvb, stride_dvh, stride_dvn, stride_dvd, D, stored)
