"""FlashAttention-2's backward for Hopper in one kernel, in Gluon, with a role for every warp.

The algorithm and the notation are those of triton_backward; as in FlashAttention-3 (Shah et al. 2024) a
program owns keys, loops over the queries that see them, and computes dQ too: five matmuls instead of seven,
and each exponential once. All programs have TMA add their share of dQ to dq_accum in float32 (see
dq_accum.py), in no fixed order: dQ's last bits vary.

A program's keys belong to two consumers, four warps and 64 keys each, which share nothing but what is loaded:
while one computes P or dS, the matrix units have the other's matmuls. dQ needs the keys of both, and is
computed by four more, the dQ warps. One warp, the producer, has TMA fill a ring of STAGES buffers.

    consumer, heads of up to 64 (narrow): registers for K and V; matmuls are shorter than exponentials
             matmuls  S(t) dP(t)      dV(t)       dK(t) S(t+1) dP(t+1)        dV(t+1)         dK(t+1) ...
             the rest           P(t)        dS(t)                     P(t+1)          dS(t+1)
    consumer, heads of up to 128 (wide): its registers are full of dK and dV; S is a tile ahead, K and V are
    read from shared memory, P and dS stay packed, two numbers to a register, and dS comes into P's registers
             matmuls  S(t)      dP(t)     dV(t)        dK(t) S(t+1)      dP(t+1) ...
             the rest      P(t)      P(t) dP(t)  dS(t)              P(t+1)
    dQ warps matmul                                     dQ(t)
             the rest                                         dq_accum += dQ(t)

where t is a tile of queries. dS goes to the dQ warps through shared memory, and from registers into dK. The
dQ warps have registers for DQ_COLUMNS columns of dQ at a time. dV and dK leave from the buffers of V and K.

    q, do, dq [BLOCK_M, BLOCK_D]    lse, delta [BLOCK_M]
    k, v, dk, dv [KEYS, BLOCK_D], st, pt, dpt, dst [KEYS, BLOCK_M]: of one consumer; S, P, dP, dS transposed
    ks, vs [2, KEYS, BLOCK_D], qs, dos [STAGES, BLOCK_M, BLOCK_D], lses, deltas [STAGES, 1, BLOCK_M],
    dss [2 * SLOTS, KEYS, BLOCK_M]: shared; in every slot dS of both consumers
    dqs [DQ_BUFFERS, rows, ROW]: shared; columns of dQ in the order of the registers

Rings and their phases are hopper_common's. The barriers:

                one for each          arrives, when                           waits
    kv_ready    consumer              TMA: its K and V are there              that consumer, the dQ warps
    q_ready     stage                 TMA: Q and L are there                  both consumers
    do_ready    stage                 TMA: dO and delta are there             both consumers
    free        stage                 both consumers: dV and dK are added     the producer
    ds_ready    slot of a consumer    that consumer: its dS is stored         the dQ warps
    ds_free     slot                  the dQ warps: all of dQ is computed     both consumers

What functions pass on together is a tuple:

    sources    (q_src, k_src, v_src, do_src, lse2_src, delta_src), what TMA loads from
    buffers    (ks, vs, qs, dos, lses, deltas, dss, dqs)
    barriers   (kv_ready, q_ready, do_ready, free, ds_ready, ds_free)
    place      (batch, head, batch_head, first_query, first_key)
    sizes      (n_queries, n_keys, tiles, masked, scale, scale_log2): of `tiles` tiles of queries the first
               `masked` need a mask
    outputs    (dk_dst, dv_dst), what TMA stores to
    shared     (buffers, barriers, place, sizes, outputs), for both consumers
    state      (dk, dv, st, stage, phase, slot, slot_phase), what a consumer takes from tile to tile
    constants  (k, v, buffers, barriers, queries, seen_from, scale_log2, n_queries), the same for all
               tiles of a consumer
    index      (queries, seen_from): the numbers of a tile's queries, and of each key the first that sees it
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

from cs336_systems.attention.hopper_common import (
    MATMUL_ROWS,
    accumulator_layout,
    async_load,
    block_barrier,
    new_barriers,
    new_tiles,
    next_in_ring,
    reinterpret,
    store_by_tma,
    tma_add,
)

KEYS = MATMUL_ROWS  # of a consumer
# Columns of dQ that the dQ warps have registers for; wider heads are "wide".
DQ_COLUMNS = gl.constexpr(64)
DQ_BUFFERS = gl.constexpr(2)  # one is filled while TMA adds the other
ROW = gl.constexpr(256)  # numbers, as many as TMA takes
SLOTS = gl.constexpr(2)  # a consumer is up to two tiles ahead of the dQ warps


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
def _pack(x, dtype: gl.constexpr):
    """x rounded, two to a register: else the compiler rounds one by one, four times as long."""
    # The instruction's first source goes into the upper half.
    if dtype == gl.bfloat16:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.bfloat16, is_pure=True, pack=2
        )
    else:
        packed = gl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,r,r", [x], gl.float16, is_pure=True, pack=2
        )
    return packed


@gluon.jit
def _product(p, x):
    """p * x in float32; p stays packed: unpacked by the compiler it would take twice the registers."""
    # A bfloat16 is the upper half of a float32; float16 has to be converted.
    if p.dtype == gl.bfloat16:
        UNPACK: gl.constexpr = "shl.b32 l, $2, 16; and.b32 h, $2, 0xffff0000;"
    else:
        UNPACK: gl.constexpr = (
            ".reg .f16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 l, a; cvt.f32.f16 h, b;"
        )
    asm: gl.constexpr = "{ .reg .f32 l, h; " + UNPACK + " mul.f32 $0, l, $3; mul.f32 $1, h, $4; }"
    # The first result is written before the last source is read: no register for both (&).
    operands: gl.constexpr = "=&r,=&r,r,r,r"
    return gl.inline_asm_elementwise(asm, operands, [p, x], dtype=gl.float32, is_pure=True, pack=2)


@gluon.jit
def _load_rows(sources, places, readies, buffers, stage):
    """Have TMA load a tile and, for each of its rows, a number: one arrival at a barrier for both.

    sources, places, buffers: (of the tile, of the numbers). readies: q_ready or do_ready.
    """
    ready = readies.index(stage)
    tile = buffers[0].index(stage)
    numbers = buffers[1].index(stage)
    mbarrier.expect(ready, sources[0].block_type.nbytes + sources[1].block_type.nbytes)
    async_load(sources[0], places[0], ready, tile)
    async_load(sources[1], places[1], ready, numbers)


@gluon.jit
def produce(sources, buffers, barriers, place, tiles):
    """The producer: K and V, then all tiles of queries, each into buffers that both consumers have read."""
    q_src, k_src, v_src, do_src, lse2_src, delta_src = sources
    ks, vs, qs, dos, lses, deltas, _, _ = buffers
    kv_ready, q_ready, do_ready, free, _, _ = barriers
    batch, head, batch_head, row, first_key = place
    for consumer in gl.static_range(2):
        ready = kv_ready.index(consumer)
        mbarrier.expect(ready, 2 * k_src.block_type.nbytes)
        key = first_key + consumer * KEYS
        async_load(k_src, [batch, head, key, 0], ready, ks.index(consumer))
        async_load(v_src, [batch, head, key, 0], ready, vs.index(consumer))
    stage = 0
    # Of `free`: at first all buffers are, so that the other phase counts as ended.
    phase = 1
    for _ in range(tiles):
        mbarrier.wait(free.index(stage), phase)
        places = ([batch, head, row, 0], [batch_head, row])
        # S waits for Q and L alone, a matmul before dP asks for dO and delta.
        _load_rows((q_src, lse2_src), places, q_ready, (qs, lses), stage)
        _load_rows((do_src, delta_src), places, do_ready, (dos, deltas), stage)
        row += qs.shape[1]
        stage, phase = next_in_ring(stage, phase, qs.shape[0])


@gluon.jit
def in_register_order(dq):
    """dQ as rows of ROW numbers, without one moving to another thread: four neighbours, 16 bytes, are what a
    thread holds of 16 rows by 8 columns. `bwd_postprocess_kernel` undoes it.

        dq          [m // 16, half of 16 rows, row of 8, n // 8, pair of columns, column of 2]
        permuted    [m // 16, n // 8, row of 8, pair of columns, half of 16 rows, column of 2]
                                      lane = 4 * row + pair      its four numbers
    """
    m: gl.constexpr = dq.shape[0]
    n: gl.constexpr = dq.shape[1]
    pieces = dq.reshape([m // 16, 2, 8, n // 8, 4, 2]).permute([0, 3, 2, 4, 1, 5])
    return pieces.reshape([m * n // ROW, ROW])


@gluon.jit
def add_dq(buffers, barriers, dq_dst, row, tiles):
    """The dQ warps: dq_accum += dS K, of all tiles in turn, DQ_COLUMNS columns at a time.

    row: of dq_dst, where the first tile begins.
    """
    ks, _, qs, _, _, _, dss, dqs = buffers
    kv_ready, _, _, _, ds_ready, ds_free = barriers
    BLOCK_M: gl.constexpr = qs.shape[1]
    BLOCK_D: gl.constexpr = qs.shape[2]
    columns: gl.constexpr = min(BLOCK_D, DQ_COLUMNS)
    chunks: gl.constexpr = BLOCK_D // columns
    zeros = gl.zeros([BLOCK_M, columns], gl.float32, accumulator_layout(columns))
    # K by columns, without a copy: a swizzled row is 128 bytes, so that 128 columns lie as twice [KEYS, 64].
    chunk_shape: gl.constexpr = gl.NVMMASharedLayout.get_default_for([KEYS, columns], ks.dtype)
    k_chunks = reinterpret(ks, ks.dtype, [2 * chunks, KEYS, columns], chunk_shape)
    mbarrier.wait(kv_ready.index(0), 0)
    mbarrier.wait(kv_ready.index(1), 0)
    slot = 0
    phase = 0
    dq_buffer = 0
    for _ in range(tiles):
        for chunk in range(chunks):
            # One consumer's keys after the other's: dQ is begun when the first has stored its dS.
            mbarrier.wait(ds_ready.index(slot * 2), phase)
            ds = dss.index(slot * 2).permute([1, 0])
            dq = warpgroup_mma(ds, k_chunks.index(chunk), zeros, use_acc=False, is_async=True)
            mbarrier.wait(ds_ready.index(slot * 2 + 1), phase)
            ds = dss.index(slot * 2 + 1).permute([1, 0])
            dq = warpgroup_mma(ds, k_chunks.index(chunks + chunk), dq, is_async=True)
            dq = warpgroup_mma_wait(0, deps=[dq])
            # The matmul has read dS; after the last columns the consumers may write the next into this slot.
            mbarrier.arrive(ds_free.index(slot), pred=chunk == chunks - 1)
            # Until TMA has read this buffer. Only the thread that started it knows: the others wait for that.
            tma.store_wait(DQ_BUFFERS - 1)
            block_barrier()
            dqs.index(dq_buffer).store(in_register_order(dq))
            fence_async_shared()
            tma_add(dq_dst, [row, 0], dqs.index(dq_buffer))
            row += dqs.shape[1]
            dq_buffer = (dq_buffer + 1) % DQ_BUFFERS
        slot, phase = next_in_ring(slot, phase, SLOTS)
    # A program's shared memory must last until TMA has read all of it.
    tma.store_wait(0)


@gluon.jit
def _start_scores(ks, qs, q_ready, stage, phase, zero, pred, CONSUMER: gl.constexpr):
    """Start S^T = K Q^T of a tile; where there is no such tile, of what lies in its buffer.

    zero: 0, which the compiler must not know (see `add_wide_tile`). pred: there is such a tile.
    """
    BLOCK_M: gl.constexpr = qs.shape[1]
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, accumulator_layout(BLOCK_M))
    # A branch around the last tile's matmul would end what runs: a wait that does not wait costs nothing.
    mbarrier.wait(q_ready.index(stage), phase, pred=pred)
    k = ks.index(CONSUMER + zero)
    return warpgroup_mma(k, qs.index(stage).permute([1, 0]), zeros, use_acc=False, is_async=True)


@gluon.jit
def add_narrow_tile(
    state,
    k,
    v,
    buffers,
    barriers,
    index,
    scale_log2,
    CONSUMER: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Add one tile of queries to dK and dV; leave its dS to the dQ warps."""
    dk, dv, _, stage, phase, slot, slot_phase = state
    _, _, qs, dos, lses, deltas, dss, _ = buffers
    _, q_ready, do_ready, free, ds_ready, ds_free = barriers
    queries, seen_from = index
    BLOCK_M: gl.constexpr = qs.shape[1]
    scores: gl.constexpr = accumulator_layout(BLOCK_M)
    # A result has the registers of a left operand in 16 bits: P and dS go into dV and dK in place.
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, scores)
    q = qs.index(stage)
    do = dos.index(stage)
    # S and dP, both started before one is awaited: the exponentials begin while dP is multiplied.
    mbarrier.wait(q_ready.index(stage), phase)
    st = warpgroup_mma(k, q.permute([1, 0]), zeros, use_acc=False, is_async=True)
    mbarrier.wait(do_ready.index(stage), phase)
    dpt = warpgroup_mma(v, do.permute([1, 0]), zeros, use_acc=False, is_async=True)
    lse = lses.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, scores))
    st = warpgroup_mma_wait(1, deps=[st])
    pt = _probabilities(st, lse, queries, seen_from, scale_log2, MASKED)
    dv = warpgroup_mma(gl.convert_layout(pt.to(q.dtype), operand), do, dv, is_async=True)
    # dP is there, while dV runs until the end: nothing here needs it.
    dpt = warpgroup_mma_wait(1, deps=[dpt])
    delta = deltas.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, scores))
    dst = (pt * (dpt - delta[None, :])).to(q.dtype)
    # Until the dQ warps have read the dS of SLOTS tiles before.
    mbarrier.wait(ds_free.index(slot), slot_phase ^ 1)
    dss.index(slot * 2 + CONSUMER).store(dst)
    # Matmuls read shared memory by another way than stores write it.
    fence_async_shared()
    mbarrier.arrive(ds_ready.index(slot * 2 + CONSUMER))
    dk = warpgroup_mma(gl.convert_layout(dst, operand), q, dk, is_async=True)
    dk, dv = warpgroup_mma_wait(0, deps=[dk, dv])
    # Q, dO, L and delta are read.
    mbarrier.arrive(free.index(stage))
    stage, phase = next_in_ring(stage, phase, qs.shape[0])
    slot, slot_phase = next_in_ring(slot, slot_phase, SLOTS)
    return dk, dv, st, stage, phase, slot, slot_phase


