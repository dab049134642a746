"""FlashAttention-2's backward pass in two Triton kernels (Dao 2023, algorithm 2). No torch in here.

P is recomputed tile by tile from Q, K and the saved L. With D = rowsum(dO * O), called delta here:

    dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dQ = scale * dS K     dK = scale * dS^T Q

    q, do, dq [BLOCK_M, BLOCK_D]    k, v, dk, dv [BLOCK_N, BLOCK_D]    lse, delta [BLOCK_M]
    s, p, dp, ds [BLOCK_M, BLOCK_N], and transposed st, pt, dpt, dst [BLOCK_N, BLOCK_M]

`dq_kernel` owns queries and walks over keys; then `dkdv_kernel` owns keys and walks over queries. That is
seven matmuls instead of the five of one fused kernel, but no two programs write to the same place: no atomic
additions, and the same bits every time. (On an H200, five matmuls with dQ added up in L2 take longer when
written like this: see the ablation in notebook 27. hopper_backward does better.)

`dkdv_kernel` works on transposed tiles (S^T = K Q^T): P^T and dS^T are then already the left operands of dV
and dK, and never leave the registers. Tuples that functions pass on are those of triton_forward.
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_forward import key_range, load_tile, matmul_in_chunks, own_tile, pointers

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def add_dq_tiles(
    dq, saved, sources, head, rows, keys, scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    constants: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles in [first_key, last_key) to dQ. saved: (q, do, lse in powers of two, delta)."""
    D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK = constants
    q, do, lse, delta = saved
    q_src, k_src, v_src, do_src = sources
    first_query, n_queries, queries = rows
    first_key, last_key, n_keys = keys
    for start in tl.range(first_key, last_key, BLOCK_N, disable_licm=CHUNK > 0):
        k = load_tile(k_src, head, start, n_keys, D, BLOCK_N, BLOCK_D, USE_TMA)
        v = load_tile(v_src, head, start, n_keys, D, BLOCK_N, BLOCK_D, USE_TMA)
        if CHUNK:  # see triton_forward
            q_rows, k_rows = (q_src, first_query, n_queries), (k_src, start, n_keys)
            do_rows, v_rows = (do_src, first_query, n_queries), (v_src, start, n_keys)
            s = matmul_in_chunks(q_rows, k_rows, head, D, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION)
            dp = matmul_in_chunks(do_rows, v_rows, head, D, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION)
        else:
            s = tl.dot(q, k.T, input_precision=PRECISION)
            dp = tl.dot(do, v.T, input_precision=PRECISION)
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)
            visible = columns[None, :] < n_keys
            if CAUSAL:
                visible = visible & (queries[:, None] >= columns[None, :])
            s = tl.where(visible, s, -float("inf"))
        p = tl.exp2(s * scale_log2 - lse[:, None])
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def dq_kernel(
    q_src, k_src, v_src, do_src, o_ptr, lse_ptr, lse2_ptr, delta_ptr, dq_ptr,
    stride_ob, stride_oh, stride_on, stride_od, stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    n_heads, n_queries, n_keys, scale, scale_log2,
    CAUSAL: tl.constexpr, EVEN_KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dQ, and for dkdv_kernel delta and L in powers of two. Grid: (query tiles * batch * heads,)."""
    tile, batch_head, batch, head = own_tile(n_queries, n_heads, BLOCK_M, CAUSAL)
    head_index = (batch, head, n_heads)

    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_range = queries < n_queries
    inside = in_range[:, None] & (dims[None, :] < D)
    q = load_tile(q_src, head_index, first_query, n_queries, D, BLOCK_M, BLOCK_D, USE_TMA)
    do = load_tile(do_src, head_index, first_query, n_queries, D, BLOCK_M, BLOCK_D, USE_TMA)
    o_tile = pointers(o_ptr, batch, head, queries, dims, stride_ob, stride_oh, stride_on, stride_od)
    o = tl.load(o_tile, mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    lse_rows = batch_head.to(tl.int64) * n_queries + queries
    lse = tl.load(lse_ptr + lse_rows, mask=in_range, other=0.0) * LOG2E
    tl.store(lse2_ptr + lse_rows, lse, mask=in_range)
    tl.store(delta_ptr + lse_rows, delta, mask=in_range)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    unmasked, last_key = key_range(first_query, n_keys, BLOCK_M, BLOCK_N, CAUSAL)
    saved, sources = (q, do, lse, delta), (q_src, k_src, v_src, do_src)
    rows = (first_query, n_queries, queries)
    constants: tl.constexpr = (D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK)
    dq = add_dq_tiles(
        dq, saved, sources, head_index, rows, (0, unmasked, n_keys), scale_log2, False, CAUSAL, constants
    )
    if CAUSAL or not EVEN_KEYS:
        dq = add_dq_tiles(
            dq, saved, sources, head_index, rows, (unmasked, last_key, n_keys), scale_log2, True, CAUSAL,
            constants,
        )  # fmt: skip
    dq_tile = pointers(dq_ptr, batch, head, queries, dims, stride_dqb, stride_dqh, stride_dqn, stride_dqd)
    tl.store(dq_tile, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def add_dkdv_tiles(
    grads, tiles, sources, head, keys, rows, scale_log2, DIAGONAL: tl.constexpr, constants: tl.constexpr
):
    """Adds the query tiles in [first_query, last_query) to grads, (dK, dV). tiles: (k, v).

    Queries and keys outside the tensors are harmless: such a query adds zeros, because its q and dO read as
    zero, and such a key only spoils a row that is never stored.
    """
    D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK = constants
    dk, dv = grads
    k, v = tiles
    q_src, k_src, v_src, do_src, lse2_ptr, delta_ptr = sources
    first_key, n_keys, columns = keys
    first_query, last_query, n_queries = rows
    for start in tl.range(first_query, last_query, BLOCK_M, disable_licm=CHUNK > 0):
        queries = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_src, head, start, n_queries, D, BLOCK_M, BLOCK_D, USE_TMA)
        do = load_tile(do_src, head, start, n_queries, D, BLOCK_M, BLOCK_D, USE_TMA)
        if CHUNK:
            k_rows, q_rows = (k_src, first_key, n_keys), (q_src, start, n_queries)
            v_rows, do_rows = (v_src, first_key, n_keys), (do_src, start, n_queries)
            st = matmul_in_chunks(k_rows, q_rows, head, D, BLOCK_N, BLOCK_M, BLOCK_D, CHUNK, PRECISION)
            dpt = matmul_in_chunks(v_rows, do_rows, head, D, BLOCK_N, BLOCK_M, BLOCK_D, CHUNK, PRECISION)
        else:
            st = tl.dot(k, q.T, input_precision=PRECISION)
            dpt = tl.dot(v, do.T, input_precision=PRECISION)
        lse = tl.load(lse2_ptr + queries, mask=queries < n_queries, other=0.0)
        delta = tl.load(delta_ptr + queries, mask=queries < n_queries, other=0.0)
        if DIAGONAL:
            st = tl.where(queries[None, :] >= columns[:, None], st, -float("inf"))
        pt = tl.exp2(st * scale_log2 - lse[None, :])
        dst = (pt * (dpt - delta[None, :])).to(q.dtype)
        dk = tl.dot(dst, q, dk, input_precision=PRECISION)
        dv = tl.dot(pt.to(do.dtype), do, dv, input_precision=PRECISION)
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_src, k_src, v_src, do_src, lse2_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, n_queries, n_keys, scale, scale_log2,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dK and dV. Grid: (key tiles * batch * heads,)."""
    tiles = tl.cdiv(n_keys, BLOCK_N)
    first_key = tl.program_id(0) % tiles * BLOCK_N  # causal: the first keys have the most queries
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // n_heads
    head = batch_head % n_heads
    head_index = (batch, head, n_heads)
    lse2_ptr += batch_head.to(tl.int64) * n_queries
    delta_ptr += batch_head.to(tl.int64) * n_queries

    keys = first_key + tl.arange(0, BLOCK_N)
    k = load_tile(k_src, head_index, first_key, n_keys, D, BLOCK_N, BLOCK_D, USE_TMA)
    v = load_tile(v_src, head_index, first_key, n_keys, D, BLOCK_N, BLOCK_D, USE_TMA)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    sources = (q_src, k_src, v_src, do_src, lse2_ptr, delta_ptr)
    ours = (first_key, n_keys, keys)
    constants: tl.constexpr = (D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK)
    unmasked = 0
    if CAUSAL:  # the tiles that the diagonal crosses, then those under it
        unmasked = tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M
        rows = (first_key // BLOCK_M * BLOCK_M, tl.minimum(unmasked, n_queries), n_queries)
        dk, dv = add_dkdv_tiles(
            (dk, dv), (k, v), sources, head_index, ours, rows, scale_log2, True, constants
        )
    rows = (unmasked, n_queries, n_queries)
    dk, dv = add_dkdv_tiles((dk, dv), (k, v), sources, head_index, ours, rows, scale_log2, False, constants)

    dims = tl.arange(0, BLOCK_D)
    inside = (keys[:, None] < n_keys) & (dims[None, :] < D)
    dk_tile = pointers(dk_ptr, batch, head, keys, dims, stride_dkb, stride_dkh, stride_dkn, stride_dkd)
    dv_tile = pointers(dv_ptr, batch, head, keys, dims, stride_dvb, stride_dvh, stride_dvn, stride_dvd)
    tl.store(dk_tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_tile, dv.to(dv_ptr.dtype.element_ty), mask=inside)
