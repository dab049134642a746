"""The forward for Hopper in Gluon, with its asynchronous units used as FlashAttention-3 does in CUDA.

The algorithm and the notation are those of triton_forward. While P V of one tile of keys is running, S of the
next has been computed and its softmax is being computed. Q stays in registers, TMA fills a ring of STAGES
buffers with K and V.

    q, o [BLOCK_M, BLOCK_D]    s, p [BLOCK_M, BLOCK_N]    m, total, lse [BLOCK_M]
    ks, vs [STAGES, BLOCK_N, BLOCK_D]: shared

What functions pass on together is a tuple:

    loads      (k_src, v_src, ks, vs, ready, batch, head); ready holds the mbarrier of every stage
    constants  (BLOCK_N, STAGES, layout of a left operand in registers)
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

from cs336_systems.attention.hopper_backward import _accumulator_layout, _store, block_barrier

LN2 = gl.constexpr(0.6931471805599453)


@gluon.jit
def _start_loading_keys(loads, tile, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, pred):
    """Start loading one tile of K and V by TMA; the stage's barrier tells when both are there."""
    k_src, v_src, ks, vs, ready, batch, head = loads
    stage = tile % STAGES
    barrier = ready.index(stage)
    row = tile * BLOCK_N
    mbarrier.expect(barrier, 2 * k_src.block_type.nbytes, pred=pred)
    tma.async_copy_global_to_shared(k_src, [batch, head, row, 0], barrier, ks.index(stage), pred=pred)
    tma.async_copy_global_to_shared(v_src, [batch, head, row, 0], barrier, vs.index(stage), pred=pred)


@gluon.jit
def _softmax(s, m, total, queries, keys, n_keys, scale_log2, MASKED: gl.constexpr, CAUSAL: gl.constexpr):
    """P of one tile, and maximum and total brought up to date, with the factor for what was summed before."""
    if MASKED:
        visible = keys[None, :] < n_keys
        if CAUSAL:
            visible = visible & (queries[:, None] >= keys[None, :])
        s = gl.where(visible, s, -float("inf"))
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    p = gl.exp2(s * scale_log2 - m_new[:, None])
    correction = gl.exp2(m - m_new)
    return p, m_new, total * correction + gl.sum(p, 1), correction