@gluon.jit
def add_wide_tile(
    state,
    tile,
    tiles,
    buffers,
    barriers,
    index,
    scale_log2,
    CONSUMER: gl.constexpr,
    MASKED: gl.constexpr,
):
    """Add one tile of queries, whose S is there, to dK and dV; leave dS to the dQ warps; make the next S."""
    dk, dv, st, stage, phase, slot, slot_phase = state
    ks, vs, qs, dos, lses, deltas, dss, _ = buffers
    _, q_ready, do_ready, free, ds_ready, ds_free = barriers
    queries, seen_from = index
    BLOCK_M: gl.constexpr = qs.shape[1]
    scores: gl.constexpr = accumulator_layout(BLOCK_M)
    # As in `add_narrow_tile`: P and dS are left operands where they are.
    operand: gl.constexpr = gl.DotOperandLayout(0, dk.type.layout, 2)
    zeros = gl.zeros([KEYS, BLOCK_M], gl.float32, scores)
    # The compiler does not know that this is 0: it would compute the addresses of all of K and V before the
    # loop, and keep them in registers that dK and dV need.
    zero = tile >> 30
    do = dos.index(stage)
    lse = lses.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, scores))
    # P at once in 16 bits: half the registers, before dP takes as many as S had.
    pt = _pack(_probabilities(st, lse, queries, seen_from, scale_log2, MASKED), do.dtype)
    mbarrier.wait(do_ready.index(stage), phase)
    v = vs.index(CONSUMER + zero)
    delta = deltas.index(stage).reshape([BLOCK_M]).load(gl.SliceLayout(0, scores))
    # The sum begins at -delta: what comes out is dP - delta, and delta's registers are free again.
    dpt = warpgroup_mma(v, do.permute([1, 0]), zeros - delta[None, :], is_async=True)
    # dV after dP, which is needed first: matmuls end in the order in which they are started.
    dv = warpgroup_mma(gl.convert_layout(pt, operand), do, dv, is_async=True)
    dpt = warpgroup_mma_wait(1, deps=[dpt])
    # P (dP - delta) under dV, which reads P meanwhile; then dS is rounded into the registers of P.
    dst, dv = warpgroup_mma_wait(0, deps=[_product(pt, dpt), dv])
    dst = _pack(dst, do.dtype)
    # Until the dQ warps have read the dS of SLOTS tiles before.
    mbarrier.wait(ds_free.index(slot), slot_phase ^ 1)
    dss.index(slot * 2 + CONSUMER).store(dst)
    # Matmuls read shared memory by another way than stores write it.
    fence_async_shared()
    mbarrier.arrive(ds_ready.index(slot * 2 + CONSUMER))
    dk = warpgroup_mma(gl.convert_layout(dst, operand), qs.index(stage), dk, is_async=True)
    stage_free = free.index(stage)
    stage, phase = next_in_ring(stage, phase, qs.shape[0])
    slot, slot_phase = next_in_ring(slot, slot_phase, SLOTS)
    # The next S is started before dK ends: the matrix units go on from one to the other.
    st = _start_scores(ks, qs, q_ready, stage, phase, zero, tile + 1 < tiles, CONSUMER)
    # All but that S have ended, and read Q, dO, L and delta.
    dk, dv = warpgroup_mma_wait(1, deps=[dk, dv])
    mbarrier.arrive(stage_free)
    st = warpgroup_mma_wait(0, deps=[st])
    return dk, dv, st, stage, phase, slot, slot_phase


