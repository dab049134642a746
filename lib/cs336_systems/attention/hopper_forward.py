"""The forward for Hopper in Gluon, with a role for every warp, as FlashAttention-3 has them in CUDA.

The algorithm and the notation are those of triton_forward. Every 64 queries have four warps of their own, a
consumer; a program has BLOCK_M // 64 consumers, and a producer, one warp that has TMA fill a ring of STAGES
buffers with K and with V. A buffer is free when all consumers have read it: nothing else holds them together,
so while one computes exponentials, the matrix units have another's matmuls. Of one consumer:

    matmuls    S(t)          S(t-1) P(t)V(t)             S(t-2) P(t-1)V(t-1)           ...  P(0)V(0)
    softmax          P(t)           P(t-1)       O *= c         P(t-2)           O *= c

where t is a tile of keys, the last that its queries see. Only that one needs a mask, so it is peeled off the
loop. P is in 16 bits before the next S takes its registers.

    q, o [64, BLOCK_D]    s, p [64, BLOCK_N]    m, total, lse [64]: of one consumer
    qs [consumers, 64, BLOCK_D], ks, vs [STAGES, BLOCK_N, BLOCK_D]: shared

What functions pass on together is a tuple:

    sources    (q_src, k_src, v_src), what TMA loads from
    buffers    (qs, ks, vs)
    barriers   (q_ready, k_ready, v_ready, k_free, v_free), the mbarriers of every consumer, or of every stage
    place      (batch, head, batch_head, first_query)
    sizes      (n_queries, n_keys, tiles, scale_log2)
    output     (o_ptr, lse_ptr, strides of o)
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
QUERIES = gl.constexpr(64)  # of a consumer: one matmul of four warps
L2_ELEMENTS = gl.constexpr(2**23)  # of K, and as many of V: together 32 of the 50 MiB


@gluon.constexpr_function
def _worker_warps(consumers):
    """Of every worker: all but the first consumer, which are the warps that the program begins with."""
    return [4] * (consumers - 1) + [1]


@gluon.constexpr_function
def _worker_registers(consumers):
    """Of a thread. The first consumer gets as many as the others, or what the producer leaves it."""
    return [[24], [240, 24], [160, 160, 32]][consumers - 1]


@gluon.jit
def produce(sources, buffers, barriers, place, tiles):
    """Load Q, and all tiles of K and V from the last to the first."""
    q_src, k_src, v_src = sources
    qs, ks, vs = buffers
    q_ready, k_ready, v_ready, k_free, v_free = barriers
    batch, head, _, first_query = place
    BLOCK_N: gl.constexpr = ks.shape[1]
    STAGES: gl.constexpr = ks.shape[0]
    CONSUMERS: gl.constexpr = qs.shape[0]
    for i in gl.static_range(CONSUMERS):
        row = first_query + i * QUERIES
        mbarrier.expect(q_ready.index(i), q_src.block_type.nbytes)
        tma.async_copy_global_to_shared(q_src, [batch, head, row, 0], q_ready.index(i), qs.index(i))
    for i in range(tiles):
        stage = i % STAGES
        phase = (i // STAGES) & 1
        row = (tiles - 1 - i) * BLOCK_N
        mbarrier.wait(k_free.index(stage), phase ^ 1)
        mbarrier.expect(k_ready.index(stage), k_src.block_type.nbytes)
        tma.async_copy_global_to_shared(k_src, [batch, head, row, 0], k_ready.index(stage), ks.index(stage))
        mbarrier.wait(v_free.index(stage), phase ^ 1)
        mbarrier.expect(v_ready.index(stage), v_src.block_type.nbytes)
        tma.async_copy_global_to_shared(v_src, [batch, head, row, 0], v_ready.index(stage), vs.index(stage))


@gluon.jit
def _softmax(s, m, scale_log2):
    """P of one tile, the maximum with its scores, and the factor for what was summed before."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    return gl.exp2(s * scale_log2 - m_new[:, None]), m_new, gl.exp2(m - m_new)


