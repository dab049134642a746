"""Hopper's backward for heads of up to 64 dimensions, in Gluon, with a role for every warp.

Algorithm and notation are those of hopper_backward, and dQ is added up in dq_accum as there. Narrow heads
leave registers for K and V, and matmuls so short that the matrix units would wait for exponentials. So a
program's keys belong to two owners, four warps and 64 keys each, which share nothing but what is loaded:
while one computes P or dS, the matrix units have the other's matmuls. dQ needs the keys of both, and is the
work of four more warps, the adder. One warp, the loader, has TMA fill a ring of STAGES buffers.

    owner    matmuls  S(t) dP(t)      dV(t)       dK(t) S(t+1) dP(t+1)        dV(t+1)         dK(t+1) ...
             the rest           P(t)        dS(t)                     P(t+1)          dS(t+1)
    adder    matmul                                dQ(t)                                       dQ(t+1) ...
             the rest                                   dq_accum += dQ(t)

where t is a tile of queries. dS goes to the adder through shared memory, and from registers into dK.

    q, do, dq [BLOCK_M, BLOCK_D]    lse, delta [BLOCK_M]
    k, v, dk, dv [KEYS, BLOCK_D], st, pt, dpt, dst [KEYS, BLOCK_M]: of one owner; S, P, dP and dS transposed
    ks, vs [2, KEYS, BLOCK_D], qs, dos [STAGES, BLOCK_M, BLOCK_D], lses, deltas [STAGES, 1, BLOCK_M],
    dss [2 * SLOTS, KEYS, BLOCK_M]: shared; in every slot dS of both owners

What functions pass on together is a tuple:

    sources    (q_src, k_src, v_src, do_src, lse2_src, delta_src), what TMA loads from
    buffers    (ks, vs, qs, dos, lses, deltas, dss)
    barriers   (kv_ready, q_ready, do_ready, free, ds_ready, ds_free): one mbarrier, three times one of every
               stage, one of every dS, one of every slot
    place      (batch, head, batch_head, first_query, first_key)
    sizes      (n_keys, tiles, masked, scale, scale_log2); the tiles that need a mask come first
    outputs    (dk_ptr, dv_ptr, strides of dk, strides of dv)
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

from cs336_systems.attention.hopper_backward import (
    _accumulator_layout,
    _probabilities,
    _store,
    atomic_add_dq,
    block_barrier,
    first_queries,
)

KEYS = gl.constexpr(64)  # of an owner: one matmul of four warps has so many rows
SLOTS = gl.constexpr(2)  # an owner is up to two tiles ahead of the adder


@gluon.jit
def _next(index, phase, COUNT: gl.constexpr):
    """The place in a ring after this one, and the phase of its barriers."""
    index += 1
    phase ^= (index == COUNT).to(gl.int32)
    return gl.where(index == COUNT, 0, index), phase


@gluon.jit
def load(sources, buffers, barriers, place, tiles):
    """K and V, then all tiles of Q, L, dO and delta, each into buffers that both owners have read."""
    q_src, k_src, v_src, do_src, lse2_src, delta_src = sources
    ks, vs, qs, dos, lses, deltas, _ = buffers
    kv_ready, q_ready, do_ready, free, _, _ = barriers
    batch, head, batch_head, row, first_key = place
    both: gl.constexpr = [2 * KEYS, ks.shape[2]]
    mbarrier.expect(kv_ready, 2 * k_src.block_type.nbytes)
    k_rows = ks._reinterpret(ks.dtype, both, ks.layout)
    v_rows = vs._reinterpret(vs.dtype, both, vs.layout)
    tma.async_copy_global_to_shared(k_src, [batch, head, first_key, 0], kv_ready, k_rows)
    tma.async_copy_global_to_shared(v_src, [batch, head, first_key, 0], kv_ready, v_rows)
    nbytes: gl.constexpr = q_src.block_type.nbytes + lse2_src.block_type.nbytes
    stage = 0
    phase = 1
    for _ in range(tiles):
        mbarrier.wait(free.index(stage), phase)
        ready = q_ready.index(stage)
        mbarrier.expect(ready, nbytes)
        tma.async_copy_global_to_shared(q_src, [batch, head, row, 0], ready, qs.index(stage))
        tma.async_copy_global_to_shared(lse2_src, [batch_head, row], ready, lses.index(stage))
        ready = do_ready.index(stage)
        mbarrier.expect(ready, nbytes)
        tma.async_copy_global_to_shared(do_src, [batch, head, row, 0], ready, dos.index(stage))
        tma.async_copy_global_to_shared(delta_src, [batch_head, row], ready, deltas.index(stage))
        row += qs.shape[1]
        stage, phase = _next(stage, phase, qs.shape[0])


@gluon.jit
def add_dq(buffers, barriers, dq_accum, tiles):
    """The adder: dq_accum += dS K, of all tiles in turn."""
    ks, _, qs, _, _, _, dss = buffers
    kv_ready, _, _, _, ds_ready, ds_free = barriers
    BLOCK_M: gl.constexpr = qs.shape[1]
    BLOCK_D: gl.constexpr = qs.shape[2]
    zeros = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, _accumulator_layout(4, BLOCK_M, BLOCK_D))
    mbarrier.wait(kv_ready, 0)
    slot = 0
    phase = 0
    for _ in range(tiles):
        mbarrier.wait(ds_ready.index(slot * 2), phase)
        ds = dss.index(slot * 2).permute([1, 0])
        dq = warpgroup_mma(ds, ks.index(0), zeros, use_acc=False, is_async=True)
        mbarrier.wait(ds_ready.index(slot * 2 + 1), phase)
        ds = dss.index(slot * 2 + 1).permute([1, 0])
        dq = warpgroup_mma(ds, ks.index(1), dq, is_async=True)
        dq = warpgroup_mma_wait(0, deps=[dq])
        mbarrier.arrive(ds_free.index(slot))
        atomic_add_dq(dq_accum, dq)
        dq_accum += BLOCK_M * BLOCK_D
        slot, phase = _next(slot, phase, SLOTS)


@gluon.jit
def add_tile(
    state, k, v, buffers, barriers, index, scale_log2, OWNER: gl.constexpr, MASKED: gl.constexpr
):  # fmt: skip
    """Add one tile of queries to dK and dV, and leave its dS to the adder.

    state: (dk, dv, stage, phase, slot, slot_phase), also what it returns. index: (queries, seen_from).
    """
    dk, dv, stage, phase, slot, slot_phase = state
    _, _, qs, dos, lses, deltas, dss = buffers
    _, q_ready, do_ready, free, ds_ready, ds_free = barriers
    queries, seen_from = index
    BLOCK_M: gl.constexpr = qs.shape[1]
    scores: gl.constexpr = _accumulator_layout(4, KEYS, BLOCK_M)
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, scores)
    q = qs.index(stage)
    do = dos.index(stage)
    mbarrier.wait(q_ready.index(stage), phase)
    st = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
    mbarrier.wait(do_ready.index(stage), phase)
    dpt = warpgroup_mma(v, do.permute([1, 0]), zeros, use_acc=False, is_async=True)
    lse = lses.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, scores))
    st = warpgroup_mma_wait(1, deps=[st])
    pt = _probabilities(st, lse, queries, seen_from, scale_log2, MASKED)
    dv = warpgroup_mma(gl.convert_layout(pt.to(q.dtype), operand), do, dv, is_async=True)
    dpt = warpgroup_mma_wait(1, deps=[dpt])
    delta = deltas.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, scores))
    dst = (pt * (dpt - delta[None, :])).to(q.dtype)
    mbarrier.wait(ds_free.index(slot), slot_phase ^ 1)
    dss.index(slot * 2 + OWNER).store(dst)
    fence_async_shared()
    mbarrier.arrive(ds_ready.index(slot * 2 + OWNER))
    dk = warpgroup_mma(gl.convert_layout(dst, operand), q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    mbarrier.arrive(free.index(stage))
    stage, phase = _next(stage, phase, qs.shape[0])
    slot, slot_phase = _next(slot, slot_phase, SLOTS)
    return dk, dv, stage, phase, slot, slot_phase


@gluon.jit
def own_keys(
    shared,
    OWNER: gl.constexpr, CAUSAL: gl.constexpr, EVEN_KEYS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """dK and dV of one owner's keys."""
    buffers, barriers, place, sizes, outputs = shared
    ks, vs, qs, _, _, _, _ = buffers
    kv_ready, _, _, _, _, _ = barriers
    batch, head, _, first_query, first_key = place
    n_keys, tiles, masked, scale, scale_log2 = sizes
    dk_ptr, dv_ptr, dk_strides, dv_strides = outputs
    BLOCK_M: gl.constexpr = qs.shape[1]
    BLOCK_D: gl.constexpr = qs.shape[2]
    scores: gl.constexpr = _accumulator_layout(4, KEYS, BLOCK_M)
    gradients: gl.constexpr = _accumulator_layout(4, KEYS, BLOCK_D)
    first_key += OWNER * KEYS
    seen_from = first_queries(first_key + gl.arange(0, KEYS, gl.SliceLayout(1, scores)), n_keys, CAUSAL)
    queries = gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores))
    dk = gl.zeros([KEYS, BLOCK_D], gl.float32, gradients)
    dv = gl.zeros([KEYS, BLOCK_D], gl.float32, gradients)
    mbarrier.wait(kv_ready, 0)
    k = ks.index(OWNER).load(gl.DotOperandLayout(0, scores, 2))
    v = vs.index(OWNER).load(gl.DotOperandLayout(0, scores, 2))
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    if CAUSAL or not EVEN_KEYS:
        for tile in range(0, masked):
            dk, dv, stage, phase, slot, slot_phase = add_tile(
                (dk, dv, stage, phase, slot, slot_phase), k, v, buffers, barriers,
                (first_query + tile * BLOCK_M + queries, seen_from), scale_log2, OWNER, True,
            )  # fmt: skip
    for tile in range(masked, tiles):
        dk, dv, stage, phase, slot, slot_phase = add_tile(
            (dk, dv, stage, phase, slot, slot_phase), k, v, buffers, barriers,
            (first_query + tile * BLOCK_M + queries, seen_from), scale_log2, OWNER, False,
        )  # fmt: skip
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, stored))
    skb, skh, skn, skd = dk_strides
    svb, svh, svn, svd = dv_strides
    _store(dk_ptr, dk * scale, batch, head, rows, n_keys, skb, skh, skn, skd, D, stored)
    _store(dv_ptr, dv, batch, head, rows, n_keys, svb, svh, svn, svd, D, stored)