@gluon.jit
def add_tiles(
    state,
    first,
    end,
    tiles,
    first_query,
    constants,
    CONSUMER: gl.constexpr,
    MASKED: gl.constexpr,
    EVEN: gl.constexpr,
):
    """Add the tiles of queries from first to end. If not EVEN, the mask hides queries past the last, too."""
    k, v, buffers, barriers, queries, seen_from, scale_log2, n_queries = constants
    qs = buffers[2]
    for tile in range(first, end):
        rows = first_query + tile * qs.shape[1] + queries
        if MASKED and not EVEN:
            rows = gl.where(rows < n_queries, rows, -1)
        index = (rows, seen_from)
        if qs.shape[2] > DQ_COLUMNS:
            state = add_wide_tile(
                state, tile, tiles, buffers, barriers, index, scale_log2, CONSUMER, MASKED
            )
        else:
            state = add_narrow_tile(
                state, k, v, buffers, barriers, index, scale_log2, CONSUMER, MASKED
            )
    return state


@gluon.jit
def consume(shared, CONSUMER: gl.constexpr, CAUSAL: gl.constexpr, EVEN: gl.constexpr):
    """dK and dV of one consumer's keys.

    | heads | k, v | st |
    |:--|:--|:--|
    | up to DQ_COLUMNS, narrow | its K and V, in registers | zeros: each tile makes its own S |
    | wide | nobody reads them: `add_wide_tile` takes K and V from `buffers` | S of the first tile |
    """
    buffers, barriers, place, sizes, outputs = shared
    ks, vs, qs, _, _, _, _, _ = buffers
    kv_ready, q_ready, _, _, _, ds_free = barriers
    batch, head, _, first_query, first_key = place
    n_queries, n_keys, tiles, masked, scale, scale_log2 = sizes
    dk_dst, dv_dst = outputs
    BLOCK_M: gl.constexpr = qs.shape[1]
    BLOCK_D: gl.constexpr = qs.shape[2]
    scores: gl.constexpr = accumulator_layout(BLOCK_M)
    gradients: gl.constexpr = accumulator_layout(BLOCK_D)
    first_key += CONSUMER * KEYS
    keys = first_key + gl.arange(0, KEYS, gl.SliceLayout(1, scores))
    # Of each key the first query that sees it; none sees keys past the last.
    in_range = keys < n_keys
    first_seeing = keys if CAUSAL else keys * 0
    seen_from = gl.where(in_range, first_seeing, 0x7FFFFFFF)
    queries = gl.arange(0, BLOCK_M, gl.SliceLayout(0, scores))
    dk = gl.zeros([KEYS, BLOCK_D], gl.float32, gradients)
    dv = gl.zeros([KEYS, BLOCK_D], gl.float32, gradients)
    mbarrier.wait(kv_ready.index(CONSUMER), 0)
    if BLOCK_D > DQ_COLUMNS:
        # Only so that `constants` has the same places for all heads.
        k = ks
        v = vs
        st = _start_scores(ks, qs, q_ready, 0, 0, 0, True, CONSUMER)
        st = warpgroup_mma_wait(0, deps=[st])
    else:
        # As left operands, in registers: read once instead of with every tile of queries.
        k = ks.index(CONSUMER).load(gl.DotOperandLayout(0, scores, 2))
        v = vs.index(CONSUMER).load(gl.DotOperandLayout(0, scores, 2))
        st = gl.zeros([KEYS, BLOCK_M], gl.float32, scores)
    state = (dk, dv, st, 0, 0, 0, 0)
    constants = (k, v, buffers, barriers, queries, seen_from, scale_log2, n_queries)
    # The last tile may have fewer queries. q reads as zero there, and an infinite key times zero is NaN: so
    # it is masked, too, but for wide heads without a causal mask, where that spills registers.
    WHOLE: gl.constexpr = EVEN or (BLOCK_D > DQ_COLUMNS and not CAUSAL)
    state = add_tiles(state, 0, masked, tiles, first_query, constants, CONSUMER, True, WHOLE)
    if WHOLE:
        state = add_tiles(
            state, masked, tiles, tiles, first_query, constants, CONSUMER, False, WHOLE
        )
    else:
        state = add_tiles(
            state, masked, tiles - 1, tiles, first_query, constants, CONSUMER, False, WHOLE
        )
        last = gl.maximum(masked, tiles - 1)
        state = add_tiles(state, last, tiles, tiles, first_query, constants, CONSUMER, True, WHOLE)
    dk, dv, _, _, _, slot, slot_phase = state
    place = [batch, head, first_key, 0]
    store_by_tma(dv_dst, place, vs.index(CONSUMER), dv)
    # dQ is made of the last dS and of K, whose buffer dK leaves from. Of two slots that dS is in the one
    # after the next: wait as if before another dS is stored there.
    last, phase = next_in_ring(slot, slot_phase, SLOTS)
    mbarrier.wait(ds_free.index(last), phase ^ 1)
    store_by_tma(dk_dst, place, ks.index(CONSUMER), dk * scale)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["n_heads", "n_queries", "n_keys"])
