"""FlashAttention-2's backward pass in two Triton kernels (Dao 2023, algorithm 2). No torch in here.

P is recomputed tile by tile from Q, K and the saved L. With D = rowsum(dO * O), called delta here:

    dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dQ = scale * dS K     dK = scale * dS^T Q

`dq_kernel` owns queries and walks over keys; then `dkdv_kernel` owns keys and walks over queries. That is
seven matrix products instead of the five of one fused kernel, but no two programs write to the same place: no
atomic additions, and the same bits every time. (On an H200, five products with dQ added up in L2 take longer
when written like this: rungs of notebook 27. kernels_hopper does better.)

`dkdv_kernel` works on transposed tiles (S^T = K Q^T): P^T and dS^T are then already the left operands of dV
and dK, and never leave the registers.
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_forward import load_tile, product_in_chunks

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _tile(ptr, batch, head, rows, dims, stride_b, stride_h, stride_n, stride_d):
    """Pointers to a (rows, dims) tile of a (batch, heads, n, d) tensor of any strides."""
    base = ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    return base + rows[:, None].to(tl.int64) * stride_n + dims[None, :] * stride_d


@triton.jit
def _dq_tiles(
    dq, q, do, lse, delta, q_src, k_src, v_src, do_src, batch, head, n_heads, first_query, n_queries, queries,
    first_key, last_key, n_keys, scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles in [first_key, last_key) to dQ. lse in powers of two."""
    for start in tl.range(first_key, last_key, BLOCK_N, disable_licm=CHUNK > 0):
        k = load_tile(k_src, batch, head, n_heads, start, n_keys, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
        v = load_tile(v_src, batch, head, n_heads, start, n_keys, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
        if CHUNK:  # see kernels_forward
            s = product_in_chunks(
                q_src, first_query, n_queries, k_src, start, n_keys, batch, head, n_heads,
                D, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
            dp = product_in_chunks(
                do_src, first_query, n_queries, v_src, start, n_keys, batch, head, n_heads,
                D, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            s = tl.dot(q, k.T, input_precision=PRECISION)
            dp = tl.dot(do, v.T, input_precision=PRECISION)
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            visible = keys[None, :] < n_keys
            if CAUSAL:
                visible = visible & (queries[:, None] >= keys[None, :])
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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dQ, and for dkdv_kernel delta and L in powers of two. Grid: (query tiles * batch * heads,)."""
    tiles = tl.cdiv(n_queries, BLOCK_M)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile  # the longest rows first
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // n_heads
    head = batch_head % n_heads

    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_range = queries < n_queries
    inside = in_range[:, None] & (dims[None, :] < D)
    q = load_tile(q_src, batch, head, n_heads, first_query, n_queries, D, BLOCK_M, BLOCK_D, DESCRIPTORS)
    do = load_tile(do_src, batch, head, n_heads, first_query, n_queries, D, BLOCK_M, BLOCK_D, DESCRIPTORS)
    o_tile = _tile(o_ptr, batch, head, queries, dims, stride_ob, stride_oh, stride_on, stride_od)
    o = tl.load(o_tile, mask=inside, other=0.0)
    delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
    rows = batch_head.to(tl.int64) * n_queries + queries
    lse = tl.load(lse_ptr + rows, mask=in_range, other=0.0) * LOG2E
    tl.store(lse2_ptr + rows, lse, mask=in_range)
    tl.store(delta_ptr + rows, delta, mask=in_range)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    unmasked = n_keys // BLOCK_N * BLOCK_N
    last_key = n_keys
    if CAUSAL:
        unmasked = tl.minimum(unmasked, first_query // BLOCK_N * BLOCK_N)
        last_key = tl.minimum(n_keys, first_query + BLOCK_M)
    dq = _dq_tiles(
        dq, q, do, lse, delta, q_src, k_src, v_src, do_src, batch, head, n_heads, first_query, n_queries,
        queries, 0, unmasked, n_keys, scale_log2, False, CAUSAL, D, BLOCK_D, BLOCK_M, BLOCK_N,
        DESCRIPTORS, PRECISION, CHUNK,
    )  # fmt: skip
    if CAUSAL or not EVEN_KEYS:
        dq = _dq_tiles(
            dq, q, do, lse, delta, q_src, k_src, v_src, do_src, batch, head, n_heads, first_query, n_queries,
            queries, unmasked, last_key, n_keys, scale_log2, True, CAUSAL, D, BLOCK_D, BLOCK_M, BLOCK_N,
            DESCRIPTORS, PRECISION, CHUNK,
        )  # fmt: skip
    dq_tile = _tile(dq_ptr, batch, head, queries, dims, stride_dqb, stride_dqh, stride_dqn, stride_dqd)
    tl.store(dq_tile, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, q_src, k_src, v_src, do_src, lse2_ptr, delta_ptr, batch, head, n_heads, first_key, n_keys,
    keys, first_query, last_query, n_queries, scale_log2, DIAGONAL: tl.constexpr, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIPTORS: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """Adds the query tiles in [first_query, last_query) to dK and dV.

    Queries and keys outside the tensors are harmless: such a query adds zeros, because its q and dO read as
    zero, and such a key only spoils a row that is never stored.
    """
    for start in tl.range(first_query, last_query, BLOCK_M, disable_licm=CHUNK > 0):
        queries = start + tl.arange(0, BLOCK_M)
        q = load_tile(q_src, batch, head, n_heads, start, n_queries, D, BLOCK_M, BLOCK_D, DESCRIPTORS)
        do = load_tile(do_src, batch, head, n_heads, start, n_queries, D, BLOCK_M, BLOCK_D, DESCRIPTORS)
        if CHUNK:
            st = product_in_chunks(
                k_src, first_key, n_keys, q_src, start, n_queries, batch, head, n_heads,
                D, BLOCK_N, BLOCK_M, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
            dpt = product_in_chunks(
                v_src, first_key, n_keys, do_src, start, n_queries, batch, head, n_heads,
                D, BLOCK_N, BLOCK_M, BLOCK_D, CHUNK, PRECISION,
            )  # fmt: skip
        else:
            st = tl.dot(k, q.T, input_precision=PRECISION)
            dpt = tl.dot(v, do.T, input_precision=PRECISION)
        lse = tl.load(lse2_ptr + queries, mask=queries < n_queries, other=0.0)
        delta = tl.load(delta_ptr + queries, mask=queries < n_queries, other=0.0)
        if DIAGONAL:
            st = tl.where(queries[None, :] >= keys[:, None], st, -float("inf"))
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
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, DESCRIPTORS: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dK and dV. Grid: (key tiles * batch * heads,)."""
    tiles = tl.cdiv(n_keys, BLOCK_N)
    first_key = tl.program_id(0) % tiles * BLOCK_N  # causal: the first keys have the most queries
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // n_heads
    head = batch_head % n_heads
    lse2_ptr += batch_head.to(tl.int64) * n_queries
    delta_ptr += batch_head.to(tl.int64) * n_queries

    keys = first_key + tl.arange(0, BLOCK_N)
    k = load_tile(k_src, batch, head, n_heads, first_key, n_keys, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
    v = load_tile(v_src, batch, head, n_heads, first_key, n_keys, D, BLOCK_N, BLOCK_D, DESCRIPTORS)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    unmasked = 0
    if CAUSAL:  # the tiles that the diagonal crosses, then those under it
        unmasked = tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, q_src, k_src, v_src, do_src, lse2_ptr, delta_ptr, batch, head, n_heads,
            first_key, n_keys, keys,
            first_key // BLOCK_M * BLOCK_M, tl.minimum(unmasked, n_queries), n_queries, scale_log2,
            True, D, BLOCK_D, BLOCK_M, BLOCK_N, DESCRIPTORS, PRECISION, CHUNK,
        )  # fmt: skip
    dk, dv = _dkdv_tiles(
        dk, dv, k, v, q_src, k_src, v_src, do_src, lse2_ptr, delta_ptr, batch, head, n_heads,
        first_key, n_keys, keys, unmasked, n_queries, n_queries, scale_log2,
        False, D, BLOCK_D, BLOCK_M, BLOCK_N, DESCRIPTORS, PRECISION, CHUNK,
    )  # fmt: skip

    dims = tl.arange(0, BLOCK_D)
    inside = (keys[:, None] < n_keys) & (dims[None, :] < D)
    dk_tile = _tile(dk_ptr, batch, head, keys, dims, stride_dkb, stride_dkh, stride_dkn, stride_dkd)
    dv_tile = _tile(dv_ptr, batch, head, keys, dims, stride_dvb, stride_dvh, stride_dvn, stride_dvd)
    tl.store(dk_tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_tile, dv.to(dv_ptr.dtype.element_ty), mask=inside)
