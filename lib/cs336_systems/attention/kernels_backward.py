"""FlashAttention-2's backward pass in Triton (Dao 2023, algorithm 2). No torch in here.

P is recomputed tile by tile from Q, K and the saved L. With D = rowsum(dO * O), called delta here:

    dV = P^T dO        dP = dO V^T        dS = P * (dP - delta)        dQ = scale * dS K        dK = scale * dS^T Q

Two ways to organise it:

- split: `dq_kernel` owns queries and walks over keys, `dkdv_kernel` owns keys and walks over queries. Seven matrix
  products and the exponentials twice, but nothing is shared, so the result is the same bit by bit every time.
- fused: `dkdv_kernel` also adds its contribution to dQ to a float32 buffer that all programs share. Five matrix
  products and the exponentials once; the order of the additions, and so the last bits of dQ, vary from run to run.

`dkdv_kernel` works on transposed tiles (S^T = K Q^T): P^T and dS^T are then already the left operands of dV and dK and
never leave the registers. dQ^T = K^T dS^T follows suit, so the shared buffer holds dQ transposed, (batch * heads, d, n).
"""

import triton
import triton.language as tl

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _rows(ptr, batch, head, rows, dims, stride_b, stride_h, stride_n, stride_d):
    """Pointers to a (rows, dims) tile of a (batch, heads, n, d) tensor of any strides."""
    base = ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    return base + rows[:, None].to(tl.int64) * stride_n + dims[None, :] * stride_d