@gluon.jit(do_not_specialize=["n_heads", "n_queries", "n_keys"])
def hopper_backward_narrow_kernel(
    q_src, k_src, v_src, do_src, lse2_src, delta_src, dq_accum_ptr, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, n_queries, n_keys, scale, scale_log2,
    CAUSAL: gl.constexpr, EVEN_KEYS: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """dK, dV and dq_accum, as hopper_backward_kernel. Four warps, the first owner's; BLOCK_N is 128."""
    dtype: gl.constexpr = q_src.dtype
    tile_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    owner_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_D], dtype)
    ds_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, BLOCK_M], dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = (
        gl.allocate_shared_memory(dtype, [2, KEYS, BLOCK_D], owner_shape),
        gl.allocate_shared_memory(dtype, [2, KEYS, BLOCK_D], owner_shape),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], tile_shape),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_M, BLOCK_D], tile_shape),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse2_src.layout),
        gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_src.layout),
        gl.allocate_shared_memory(dtype, [2 * SLOTS, KEYS, BLOCK_M], ds_shape),
    )
    barriers = (
        gl.allocate_shared_memory(gl.int64, [1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [2 * SLOTS, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [SLOTS, 1], barrier),
    )
    mbarrier.init(barriers[0], count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(barriers[1].index(stage), count=1)
        mbarrier.init(barriers[2].index(stage), count=1)
        mbarrier.init(barriers[3].index(stage), count=2)
    for slot in gl.static_range(SLOTS):
        mbarrier.init(barriers[4].index(slot * 2), count=1)
        mbarrier.init(barriers[4].index(slot * 2 + 1), count=1)
        mbarrier.init(barriers[5].index(slot), count=1)
    fence_async_shared()
    block_barrier()

    key_tiles = gl.cdiv(n_keys, BLOCK_N)
    query_tiles = gl.cdiv(n_queries, BLOCK_M)
    first_key = gl.program_id(0) % key_tiles * BLOCK_N  # causal: the first keys have the most queries
    batch_head = gl.program_id(0) // key_tiles
    first_tile = 0
    masked = 0
    if CAUSAL:  # at least one tile, so that keys that no query sees get their zeros
        first_tile = gl.minimum(first_key // BLOCK_M, query_tiles - 1)
        masked = gl.cdiv(first_key + BLOCK_N - 1 - first_tile * BLOCK_M, BLOCK_M)
    if not EVEN_KEYS:
        masked = gl.where(first_key + BLOCK_N > n_keys, query_tiles, masked)
    tiles = query_tiles - first_tile
    first_row = (batch_head.to(gl.int64) * query_tiles + first_tile) * BLOCK_M

    sources = (q_src, k_src, v_src, do_src, lse2_src, delta_src)
    place = (batch_head // n_heads, batch_head % n_heads, batch_head, first_tile * BLOCK_M, first_key)
    sizes = (n_keys, tiles, gl.minimum(masked, tiles), scale, scale_log2)
    dk_strides = (stride_dkb, stride_dkh, stride_dkn, stride_dkd)
    dv_strides = (stride_dvb, stride_dvh, stride_dvn, stride_dvd)
    shared = (buffers, barriers, place, sizes, (dk_ptr, dv_ptr, dk_strides, dv_strides))
    gl.warp_specialize(
        [
            (own_keys, (shared, 0, CAUSAL, EVEN_KEYS, D)),
            (own_keys, (shared, 1, CAUSAL, EVEN_KEYS, D)),
            (add_dq, (buffers, barriers, dq_accum_ptr + first_row * BLOCK_D, tiles)),
            (load, (sources, buffers, barriers, place, tiles)),
        ],
        [4, 4, 1],  # warps of all but the first owner
        [208, 72, 24],  # registers of a thread; what is left, 208, are the first owner's
    )