def hopper_backward_kernel(
    q_src,
    k_src,
    v_src,
    do_src,
    lse2_src,
    delta_src,
    dk_dst,
    dv_dst,
    dq_dst,
    n_heads,
    n_queries,
    n_keys,
    scale,
    scale_log2,
    CAUSAL: gl.constexpr,
    EVEN_QUERIES: gl.constexpr,
    BLOCK_D: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    STAGES: gl.constexpr,
):
    """dK, dV and dq_accum. Grid: (key tiles * batch * heads,). Four warps, one consumer's; BLOCK_N is 128.

    L in powers of two, delta and dq_accum, cleared, come for whole tiles of queries, by batch * heads;
    dq_dst is dq_accum in rows of ROW numbers. K, V, dK and dV are loaded and stored KEYS at a time.
    """
    dtype: gl.constexpr = q_src.dtype
    ks = new_tiles(dtype, 2, KEYS, BLOCK_D)
    vs = new_tiles(dtype, 2, KEYS, BLOCK_D)
    qs = new_tiles(dtype, STAGES, BLOCK_M, BLOCK_D)
    dos = new_tiles(dtype, STAGES, BLOCK_M, BLOCK_D)
    lses = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], lse2_src.layout)
    deltas = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], delta_src.layout)
    dss = new_tiles(dtype, 2 * SLOTS, KEYS, BLOCK_M)
    dq_rows: gl.constexpr = dq_dst.block_type.shape[0]
    dqs = gl.allocate_shared_memory(gl.float32, [DQ_BUFFERS, dq_rows, ROW], dq_dst.layout)
    buffers = (ks, vs, qs, dos, lses, deltas, dss, dqs)
    kv_ready = new_barriers(2, 1)
    q_ready = new_barriers(STAGES, 1)
    do_ready = new_barriers(STAGES, 1)
    free = new_barriers(STAGES, 2)
    ds_ready = new_barriers(2 * SLOTS, 1)
    ds_free = new_barriers(SLOTS, 1)
    barriers = (kv_ready, q_ready, do_ready, free, ds_ready, ds_free)
    # TMA has to see the barriers as initialised, and no warp may wait at one before it is.
    fence_async_shared()
    block_barrier()

    key_tiles = gl.cdiv(n_keys, BLOCK_N)
    query_tiles = gl.cdiv(n_queries, BLOCK_M)
    # Causal: the first keys have the most queries, and their programs begin first.
    first_key = gl.program_id(0) % key_tiles * BLOCK_N
    batch_head = gl.program_id(0) // key_tiles
    first_tile = 0
    masked = 0
    # At least one tile, so that keys that no query sees get their zeros.
    if CAUSAL:
        first_tile = gl.minimum(first_key // BLOCK_M, query_tiles - 1)
        # The diagonal: tiles that have a query before the program's last key.
        masked = gl.cdiv(first_key + BLOCK_N - 1 - first_tile * BLOCK_M, BLOCK_M)
    # Keys past the last: no query sees them, and every tile needs the mask.
    masked = gl.where(first_key + BLOCK_N > n_keys, query_tiles, masked)
    tiles = query_tiles - first_tile

    sources = (q_src, k_src, v_src, do_src, lse2_src, delta_src)
    batch = batch_head // n_heads
    head = batch_head % n_heads
    place = (batch, head, batch_head, first_tile * BLOCK_M, first_key)
    sizes = (n_queries, n_keys, tiles, gl.minimum(masked, tiles), scale, scale_log2)
    shared = (buffers, barriers, place, sizes, (dk_dst, dv_dst))
    first_dq = (batch_head * query_tiles + first_tile) * (BLOCK_M * BLOCK_D // ROW)
    # The two lists: warps, and registers of a thread, of all but the first consumer. It has what is left of
    # an SM's 65,536, 208 a thread, where the producer counts as four warps.
    gl.warp_specialize(
        [
            (consume, (shared, 0, CAUSAL, EVEN_QUERIES)),
            (consume, (shared, 1, CAUSAL, EVEN_QUERIES)),
            (add_dq, (buffers, barriers, dq_dst, first_dq, tiles)),
            (produce, (sources, buffers, barriers, place, tiles)),
        ],
        [4, 4, 1],
        [208, 72, 24],
    )