@triton.jit
def _delta(
    o_ptr, do_ptr, batch, head, queries, n_queries, stride_ob, stride_oh, stride_on, stride_od,
    stride_dob, stride_doh, stride_don, stride_dod, D: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """rowsum(dO * O) of a tile of queries."""
    dims = tl.arange(0, BLOCK_D)
    inside = (queries[:, None] < n_queries) & (dims[None, :] < D)
    o_tile = _rows(o_ptr, batch, head, queries, dims, stride_ob, stride_oh, stride_on, stride_od)
    do_tile = _rows(do_ptr, batch, head, queries, dims, stride_dob, stride_doh, stride_don, stride_dod)
    o = tl.load(o_tile, mask=inside, other=0.0).to(tl.float32)
    do = tl.load(do_tile, mask=inside, other=0.0).to(tl.float32)
    return tl.sum(o * do, 1)


@triton.jit
def delta_kernel(
    o_ptr, do_ptr, delta_ptr, dq_sum_ptr, stride_ob, stride_oh, stride_on, stride_od,
    stride_dob, stride_doh, stride_don, stride_dod, n_heads, n_queries, n_padded,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """First step of the fused backward: delta, and zeros for the sum of dQ. Grid: (query tiles * batch * heads,)."""
    tiles = n_padded // BLOCK_M
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // n_heads
    head = batch_head % n_heads
    queries = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    delta = _delta(
        o_ptr, do_ptr, batch, head, queries, n_queries, stride_ob, stride_oh, stride_on, stride_od,
        stride_dob, stride_doh, stride_don, stride_dod, D, BLOCK_D,
    )  # fmt: skip
    tl.store(delta_ptr + batch_head.to(tl.int64) * n_queries + queries, delta, mask=queries < n_queries)
    dims = batch_head.to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
    tl.store(dq_sum_ptr + dims[:, None] * n_padded + queries[None, :], tl.zeros([BLOCK_D, BLOCK_M], tl.float32))


@triton.jit
def dq_from_sum_kernel(
    dq_sum_ptr, dq_ptr, stride_b, stride_h, stride_n, stride_d, n_heads, n_queries, n_padded, scale,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Last step of the fused backward: scale, transpose and round the summed dQ."""
    tiles = n_padded // BLOCK_M
    batch_head = tl.program_id(0) // tiles
    queries = tl.program_id(0) % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    rows = batch_head.to(tl.int64) * BLOCK_D + dims
    dq = tl.load(dq_sum_ptr + rows[:, None] * n_padded + queries[None, :]).T * scale
    dq_tile = _rows(
        dq_ptr, batch_head // n_heads, batch_head % n_heads, queries, dims, stride_b, stride_h, stride_n, stride_d
    )
    tl.store(dq_tile, dq.to(dq_ptr.dtype.element_ty), mask=(queries[:, None] < n_queries) & (dims[None, :] < D))


@triton.jit
def _dkdv_tiles(
    dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, dq_sum, batch_head, n_heads, keys, first_query, last_query,
    n_queries, n_keys, n_padded, scale_log2,
    DIAGONAL: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr, DQ_SUM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the query tiles in [first_query, last_query) to dK and dV and, where DQ_SUM says how, to the shared dQ."""
    batch = batch_head // n_heads
    head = batch_head % n_heads
    for start in tl.range(first_query, last_query, BLOCK_M):
        queries = start + tl.arange(0, BLOCK_M)
        q = q_desc.load([batch, head, start, 0]).reshape([BLOCK_M, BLOCK_D])
        do = do_desc.load([batch, head, start, 0]).reshape([BLOCK_M, BLOCK_D])
        if EVEN_QUERIES:
            lse = tl.load(lse_ptr + queries)
            delta = tl.load(delta_ptr + queries)
        else:  # a row that is not there has p = exp(-inf) = 0
            lse = tl.load(lse_ptr + queries, mask=queries < n_queries, other=float("inf"))
            delta = tl.load(delta_ptr + queries, mask=queries < n_queries, other=0.0)
        st = tl.dot(k, q.T, input_precision=PRECISION)
        dpt = tl.dot(v, do.T, input_precision=PRECISION)
        pt = tl.exp2(st * scale_log2 - (lse * LOG2E)[None, :])
        if DIAGONAL:
            pt = tl.where(queries[None, :] >= keys[:, None], pt, 0.0)
        if not EVEN_KEYS:
            pt = tl.where(keys[:, None] < n_keys, pt, 0.0)
        dst = (pt * (dpt - delta[None, :])).to(q.dtype)
        dk = tl.dot(dst, q, dk, input_precision=PRECISION)
        dv = tl.dot(pt.to(do.dtype), do, dv, input_precision=PRECISION)
        if DQ_SUM is not None:
            dqt = tl.dot(k.T, dst, input_precision=PRECISION)
            if DQ_SUM == "descriptor":
                dq_sum.atomic_add([batch_head * BLOCK_D, start], dqt)
            else:
                rows = batch_head.to(tl.int64) * BLOCK_D + tl.arange(0, BLOCK_D)
                tl.atomic_add(dq_sum + rows[:, None] * n_padded + queries[None, :], dqt, sem="relaxed")
    return dk, dv


@triton.jit
def dkdv_kernel(
    q_desc, k_desc, v_desc, do_desc, lse_ptr, delta_ptr, dq_sum, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, n_queries, n_keys, n_padded, scale, scale_log2,
    CAUSAL: tl.constexpr, EVEN_QUERIES: tl.constexpr, EVEN_KEYS: tl.constexpr, DQ_SUM: tl.constexpr,
    D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dK and dV, and the shared sum of dQ unless DQ_SUM is None. Grid: (key tiles * batch * heads,).

    DQ_SUM: "descriptor" (the copy engine adds whole tiles in L2: Hopper), "pointer" (atomic adds), or None.
    """
    tiles = tl.cdiv(n_keys, BLOCK_N)
    first_key = tl.program_id(0) % tiles * BLOCK_N  # causal: the first keys have the most queries, and start first
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // n_heads
    head = batch_head % n_heads
    lse_ptr += batch_head.to(tl.int64) * n_queries
    delta_ptr += batch_head.to(tl.int64) * n_queries

    keys = first_key + tl.arange(0, BLOCK_N)
    k = k_desc.load([batch, head, first_key, 0]).reshape([BLOCK_N, BLOCK_D])
    v = v_desc.load([batch, head, first_key, 0]).reshape([BLOCK_N, BLOCK_D])
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    unmasked = 0
    if CAUSAL:  # the tiles that the diagonal crosses, then those under it
        unmasked = tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M
        dk, dv = _dkdv_tiles(
            dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, dq_sum, batch_head, n_heads, keys,
            first_key // BLOCK_M * BLOCK_M, tl.minimum(unmasked, n_queries), n_queries, n_keys, n_padded, scale_log2,
            True, EVEN_QUERIES, EVEN_KEYS, DQ_SUM, BLOCK_M, BLOCK_D, PRECISION,
        )  # fmt: skip
    dk, dv = _dkdv_tiles(
        dk, dv, k, v, q_desc, do_desc, lse_ptr, delta_ptr, dq_sum, batch_head, n_heads, keys,
        unmasked, n_queries, n_queries, n_keys, n_padded, scale_log2,
        False, EVEN_QUERIES, EVEN_KEYS, DQ_SUM, BLOCK_M, BLOCK_D, PRECISION,
    )  # fmt: skip

    dims = tl.arange(0, BLOCK_D)
    inside = (keys[:, None] < n_keys) & (dims[None, :] < D)
    dk_tile = _rows(dk_ptr, batch, head, keys, dims, stride_dkb, stride_dkh, stride_dkn, stride_dkd)
    dv_tile = _rows(dv_ptr, batch, head, keys, dims, stride_dvb, stride_dvh, stride_dvn, stride_dvd)
    tl.store(dk_tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_tile, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _dq_tiles(
    dq, q, do, lse, delta, k_desc, v_desc, batch, head, queries, first_key, last_key, n_keys, scale_log2,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles in [first_key, last_key) to dQ."""
    for start in tl.range(first_key, last_key, BLOCK_N):
        k = k_desc.load([batch, head, start, 0]).reshape([BLOCK_N, BLOCK_D])
        v = v_desc.load([batch, head, start, 0]).reshape([BLOCK_N, BLOCK_D])
        s = tl.dot(q, k.T, input_precision=PRECISION)
        dp = tl.dot(do, v.T, input_precision=PRECISION)
        p = tl.exp2(s * scale_log2 - lse[:, None])
        if MASKED:
            keys = start + tl.arange(0, BLOCK_N)
            visible = keys[None, :] < n_keys
            if CAUSAL:
                visible = visible & (queries[:, None] >= keys[None, :])
            p = tl.where(visible, p, 0.0)
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def dq_kernel(
    q_desc, k_desc, v_desc, do_desc, o_ptr, do_ptr, lse_ptr, delta_ptr, dq_ptr,
    stride_ob, stride_oh, stride_on, stride_od, stride_dob, stride_doh, stride_don, stride_dod,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd, n_heads, n_queries, n_keys, scale, scale_log2,
    CAUSAL: tl.constexpr, EVEN_KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """First step of the split backward: dQ, and delta for `dkdv_kernel`. Grid: (query tiles * batch * heads,)."""
    tiles = tl.cdiv(n_queries, BLOCK_M)
    tile = tl.program_id(0) % tiles
    if CAUSAL:
        tile = tiles - 1 - tile
    batch_head = tl.program_id(0) // tiles
    batch = batch_head // n_heads
    head = batch_head % n_heads

    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    in_range = queries < n_queries
    delta = _delta(
        o_ptr, do_ptr, batch, head, queries, n_queries, stride_ob, stride_oh, stride_on, stride_od,
        stride_dob, stride_doh, stride_don, stride_dod, D, BLOCK_D,
    )  # fmt: skip
    rows = batch_head.to(tl.int64) * n_queries + queries
    tl.store(delta_ptr + rows, delta, mask=in_range)
    lse = tl.load(lse_ptr + rows, mask=in_range, other=float("inf")) * LOG2E
    q = q_desc.load([batch, head, first_query, 0]).reshape([BLOCK_M, BLOCK_D])
    do = do_desc.load([batch, head, first_query, 0]).reshape([BLOCK_M, BLOCK_D])
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    unmasked = n_keys // BLOCK_N * BLOCK_N
    last_key = n_keys
    if CAUSAL:
        unmasked = tl.minimum(unmasked, first_query // BLOCK_N * BLOCK_N)
        last_key = tl.minimum(n_keys, first_query + BLOCK_M)
    dq = _dq_tiles(
        dq, q, do, lse, delta, k_desc, v_desc, batch, head, queries, 0, unmasked, n_keys, scale_log2,
        False, CAUSAL, BLOCK_N, BLOCK_D, PRECISION,
    )  # fmt: skip
    if CAUSAL or not EVEN_KEYS:
        dq = _dq_tiles(
            dq, q, do, lse, delta, k_desc, v_desc, batch, head, queries, unmasked, last_key, n_keys, scale_log2,
            True, CAUSAL, BLOCK_N, BLOCK_D, PRECISION,
        )  # fmt: skip
    dims = tl.arange(0, BLOCK_D)
    dq_tile = _rows(dq_ptr, batch, head, queries, dims, stride_dqb, stride_dqh, stride_dqn, stride_dqd)
    tl.store(dq_tile, (dq * scale).to(dq_ptr.dtype.element_ty), mask=in_range[:, None] & (dims[None, :] < D))