@gluon.jit
def consume(
    shared,
    CONSUMER: gl.constexpr, CAUSAL: gl.constexpr, EVEN_KEYS: gl.constexpr, D: gl.constexpr,
):  # fmt: skip
    """O and L of one consumer's queries."""
    buffers, barriers, place, sizes, output = shared
    qs, ks, vs = buffers
    q_ready, k_ready, v_ready, k_free, v_free = barriers
    batch, head, batch_head, first_query = place
    n_queries, n_keys, tiles, scale_log2 = sizes
    o_ptr, lse_ptr, stride_ob, stride_oh, stride_on, stride_od = output
    CONSUMERS: gl.constexpr = qs.shape[0]
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK_N: gl.constexpr = ks.shape[1]
    BLOCK_D: gl.constexpr = ks.shape[2]
    scores: gl.constexpr = _accumulator_layout(4, QUERIES, BLOCK_N)
    out: gl.constexpr = _accumulator_layout(4, QUERIES, BLOCK_D)
    operand: gl.constexpr = gl.DotOperandLayout(0, out, 2)

    first_query += CONSUMER * QUERIES
    queries = first_query + gl.arange(0, QUERIES, gl.SliceLayout(1, scores))
    m = gl.full([QUERIES], -float("inf"), gl.float32, gl.SliceLayout(1, scores))
    o = gl.zeros([QUERIES, BLOCK_D], gl.float32, out)
    zeros = gl.zeros([QUERIES, BLOCK_N], gl.float32, scores)
    first = 0
    if CAUSAL and BLOCK_N % (CONSUMERS * QUERIES) != 0:  # tiles that only consumers of later queries see
        first = tiles - gl.cdiv(gl.minimum(n_keys, first_query + QUERIES), BLOCK_N)
        for i in range(first):
            stage = i % STAGES
            mbarrier.wait(k_ready.index(stage), (i // STAGES) & 1)
            mbarrier.arrive(k_free.index(stage))
            mbarrier.wait(v_ready.index(stage), (i // STAGES) & 1)
            mbarrier.arrive(v_free.index(stage))

    q = qs.index(CONSUMER)
    mbarrier.wait(q_ready.index(CONSUMER), 0)
    stage = first % STAGES
    mbarrier.wait(k_ready.index(stage), (first // STAGES) & 1)
    s = warpgroup_mma(q, ks.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    if CAUSAL or not EVEN_KEYS:
        keys = (tiles - 1 - first) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
        visible = keys[None, :] < n_keys
        if CAUSAL:
            visible = visible & (queries[:, None] >= keys[None, :])
        s = gl.where(visible, s, -float("inf"))
    p, m, _ = _softmax(s, m, scale_log2)
    total = gl.sum(p, 1)
    p = gl.convert_layout(p.to(q.dtype), operand, assert_trivial=True)
    for i in range(first + 1, tiles):
        stage = i % STAGES
        before = (i - 1) % STAGES
        mbarrier.wait(k_ready.index(stage), (i // STAGES) & 1)
        mbarrier.wait(v_ready.index(before), ((i - 1) // STAGES) & 1)
        s = warpgroup_mma(q, ks.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
        o = warpgroup_mma(p, vs.index(before), o, is_async=True)
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(stage))
        p, m, correction = _softmax(s, m, scale_log2)
        total = total * correction + gl.sum(p, 1)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_free.index(before))
        o = o * gl.convert_layout(correction, gl.SliceLayout(1, out))[:, None]
        p = gl.convert_layout(p.to(q.dtype), operand, assert_trivial=True)
    stage = (tiles - 1) % STAGES
    mbarrier.wait(v_ready.index(stage), ((tiles - 1) // STAGES) & 1)
    o = warpgroup_mma(p, vs.index(stage), o, is_async=True)
    o = warpgroup_mma_wait(0, deps=[o])

    lse = (m + gl.log2(total)) * LN2
    gl.store(lse_ptr + batch_head.to(gl.int64) * n_queries + queries, lse, mask=queries < n_queries)
    o = o / gl.convert_layout(total, gl.SliceLayout(1, out))[:, None]
    stored: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    rows = first_query + gl.arange(0, QUERIES, gl.SliceLayout(1, stored))
    _store(o_ptr, o, batch, head, rows, n_queries, stride_ob, stride_oh, stride_on, stride_od, D, stored)


@gluon.jit(do_not_specialize=["n_heads", "n_queries", "n_keys"])
def hopper_forward_kernel(
    q_src, k_src, v_src, o_ptr, lse_ptr, stride_ob, stride_oh, stride_on, stride_od,
    n_heads, n_queries, n_keys, scale_log2,
    CAUSAL: gl.constexpr, EVEN_KEYS: gl.constexpr, D: gl.constexpr, BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """O and L. Grid: (query tiles * batch * heads,). Four warps; BLOCK_N is a multiple of 64."""
    dtype: gl.constexpr = q_src.dtype
    consumers: gl.constexpr = BLOCK_M // QUERIES
    query_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([QUERIES, BLOCK_D], dtype)
    key_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([BLOCK_N, BLOCK_D], dtype)
    barrier: gl.constexpr = mbarrier.MBarrierLayout()
    buffers = (
        gl.allocate_shared_memory(dtype, [consumers, QUERIES, BLOCK_D], query_shape),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], key_shape),
        gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, BLOCK_D], key_shape),
    )
    barriers = (
        gl.allocate_shared_memory(gl.int64, [consumers, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
        gl.allocate_shared_memory(gl.int64, [STAGES, 1], barrier),
    )
    for i in gl.static_range(consumers):
        mbarrier.init(barriers[0].index(i), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(barriers[1].index(i), count=1)
        mbarrier.init(barriers[2].index(i), count=1)
        mbarrier.init(barriers[3].index(i), count=consumers)
        mbarrier.init(barriers[4].index(i), count=consumers)
    fence_async_shared()
    block_barrier()

    # Causal: the longest rows first, of as many heads at once as L2 holds K and V of, so that the shortest
    # are left to fill the SMs in the end.
    query_tiles = gl.cdiv(n_queries, BLOCK_M)
    section = 1
    if CAUSAL:
        section = gl.maximum(L2_ELEMENTS // BLOCK_D // n_keys, 1)
    section_head = gl.program_id(0) // (section * query_tiles) * section
    section = gl.minimum(section, gl.num_programs(0) // query_tiles - section_head)
    program = gl.program_id(0) - section_head * query_tiles
    tile = program // section
    if CAUSAL:
        tile = query_tiles - 1 - tile
    batch_head = section_head + program % section
    first_query = tile * BLOCK_M
    last_key = n_keys
    if CAUSAL:
        last_key = gl.minimum(n_keys, first_query + BLOCK_M)
    tiles = gl.cdiv(last_key, BLOCK_N)

    place = (batch_head // n_heads, batch_head % n_heads, batch_head, first_query)
    sizes = (n_queries, n_keys, tiles, scale_log2)
    output = (o_ptr, lse_ptr, stride_ob, stride_oh, stride_on, stride_od)
    shared = (buffers, barriers, place, sizes, output)
    gl.warp_specialize(
        [  # noqa: RUF005, a kernel cannot unpack
            (consume, (shared, 0, CAUSAL, EVEN_KEYS, D)),
            (consume, (shared, 1, CAUSAL, EVEN_KEYS, D)),
            (consume, (shared, 2, CAUSAL, EVEN_KEYS, D)),
        ][:consumers]
        + [(produce, ((q_src, k_src, v_src), buffers, barriers, place, tiles))],
        _worker_warps(consumers),
        _worker_registers(consumers),
    )
