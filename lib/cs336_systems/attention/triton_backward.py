"""FlashAttention-2's backward pass in Triton kernels (Dao 2023, algorithm 2). No torch in here.

P is recomputed tile by tile from Q, K and the saved L. With delta = rowsum(dO * O), the paper's D:

    dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dQ = scale * dS K     dK = scale * dS^T Q

    q, do, dq [BLOCK_M, BLOCK_D]    k, v, dk, dv [BLOCK_N, BLOCK_D]    lse, delta [BLOCK_M]
    s, p, dp, ds [BLOCK_M, BLOCK_N], and transposed st, pt, dpt, dst [BLOCK_N, BLOCK_M]

    kernel             a program owns                loops over    writes
    dq_kernel          a tile of queries             keys          dQ, delta
    dkdv_kernel        a tile of keys                queries       dK, dV: with dq_kernel's delta
    backward_kernel    a tile of either              the other     dQ or dK, dV: both kernels in one launch
    sum_kernel         ROWS queries or keys          splits        dQ or dK, dV: what programs with SPLIT left

dQ apart from dK and dV takes seven matmuls instead of the five of one fused loop, but no two programs write
to the same place: no atomic additions, and the same bits every time. (On an H200, five matmuls with atomic
additions to dQ take longer when written like this. hopper_backward does better.)

Where two launches would leave SMs without a program, `backward_kernel` runs; and if its programs are still
too few, each loop is split (SPLIT) over several.

Programs that own keys work on transposed tiles (S^T = K Q^T): P^T and dS^T are then already the left operands
of dV and dK, and never leave the registers. Tuples that functions pass on are those of triton_common, and

    sizes      (n_heads, n_queries, n_keys, rows of one split's output, split_size, scale)
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_common import (
    LOG2E,
    dot,
    dot_transposed,
    key_range,
    last_key_of,
    load_logsumexp,
    load_tile,
    mask_scores,
    operand,
    pointers,
    program_tile,
    query_range,
    store_tile,
)


@triton.jit
def probabilities(s, lse, residual, scale, form: tl.constexpr):
    """P = exp(scale * s - L)."""
    if form.EXACT:
        # Two large numbers are subtracted first, scaled afterwards. What rounding took from L, the residual,
        # may be more than what is left.
        p = tl.exp2((s * scale - lse) * LOG2E - residual * LOG2E)
    else:
        p = tl.exp2(s * (scale * LOG2E) - lse * LOG2E)
    return p


@triton.jit
def row_dot(o, do, form: tl.constexpr):
    """delta = rowsum(dO * O)."""
    if form.PRECISION == "bf16x3":
        # The small parts first: then every sum has the bits of what it is part of.
        do = do[0].to(tl.float32) + (do[1].to(tl.float32) + do[2].to(tl.float32))
    return tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)


@triton.jit
def add_dq_tiles(
    dq,
    query_tile,
    sources,
    keys,
    scale,
    MASKED: tl.constexpr,
    form: tl.constexpr,
):
    """Add the key tiles in [first_key, last_key) to dQ.

    query_tile: (head, queries, q_rows, do_rows, L, residual, delta). sources: (k_src, v_src).

        order          load K, V   S, dP   P                 dS, dQ
        bf16x3, LATE   load K      S       P   load V   dP   dS, dQ
    """
    BLOCK_N: tl.constexpr = form.BLOCK_N
    head, queries, q_rows, do_rows, lse, residual, delta = query_tile
    k_src, v_src = sources
    first_key, last_key, n_keys = keys
    # For the three parts of both K and V there are no registers.
    LATE: tl.constexpr = form.PRECISION == "bf16x3"
    # As in the forward's loop: LLVM would keep addresses in registers.
    KEEP: tl.constexpr = form.CHUNK > 0 or LATE
    for start in tl.range(first_key, last_key, BLOCK_N, disable_licm=KEEP):
        k = load_tile(k_src, head, start, n_keys, BLOCK_N, form)
        if not LATE:
            v = load_tile(v_src, head, start, n_keys, BLOCK_N, form)
        s = dot_transposed(q_rows, (k, k_src, start, n_keys), head, True, form)
        if not LATE:
            dp = dot_transposed(do_rows, (v, v_src, start, n_keys), head, False, form)
        if MASKED:
            s = mask_scores(s, queries, start, n_keys, form)
        p = probabilities(s, lse[:, None], residual[:, None], scale, form)
        if LATE:
            v = load_tile(v_src, head, start, n_keys, BLOCK_N, form)
            dp = dot_transposed(do_rows, (v, v_src, start, n_keys), head, False, form)
        ds = operand(p * (dp - delta[:, None]), k, form)
        dq = dot(ds, k, dq, form)
    return dq


@triton.jit
def dq_tile(
    place,
    sources,
    saved,
    delta_ptr,
    output,
    sizes,
    form: tl.constexpr,
):
    """dQ of a tile of queries and, unless delta_ptr is None, delta for dkdv_kernel.

    saved: (o_ptr, o_strides, lse_ptr, residual_ptr). output: (dq_ptr, dq_strides).
    """
    D: tl.constexpr = form.D
    BLOCK_D: tl.constexpr = form.BLOCK_D
    BLOCK_M: tl.constexpr = form.BLOCK_M
    q_src, k_src, v_src, do_src = sources
    o_ptr, o_strides, lse_ptr, residual_ptr = saved
    dq_ptr, dq_strides = output
    n_heads, n_queries, n_keys, split_rows, split_size, scale = sizes
    head = (place[2], place[3], n_heads)

    first_query = place[0] * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_range = queries < n_queries
    inside = in_range[:, None] & (dims[None, :] < D)
    q = load_tile(q_src, head, first_query, n_queries, BLOCK_M, form)
    do = load_tile(do_src, head, first_query, n_queries, BLOCK_M, form)
    o = tl.load(pointers(o_ptr, o_strides, place, queries, dims), mask=inside, other=0.0)
    delta = row_dot(o, do, form)
    lse_rows = place[1].to(tl.int64) * n_queries + queries
    lse, residual = load_logsumexp(lse_ptr + lse_rows, residual_ptr + lse_rows, in_range, form)
    # By the way: a kernel for delta alone would load O and dO once more.
    if delta_ptr is not None:
        tl.store(delta_ptr + lse_rows, delta, mask=in_range)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    first, unmasked, last = key_range(first_query, n_keys, split_size, form)
    q_rows = (q, q_src, first_query, n_queries)
    do_rows = (do, do_src, first_query, n_queries)
    query_tile = (head, queries, q_rows, do_rows, lse, residual, delta)
    sources = (k_src, v_src)
    keys = (first, unmasked, n_keys)
    dq = add_dq_tiles(dq, query_tile, sources, keys, scale, False, form)
    # The last tiles alone have hidden keys, and pay for a mask.
    if form.CAUSAL or not form.EVEN_KEYS:
        keys = (unmasked, last, n_keys)
        dq = add_dq_tiles(dq, query_tile, sources, keys, scale, True, form)
    if form.SPLIT:
        # A split without keys writes nothing; `sum_kernel` does not read it.
        in_range = in_range & (first < last)
        dq_ptr += (tl.program_id(1) * split_rows).to(tl.int64) * D
    # The scale once, of the sum, and not of every dS.
    store_tile(dq_ptr, dq_strides, place, queries, in_range, dq * scale, D)


@triton.jit
def dq_kernel(
    q_src,
    k_src,
    v_src,
    do_src,
    o_ptr,
    lse_ptr,
    residual_ptr,
    delta_ptr,
    dq_ptr,
    o_strides,
    dq_strides,
    n_heads,
    n_queries,
    n_keys,
    all_queries,
    split_size,
    scale,
    form: tl.constexpr,
):
    """dQ, and delta for dkdv_kernel. Grid: (query tiles * batch * heads, splits)."""
    BLOCK_M: tl.constexpr = form.BLOCK_M
    CAUSAL: tl.constexpr = form.CAUSAL
    place = program_tile(tl.program_id(0), n_queries, n_heads, BLOCK_M, CAUSAL)
    sources = (q_src, k_src, v_src, do_src)
    saved = (o_ptr, o_strides, lse_ptr, residual_ptr)
    sizes = (n_heads, n_queries, n_keys, all_queries, split_size, scale)
    output = (dq_ptr, dq_strides)
    dq_tile(place, sources, saved, delta_ptr, output, sizes, form)


@triton.jit
def add_dkdv_tiles(
    grads,
    key_tile,
    sources,
    statistics,
    rows,
    scale,
    DIAGONAL: tl.constexpr,
    RAGGED: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    form: tl.constexpr,
):
    """Add the query tiles in [first_query, last_query) to grads, (dK, dV).

    key_tile: (head, keys, k_rows, v_rows), keys a vector. sources: (q_src, do_src).
    statistics: pointers to this head's (L, residual, delta) if HAS_DELTA; else to its (L, residual, O), for
    delta, and o_strides.
    DIAGONAL: not all queries see all keys. RAGGED: queries past the last; q reads as zero there, and an
    infinite key times zero is NaN. A key past the last only spoils a row that is never stored.

        order          load Q, dO   S, dP   load L, O       P                                   dS, dK, dV
        HAS_DELTA      load Q, dO   S, dP   load L, delta   P                                   dS, dK, dV
        bf16x3, LATE   load Q       S       load L          P   load dO   dV, dP   load delta   dS, dK
    """
    BLOCK_M: tl.constexpr = form.BLOCK_M
    dk, dv = grads
    head, keys, k_rows, v_rows = key_tile
    q_src, do_src = sources
    first_query, last_query, n_queries = rows
    # As in add_dq_tiles, for dO; with HAS_DELTA, as there is no backward_kernel in bf16x3.
    LATE: tl.constexpr = form.PRECISION == "bf16x3"
    KEEP: tl.constexpr = form.CHUNK > 0 or LATE
    for start in tl.range(first_query, last_query, BLOCK_M, disable_licm=KEEP):
        queries = start + tl.arange(0, BLOCK_M)
        in_range = queries < n_queries
        q = load_tile(q_src, head, start, n_queries, BLOCK_M, form)
        if not LATE:
            do = load_tile(do_src, head, start, n_queries, BLOCK_M, form)
        st = dot_transposed(k_rows, (q, q_src, start, n_queries), head, True, form)
        if not LATE:
            dpt = dot_transposed(v_rows, (do, do_src, start, n_queries), head, False, form)
        lse, residual = load_logsumexp(
            statistics[0] + queries, statistics[1] + queries, in_range, form
        )
        # Where programs are few, O loaded with every tile costs less than another launch that is waited for.
        if not HAS_DELTA:
            o_ptr = statistics[2]
            o_strides = statistics[3]
            dims = tl.arange(0, form.BLOCK_D)
            o_rows = o_ptr + queries[:, None].to(tl.int64) * o_strides[2]
            o_tile = o_rows + dims[None, :] * o_strides[3]
            o = tl.load(o_tile, mask=in_range[:, None] & (dims[None, :] < form.D), other=0.0)
            delta = row_dot(o, do, form)
        elif not LATE:
            delta = tl.load(statistics[2] + queries, mask=in_range, other=0.0)
        if DIAGONAL:
            st = tl.where(queries[None, :] >= keys[:, None], st, -float("inf"))
        if RAGGED:
            st = tl.where(in_range[None, :], st, -float("inf"))
        pt = probabilities(st, lse[None, :], residual[None, :], scale, form)
        # dV by itself, before dO's parts are needed for dP: what is done with P then holds no registers.
        if LATE:
            do = load_tile(do_src, head, start, n_queries, BLOCK_M, form)
            dv = dot(operand(pt, do, form), do, dv, form)
            dpt = dot_transposed(v_rows, (do, do_src, start, n_queries), head, False, form)
            delta = tl.load(statistics[2] + queries, mask=in_range, other=0.0)
        dst = operand(pt * (dpt - delta[None, :]), q, form)
        dk = dot(dst, q, dk, form)
        if not LATE:
            dv = dot(operand(pt, do, form), do, dv, form)
    return dk, dv


@triton.jit
def dkdv_tile(
    place,
    sources,
    statistics,
    outputs,
    sizes,
    HAS_DELTA: tl.constexpr,
    form: tl.constexpr,
):
    """dK and dV of a tile of keys, from up to three ranges of query tiles:

        first_query             unmasked           last_whole           last_query
             | CAUSAL: DIAGONAL     |    no mask       | not EVEN: RAGGED  |

    statistics: as in `add_dkdv_tiles`. outputs: (dk_ptr, dv_ptr, dk_strides, dv_strides).
    """
    D: tl.constexpr = form.D
    BLOCK_D: tl.constexpr = form.BLOCK_D
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    EVEN: tl.constexpr = form.EVEN_QUERIES
    q_src, k_src, v_src, do_src = sources
    dk_ptr, dv_ptr, dk_strides, dv_strides = outputs
    n_heads, n_queries, n_keys, split_rows, split_size, scale = sizes
    head = (place[2], place[3], n_heads)

    first_key = place[0] * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    k = load_tile(k_src, head, first_key, n_keys, BLOCK_N, form)
    v = load_tile(v_src, head, first_key, n_keys, BLOCK_N, form)
    grads = (tl.zeros([BLOCK_N, BLOCK_D], tl.float32), tl.zeros([BLOCK_N, BLOCK_D], tl.float32))

    k_rows = (k, k_src, first_key, n_keys)
    v_rows = (v, v_src, first_key, n_keys)
    key_tile = (head, keys, k_rows, v_rows)
    sources = (q_src, do_src)
    first_query, unmasked, last_query = query_range(first_key, n_queries, split_size, form)
    last_whole = last_query
    if not EVEN:
        last_whole = tl.minimum(last_query, n_queries // BLOCK_M * BLOCK_M)
    if form.CAUSAL:
        # The last tile may be among these: RAGGED, too.
        rows = (first_query, tl.minimum(unmasked, last_query), n_queries)
        grads = add_dkdv_tiles(
            grads, key_tile, sources, statistics, rows, scale, True, not EVEN, HAS_DELTA, form
        )
    rows = (unmasked, last_whole, n_queries)
    grads = add_dkdv_tiles(
        grads, key_tile, sources, statistics, rows, scale, False, False, HAS_DELTA, form
    )
    if not EVEN:
        rows = (tl.maximum(unmasked, last_whole), last_query, n_queries)
        grads = add_dkdv_tiles(
            grads, key_tile, sources, statistics, rows, scale, False, True, HAS_DELTA, form
        )
    dk, dv = grads

    in_range = keys < n_keys
    if form.SPLIT:
        # A split without queries that see these keys writes nothing; `sum_kernel` does not read it.
        start = tl.program_id(1) * split_size
        in_range = in_range & (start < n_queries) & (first_query < start + split_size)
        dk_ptr += (tl.program_id(1) * split_rows).to(tl.int64) * D
        dv_ptr += (tl.program_id(1) * split_rows).to(tl.int64) * D
    store_tile(dk_ptr, dk_strides, place, keys, in_range, dk * scale, D)
    store_tile(dv_ptr, dv_strides, place, keys, in_range, dv, D)


@triton.jit
def dkdv_kernel(
    q_src,
    k_src,
    v_src,
    do_src,
    lse_ptr,
    residual_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    dk_strides,
    dv_strides,
    n_heads,
    n_queries,
    n_keys,
    all_keys,
    split_size,
    scale,
    form: tl.constexpr,
):
    """dK and dV. Grid: (key tiles * batch * heads, splits)."""
    # The first keys have the most queries: in order, not LAST_FIRST.
    BLOCK_N: tl.constexpr = form.BLOCK_N
    place = program_tile(tl.program_id(0), n_keys, n_heads, BLOCK_N, False)
    first_row = place[1].to(tl.int64) * n_queries
    statistics = (lse_ptr + first_row, residual_ptr + first_row, delta_ptr + first_row)
    sources = (q_src, k_src, v_src, do_src)
    outputs = (dk_ptr, dv_ptr, dk_strides, dv_strides)
    sizes = (n_heads, n_queries, n_keys, all_keys, split_size, scale)
    dkdv_tile(place, sources, statistics, outputs, sizes, True, form)


@triton.jit
def backward_kernel(
    q_src,
    k_src,
    v_src,
    do_src,
    o_ptr,
    lse_ptr,
    residual_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    o_strides,
    dq_strides,
    dk_strides,
    dv_strides,
    n_heads,
    n_queries,
    n_keys,
    all_queries,
    all_keys,
    split_size,
    scale,
    form: tl.constexpr,
):
    """dQ, dK and dV in one launch. Grid: ((query tiles + key tiles) * batch * heads, splits).

    The last programs own keys; each program computes delta itself, so that none waits for another. With SPLIT
    a program loops over split_size rows, and writes into (splits, batch, heads, n, d), for sum_kernel.
    """
    BLOCK_M: tl.constexpr = form.BLOCK_M
    BLOCK_N: tl.constexpr = form.BLOCK_N
    CAUSAL: tl.constexpr = form.CAUSAL
    sources = (q_src, k_src, v_src, do_src)
    # batch * heads is all_keys // n_keys. Names differ in the two branches: Triton merges what both assign.
    key_programs = tl.cdiv(n_keys, BLOCK_N) * (all_keys // n_keys)
    query_programs = tl.num_programs(0) - key_programs
    if tl.program_id(0) < query_programs:
        place = program_tile(tl.program_id(0), n_queries, n_heads, BLOCK_M, CAUSAL)
        saved = (o_ptr, o_strides, lse_ptr, residual_ptr)
        sizes = (n_heads, n_queries, n_keys, all_queries, split_size, scale)
        output = (dq_ptr, dq_strides)
        dq_tile(place, sources, saved, None, output, sizes, form)
    else:
        key_program = tl.program_id(0) - query_programs
        key_place = program_tile(key_program, n_keys, n_heads, BLOCK_N, False)
        o_batch = o_ptr + key_place[2].to(tl.int64) * o_strides[0]
        o_head = o_batch + key_place[3].to(tl.int64) * o_strides[1]
        first_row = key_place[1].to(tl.int64) * n_queries
        statistics = (lse_ptr + first_row, residual_ptr + first_row, o_head, o_strides)
        outputs = (dk_ptr, dv_ptr, dk_strides, dv_strides)
        key_sizes = (n_heads, n_queries, n_keys, all_keys, split_size, scale)
        dkdv_tile(key_place, sources, statistics, outputs, key_sizes, False, form)


@triton.jit
def sum_tile(
    split_ptr,
    ptr,
    strides,
    place,
    splits,
    sizes,
    ROWS: tl.constexpr,
    form: tl.constexpr,
):
    """Sum a tile of ROWS rows over some splits. splits: (first, end). sizes: (n_rows, rows of all heads)."""
    D: tl.constexpr = form.D
    BLOCK_D: tl.constexpr = form.BLOCK_D
    first, end = splits
    n_rows, all_rows = sizes
    rows = place[0] * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    in_range = rows < n_rows
    inside = in_range[:, None] & (dims[None, :] < D)
    stride = tl.cast(all_rows, tl.int64) * D
    tile_rows = place[1].to(tl.int64) * n_rows + rows
    split = split_ptr + first * stride + tile_rows[:, None] * D + dims[None, :]
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    # Stages: as in `merge_kernel`, loads are under way while one is added.
    for _ in tl.range(first, end, num_stages=3):
        total += tl.load(split, mask=inside, other=0.0)
        split += stride
    store_tile(ptr, strides, place, rows, in_range, total, D)


@triton.jit
def sum_kernel(
    split_dq_ptr,
    split_dk_ptr,
    split_dv_ptr,
    dq_ptr,
    dk_ptr,
    dv_ptr,
    dq_strides,
    dk_strides,
    dv_strides,
    n_heads,
    n_queries,
    n_keys,
    all_queries,
    all_keys,
    split_size,
    ROWS: tl.constexpr,
    form: tl.constexpr,
):
    """dQ, dK and dV, summed over the splits in order: the same bits every time.

    BLOCK_M, BLOCK_N: of the kernels that wrote the splits; multiples of ROWS. Grid: ((tiles of ROWS queries +
    tiles of ROWS keys) * batch * heads,).
    """
    key_programs = tl.cdiv(n_keys, ROWS) * (all_keys // n_keys)
    query_programs = tl.num_programs(0) - key_programs
    if tl.program_id(0) < query_programs:
        place = program_tile(tl.program_id(0), n_queries, n_heads, ROWS, False)
        # The splits in which the writer's tile with these rows had keys.
        first_query = place[0] * ROWS // form.BLOCK_M * form.BLOCK_M
        splits = (0, tl.cdiv(last_key_of(first_query, n_keys, form), split_size))
        sizes = (n_queries, all_queries)
        sum_tile(split_dq_ptr, dq_ptr, dq_strides, place, splits, sizes, ROWS, form)
    else:
        key_program = tl.program_id(0) - query_programs
        key_place = program_tile(key_program, n_keys, n_heads, ROWS, False)
        first_split = 0
        if form.CAUSAL:
            # No query of the first splits sees the writer's tile with these keys.
            first_key = key_place[0] * ROWS // form.BLOCK_N * form.BLOCK_N
            first_split = first_key // split_size
        key_splits = (first_split, tl.cdiv(n_queries, split_size))
        key_sizes = (n_keys, all_keys)
        sum_tile(split_dk_ptr, dk_ptr, dk_strides, key_place, key_splits, key_sizes, ROWS, form)
        sum_tile(split_dv_ptr, dv_ptr, dv_strides, key_place, key_splits, key_sizes, ROWS, form)