@gluon.jit
def attend(
    state, q, loads, zeros, index, tiles, tile, scale_log2, MASKED: gl.constexpr, CAUSAL: gl.constexpr,
    constants: gl.constexpr,
):  # fmt: skip
    """Add P V of the tile before, and compute P of this one meanwhile.

    state: (o, p, m, total), also what it returns. index: (queries, keys, n_keys).
    """
    o, p, m, total = state
    _, _, ks, vs, ready, _, _ = loads
    queries, keys, n_keys = index
    BLOCK_N, STAGES, operand = constants
    rows: gl.constexpr = gl.SliceLayout(1, o.type.layout)
    stage = tile % STAGES
    mbarrier.wait(ready.index(stage), (tile // STAGES) & 1)
    s = warpgroup_mma(q, ks.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
    p = gl.convert_layout(p.to(q.dtype), operand)
    o = warpgroup_mma(p, vs.index((tile - 1) % STAGES), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    p, m, total, correction = _softmax(
        s, m, total, queries, tile * BLOCK_N + keys, n_keys, scale_log2, MASKED, CAUSAL
    )
    o = warpgroup_mma_wait(0, deps=[o])
    block_barrier()  # all warps have read the tile before: its buffers are free
    ahead = tile + STAGES - 1
    _start_loading_keys(loads, ahead, BLOCK_N, STAGES, ahead < tiles)
    return o * gl.convert_layout(correction, rows)[:, None], p, m, total


@gluon.jit
def hopper_forward_kernel(
    q_src, k_src, v_src, o_ptr, lse_ptr, stride_ob, stride_oh, stride_on, stride_od,
    n_heads, n_queries, n_keys, scale_log2,
    CAUSAL: gl.constexpr, EVEN_KEYS: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """O and L. Grid: (query tiles * batch * heads,)."""
    dtype: gl.constexpr = q_src.dtype
    scores: gl.constexpr = _accumulator_layout(gl.num_warps(), BLOCK_M, BLOCK_N)
    output: gl.constexpr = _accumulator_layout(gl.num_warps(), BLOCK_M, BLOCK_D)
    query_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_M, BLOCK_D], dtype)
    key_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)

    query_tiles = gl.cdiv(n_queries, BLOCK_M)
    tile = gl.program_id(0) % query_tiles
    if CAUSAL:
        tile = query_tiles - 1 - tile  # the longest rows first
    batch_head = gl.program_id(0) // query_tiles
    batch = batch_head // n_heads
    head = batch_head % n_heads
    first_query = tile * BLOCK_M

    q = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_D], query_shape)
    ks = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], key_shape)
    vs = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], key_shape)
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    q_ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(q_ready, count=1)
    for stage in gl.static_range(STAGES):
        mbarrier.init(ready.index(stage), count=1)
    fence_async_shared()
    block_barrier()

    unmasked = n_keys // BLOCK_N  # tiles that all our queries see in full; they come first
    last_key = n_keys
    if CAUSAL:
        unmasked = gl.minimum(unmasked, first_query // BLOCK_N)
        last_key = gl.minimum(n_keys, first_query + BLOCK_M)
    tiles = gl.cdiv(last_key, BLOCK_N)
    mbarrier.expect(q_ready, q_src.block_type.nbytes)
    tma.async_copy_global_to_shared(q_src, [batch, head, first_query, 0], q_ready, q)
    loads = (k_src, v_src, ks, vs, ready, batch, head)
    for stage in gl.static_range(STAGES):  # the first tile is peeled off the loop, so all stages start full
        _start_loading_keys(loads, stage, BLOCK_N, STAGES, stage < tiles)

    queries = first_query + gl.arange(0, BLOCK_M, gl.SliceLayout(1, scores))
    keys = gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
    m = gl.full([BLOCK_M], -float("inf"), gl.float32, gl.SliceLayout(1, scores))
    total = gl.zeros([BLOCK_M], gl.float32, gl.SliceLayout(1, scores))
    o = gl.zeros([BLOCK_M, BLOCK_D], gl.float32, output)
    zeros = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, scores)
    operand: gl.constexpr = gl.DotOperandLayout(0, output, 2)
    constants: gl.constexpr = (BLOCK_N, STAGES, operand)

    mbarrier.wait(q_ready, 0)
    q = q.load(gl.DotOperandLayout(0, scores, 2))
    mbarrier.wait(ready.index(0), 0)
    s = warpgroup_mma(q, ks.index(0).permute([1, 0]), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    if unmasked > 0:
        p, m, total, _ = _softmax(s, m, total, queries, keys, n_keys, scale_log2, False, CAUSAL)
    else:
        p, m, total, _ = _softmax(s, m, total, queries, keys, n_keys, scale_log2, True, CAUSAL)
    index = (queries, keys, n_keys)
    for tile in range(1, unmasked):
        o, p, m, total = attend(
            (o, p, m, total), q, loads, zeros, index, tiles, tile, scale_log2, False, CAUSAL, constants
        )
    if CAUSAL or not EVEN_KEYS:
        for tile in range(gl.maximum(unmasked, 1), tiles):
            o, p, m, total = attend(
                (o, p, m, total), q, loads, zeros, index, tiles, tile, scale_log2, True, CAUSAL, constants
            )
    p = gl.convert_layout(p.to(dtype), operand)
    o = warpgroup_mma(p, vs.index((tiles - 1) % STAGES), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])

    lse = (m + gl.log2(total)) * LN2
    gl.store(lse_ptr + batch_head.to(gl.int64) * n_queries + queries, lse, mask=queries < n_queries)
    o = o / gl.convert_layout(total, gl.SliceLayout(1, output))[:, None]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    rows = first_query + gl.arange(0, BLOCK_M, gl.SliceLayout(1, stored))
    _store(o_ptr, o, batch, head, rows, n_queries, stride_ob, stride_oh, stride_on, stride_od, D, stored)
