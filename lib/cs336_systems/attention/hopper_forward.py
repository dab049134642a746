"""The forward for Hopper in Gluon, with a role for every warp, as FlashAttention-3 has them in CUDA.

The algorithm and the notation are those of triton_forward. Every 64 queries have four warps of their own, a
consumer; a program has BLOCK_M // 64 consumers, and a producer, one warp that has TMA fill a ring of STAGES
buffers with K and with V. A buffer is free when all consumers have read it: nothing else holds them together,
so while one computes exponentials, the matrix units have another's matmuls. Of one consumer:

    matmuls    S(t)          S(t-1) P(t)V(t)             S(t-2) P(t-1)V(t-1)           ...  P(0)V(0)
    softmax          P(t)           P(t-1)       O *= c         P(t-2)           O *= c

where t is a tile of keys, the last that its queries see. Only that one needs a mask, so it is peeled off the
loop. P is in 16 bits before the next S takes its registers.

BLOCK_M queries of one head are a work tile. If the kernel is PERSISTENT, there are only as many programs as
fit on the GPU at a time, and each takes the next work tile from a counter until none is left: its producer
loads the next Q, K and V while the consumers finish the last, and no SM waits for a program to start. For
that Q has two buffers, SLOTS (else 1), and the producer leaves the number of the next work tile in next_tile.

O leaves by TMA, from the buffer that Q was in.

    q, o [64, BLOCK_D]    s, p [64, BLOCK_N]    m, total, lse [64]: of one consumer
    qs [SLOTS * consumers, 64, BLOCK_D], ks, vs [STAGES, BLOCK_N, BLOCK_D], next_tile [1]: shared

Rings and their phases are hopper_common's. The barriers:

                  one for each          arrives, when                            waits
    q_ready       slot of a consumer    TMA: Q is there                          that consumer
    q_free        slot of a consumer    that consumer: TMA has read O from it    the producer
    k_ready       stage                 TMA: K is there                          every consumer
    k_free        stage                 every consumer: it has S                 the producer
    v_ready       stage                 TMA: V is there                          every consumer
    v_free        stage                 every consumer: it has added P V         the producer
    next_ready    program               the producer: next_tile is written       every consumer
    next_free     program               every consumer: it has read next_tile    the producer

What functions pass on together is a tuple:

    sources    (q_src, k_src, v_src), what TMA loads from
    buffers    (qs, ks, vs), and next_tile if PERSISTENT
    barriers   (q_ready, q_free, k_ready, k_free, v_ready, v_free), and (next_ready, next_free) if PERSISTENT
    sizes      (n_heads, n_queries, n_keys, work_tiles, scale_log2)
    output     (o_dst, lse_ptr), what TMA stores to, and a pointer
    shared     (sources, buffers, barriers, sizes, output), for every warp
    ring       (stage, phase), the buffers of K and V that come next, and the phase of their barriers
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

from cs336_systems.attention.bf16x3 import LOWEST
from cs336_systems.attention.hopper_common import (
    MATMUL_ROWS,
    accumulator_layout,
    block_barrier,
    load_by_tma,
    new_barriers,
    new_tiles,
    next_in_ring,
    store_by_tma,
)
from cs336_systems.attention.triton_common import LN2

QUERIES = MATMUL_ROWS  # of a consumer
# Of K, and as many of V: in 16 bits together 32 MiB of the 50 that L2 has.
L2_ELEMENTS = gl.constexpr(2**23)


@gluon.constexpr_function
def worker_warps(consumers):
    """Of all consumers but the first, the four warps that the program begins with, and of the producer."""
    return [4] * (consumers - 1) + [1]


@gluon.constexpr_function
def worker_registers(consumers):
    """Of a thread of these. The first consumer gets as many as the others, or what the producer leaves it."""
    # Together at most the 65,536 of an SM; a producer of one warp counts as four. It computes nothing but
    # addresses, and leaves its registers to the consumers. They are dealt out by eights, 24 the least.
    return [[24], [240, 24], [160, 160, 32]][consumers - 1]


@gluon.jit
def place_of(
    work,
    sizes,
    CAUSAL: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_D: gl.constexpr,
):
    """(batch, head, first query) of a work tile, and how many tiles of keys its queries see.

    Causal: the longest rows first, of as many heads at once as L2 holds K and V of (a section), so that the
    shortest are left to fill the SMs in the end. Four heads, a to d, of three query tiles, L2 for two heads:

        work       0  1  2  3  4  5  6  7  8  9 10 11
        causal    a2 b2 a1 b1 a0 b0|c2 d2 c1 d1 c0 d0    two programs have tiles of one length at a time
        else      a0 a1 a2|b0 b1 b2|c0 c1 c2|d0 d1 d2    a section is one head
    """
    n_heads, n_queries, n_keys, work_tiles, _ = sizes
    query_tiles = gl.cdiv(n_queries, BLOCK_M)
    # How many heads a section has: at most, and below in this one.
    section = 1
    if CAUSAL:
        section = gl.maximum(L2_ELEMENTS // BLOCK_D // n_keys, 1)
    section_head = work // (section * query_tiles) * section
    # The last section has the heads that are left.
    section = gl.minimum(section, work_tiles // query_tiles - section_head)
    # From here on work counts within the section: one query tile of all its heads, then the next of all.
    work -= section_head * query_tiles
    tile = work // section
    if CAUSAL:
        # The last queries see the most keys.
        tile = query_tiles - 1 - tile
    batch_head = section_head + work % section
    first_query = tile * BLOCK_M
    last_key = n_keys
    if CAUSAL:
        last_key = gl.minimum(n_keys, first_query + BLOCK_M)
    return batch_head // n_heads, batch_head % n_heads, first_query, gl.cdiv(last_key, BLOCK_N)


@gluon.jit
def produce(shared, counter_ptr, CAUSAL: gl.constexpr, PERSISTENT: gl.constexpr):
    """The producer: of every work tile Q, and all tiles of K and V from the last to the first."""
    sources, buffers, barriers, sizes, _ = shared
    q_src, k_src, v_src = sources
    qs, ks, vs = buffers[:3]
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers[:6]
    work_tiles = sizes[3]
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK_N: gl.constexpr = ks.shape[1]
    BLOCK_D: gl.constexpr = ks.shape[2]
    SLOTS: gl.constexpr = 2 if PERSISTENT else 1
    CONSUMERS: gl.constexpr = qs.shape[0] // SLOTS
    BLOCK_M: gl.constexpr = CONSUMERS * QUERIES
    work = gl.program_id(0)
    stage = 0
    phase = 0
    slot = 0
    slot_phase = 0
    turn = 0  # the phase of next_ready and next_free
    while work < work_tiles:
        batch, head, first_query, tiles = place_of(work, sizes, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D)
        # Each consumer's queries have barriers of their own: the first begins when it has its own 64 rows.
        for consumer in gl.static_range(CONSUMERS):
            row = first_query + consumer * QUERIES
            i = slot * CONSUMERS + consumer
            mbarrier.wait(q_free.index(i), slot_phase ^ 1)
            load_by_tma(q_src, [batch, head, row, 0], q_ready, qs, i)
        for t in range(tiles):
            start = [batch, head, (tiles - 1 - t) * BLOCK_N, 0]
            # K and V apart: S needs K alone, and a tile's K is free a matmul and a softmax before its V.
            mbarrier.wait(k_free.index(stage), phase ^ 1)
            load_by_tma(k_src, start, k_ready, ks, stage)
            mbarrier.wait(v_free.index(stage), phase ^ 1)
            load_by_tma(v_src, start, v_ready, vs, stage)
            stage, phase = next_in_ring(stage, phase, STAGES)
        if PERSISTENT:
            next_ready, next_free = barriers[6:]
            work = gl.num_programs(0) + gl.atomic_add(counter_ptr, 1)
            # Until all consumers have read the number before it from buffers[3], next_tile.
            mbarrier.wait(next_free, turn ^ 1)
            # compute-sanitizer's racecheck names this store and the load in `consume`. It does not know
            # mbarriers: a program in CUDA that does nothing but this, and is right, it names as well.
            buffers[3].store(gl.full([1], work, gl.int32, gl.BlockedLayout([1], [32], [1], [0])))
            mbarrier.arrive(next_ready)
            slot, slot_phase = next_in_ring(slot, slot_phase, SLOTS)
            turn ^= 1
        else:
            work = work_tiles


@gluon.jit
def _softmax(s, m, scale_log2):
    """P of one tile, the maximum with its scores, and the factor for what was summed before."""
    m_new = gl.maximum(m, gl.max(s, 1) * scale_log2)
    return gl.exp2(s * scale_log2 - m_new[:, None]), m_new, gl.exp2(m - m_new)


@gluon.jit
def consume(
    shared,
    CONSUMER: gl.constexpr,
    CAUSAL: gl.constexpr,
    EVEN_KEYS: gl.constexpr,
    PERSISTENT: gl.constexpr,
):
    """A consumer: O and L of its queries of every work tile."""
    _, buffers, barriers, sizes, _ = shared
    # 2: SLOTS, as in `produce`.
    CONSUMERS: gl.constexpr = buffers[0].shape[0] // (2 if PERSISTENT else 1)
    work = gl.program_id(0)
    ring = (0, 0)
    if PERSISTENT:
        next_ready, next_free = barriers[6:]
        slot = 0
        slot_phase = 0
        turn = 0
        while work < sizes[3]:
            i = slot * CONSUMERS + CONSUMER
            ring = attend(shared, work, ring, i, slot_phase, CONSUMER, CONSUMERS, CAUSAL, EVEN_KEYS)
            mbarrier.wait(next_ready, turn)
            # next_tile, one number for all four warps: the maximum makes a scalar of it, to end the loop by.
            work = gl.max(buffers[3].load(gl.BlockedLayout([1], [32], [4], [0])), 0)
            mbarrier.arrive(next_free)
            slot, slot_phase = next_in_ring(slot, slot_phase, 2)
            turn ^= 1
    else:
        attend(shared, work, ring, CONSUMER, 0, CONSUMER, CONSUMERS, CAUSAL, EVEN_KEYS)


@gluon.jit
def attend(
    shared,
    work,
    ring,
    slot,
    slot_phase,
    CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr,
    CAUSAL: gl.constexpr,
    EVEN_KEYS: gl.constexpr,
):
    """O and L of one consumer's queries of a work tile. Returns the ring after it.

    slot: the index into qs, q_ready and q_free. (Elsewhere 0 or 1, the same for all consumers.)
    """
    _, buffers, barriers, sizes, output = shared
    qs, ks, vs = buffers[:3]
    q_ready, q_free, k_ready, k_free, v_ready, v_free = barriers[:6]
    n_heads, n_queries, n_keys, _, scale_log2 = sizes
    o_dst, lse_ptr = output
    STAGES: gl.constexpr = ks.shape[0]
    BLOCK_M: gl.constexpr = CONSUMERS * QUERIES
    BLOCK_N: gl.constexpr = ks.shape[1]
    BLOCK_D: gl.constexpr = ks.shape[2]
    scores: gl.constexpr = accumulator_layout(BLOCK_N)
    out: gl.constexpr = accumulator_layout(BLOCK_D)
    # A result has the registers of a left operand in 16 bits: P goes from one matmul to the next in place.
    operand: gl.constexpr = gl.DotOperandLayout(0, out, 2)

    stage, phase = ring
    _, _, first_query, tiles = place_of(work, sizes, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D)
    first_query += CONSUMER * QUERIES
    queries = first_query + gl.arange(0, QUERIES, gl.SliceLayout(1, scores))
    # From minus infinity, a first tile of scores of minus infinity would make exp(-inf - -inf), NaN.
    m = gl.full([QUERIES], LOWEST, gl.float32, gl.SliceLayout(1, scores))
    o = gl.zeros([QUERIES, BLOCK_D], gl.float32, out)
    zeros = gl.zeros([QUERIES, BLOCK_N], gl.float32, scores)
    if CAUSAL and BLOCK_N % BLOCK_M != 0:
        # Tiles that only consumers of later queries see: say that they are read, or the producer would wait.
        seen = gl.cdiv(gl.minimum(n_keys, first_query + QUERIES), BLOCK_N)
        for _ in range(seen, tiles):
            mbarrier.wait(k_ready.index(stage), phase)
            mbarrier.arrive(k_free.index(stage))
            mbarrier.wait(v_ready.index(stage), phase)
            mbarrier.arrive(v_free.index(stage))
            stage, phase = next_in_ring(stage, phase, STAGES)
        tiles = seen

    # The last tile of keys, which comes first. S = Q K^T: both operands are read where they lie.
    q = qs.index(slot)
    mbarrier.wait(q_ready.index(slot), slot_phase)
    mbarrier.wait(k_ready.index(stage), phase)
    s = warpgroup_mma(q, ks.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_free.index(stage))
    # The diagonal crosses one tile of keys for these 64 queries: this one, and no other has a mask.
    if CAUSAL or not EVEN_KEYS:
        keys = (tiles - 1) * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, scores))
        visible = keys[None, :] < n_keys
        if CAUSAL:
            visible = visible & (queries[:, None] >= keys[None, :])
        s = gl.where(visible, s, -float("inf"))
    p, m, _ = _softmax(s, m, scale_log2)
    total = gl.sum(p, 1)
    p = gl.convert_layout(p.to(q.dtype), operand, assert_trivial=True)
    for _ in range(1, tiles):
        before = stage
        before_phase = phase
        stage, phase = next_in_ring(stage, phase, STAGES)
        # Both waits before both matmuls: one in between would leave the matrix units idle after the first.
        mbarrier.wait(k_ready.index(stage), phase)
        mbarrier.wait(v_ready.index(before), before_phase)
        # S(t-1) first: matmuls end in the order in which they are started, and the softmax waits for S.
        s = warpgroup_mma(q, ks.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)
        o = warpgroup_mma(p, vs.index(before), o, is_async=True)
        # S is there; P(t) V(t) may still run, under the softmax of P(t-1).
        s = warpgroup_mma_wait(1, deps=[s])
        mbarrier.arrive(k_free.index(stage))
        p, m, correction = _softmax(s, m, scale_log2)
        total = total * correction + gl.sum(p, 1)
        # Until the matmul ends, it adds to O's registers and reads V: no scaling, no new V before.
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_free.index(before))
        # A row of O lies in the threads that have that row of S: the layouts differ in name alone.
        o = o * gl.convert_layout(correction, gl.SliceLayout(1, out))[:, None]
        # Rounded here, after the wait: until P(t) V(t) ends, it reads the last P from these registers.
        p = gl.convert_layout(p.to(q.dtype), operand, assert_trivial=True)
    mbarrier.wait(v_ready.index(stage), phase)
    o = warpgroup_mma(p, vs.index(stage), o, is_async=True)

    # All that follows, up to the wait, takes place under the last matmul.
    # Where all scores are minus infinity O is 0, and L infinite, so that P is 0 in backward.
    empty = total == 0.0
    total = gl.where(empty, 1.0, total)
    lse = gl.where(empty, float("inf"), (m + gl.log2(total)) * LN2)
    # Computed once more: kept through the loop, it would take registers that the loop needs.
    batch, head, first_query, _ = place_of(work, sizes, CAUSAL, BLOCK_M, BLOCK_N, BLOCK_D)
    first_query += CONSUMER * QUERIES
    queries = first_query + gl.arange(0, QUERIES, gl.SliceLayout(1, scores))
    row = (batch * n_heads + head).to(gl.int64) * n_queries
    gl.store(lse_ptr + row + queries, lse, mask=queries < n_queries)
    total = gl.convert_layout(total, gl.SliceLayout(1, out))[:, None]
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_free.index(stage))
    store_by_tma(o_dst, [batch, head, first_query, 0], q, o / total)
    # Until TMA has read the buffer, not until it has written O: the next Q may come.
    tma.store_wait(0)
    mbarrier.arrive(q_free.index(slot))
    return next_in_ring(stage, phase, STAGES)


@gluon.jit(do_not_specialize=["n_heads", "n_queries", "n_keys", "work_tiles"])
def hopper_forward_kernel(
    q_src,
    k_src,
    v_src,
    o_dst,
    lse_ptr,
    counter_ptr,
    n_heads,
    n_queries,
    n_keys,
    work_tiles,
    scale_log2,
    CAUSAL: gl.constexpr,
    EVEN_KEYS: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
    PERSISTENT: gl.constexpr,
):
    """O and L. Four warps; BLOCK_N is a multiple of 64.

    Grid: (work_tiles,), that is query tiles * batch * heads; if PERSISTENT fewer, and the counter is at 0.
    """
    dtype: gl.constexpr = q_src.dtype
    consumers: gl.constexpr = BLOCK_M // QUERIES
    # Of all consumers: each has SLOTS.
    slots: gl.constexpr = consumers * (2 if PERSISTENT else 1)
    qs = new_tiles(dtype, slots, QUERIES, BLOCK_D)
    ks = new_tiles(dtype, STAGES, BLOCK_N, BLOCK_D)
    vs = new_tiles(dtype, STAGES, BLOCK_N, BLOCK_D)
    buffers = (qs, ks, vs)
    q_ready = new_barriers(slots, 1)
    q_free = new_barriers(slots, 1)
    k_ready = new_barriers(STAGES, 1)
    k_free = new_barriers(STAGES, consumers)
    v_ready = new_barriers(STAGES, 1)
    v_free = new_barriers(STAGES, consumers)
    barriers = (q_ready, q_free, k_ready, k_free, v_ready, v_free)
    # Allocated only then: unused, Triton would reuse their memory and corrupt O.
    if PERSISTENT:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        buffers += (gl.allocate_shared_memory(gl.int32, [1], flat),)
        next_ready = new_barriers(1, 1)
        next_free = new_barriers(1, consumers)
        barriers += (next_ready.index(0), next_free.index(0))
    # TMA has to see the barriers as initialised, and no warp may wait at one before it is.
    fence_async_shared()
    block_barrier()

    sources = (q_src, k_src, v_src)
    sizes = (n_heads, n_queries, n_keys, work_tiles, scale_log2)
    output = (o_dst, lse_ptr)
    shared = (sources, buffers, barriers, sizes, output)
    # Fewer than three consumers are the last of these: 0 and 1, or 0.
    gl.warp_specialize(
        [
            (consume, (shared, consumers - 3, CAUSAL, EVEN_KEYS, PERSISTENT)),
            (consume, (shared, consumers - 2, CAUSAL, EVEN_KEYS, PERSISTENT)),
            (consume, (shared, consumers - 1, CAUSAL, EVEN_KEYS, PERSISTENT)),
            (produce, (shared, counter_ptr, CAUSAL, PERSISTENT)),
        ][3 - consumers :],
        worker_warps(consumers),
        worker_registers(consumers),
    )
