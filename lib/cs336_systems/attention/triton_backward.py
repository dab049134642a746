"""FlashAttention-2's backward pass in two Triton kernels (Dao 2023, algorithm 2). No torch in here.

P is recomputed tile by tile from Q, K and the saved L. With D = rowsum(dO * O), called delta here:

    dV = P^T dO     dP = dO V^T     dS = P * (dP - delta)     dQ = scale * dS K     dK = scale * dS^T Q

    q, do, dq [BLOCK_M, BLOCK_D]    k, v, dk, dv [BLOCK_N, BLOCK_D]    lse, delta [BLOCK_M]
    s, p, dp, ds [BLOCK_M, BLOCK_N], and transposed st, pt, dpt, dst [BLOCK_N, BLOCK_M]

`dq_kernel` owns queries and walks over keys; then `dkdv_kernel` owns keys and walks over queries. That is
seven matmuls instead of the five of one fused kernel, but no two programs write to the same place: no atomic
additions, and the same bits every time. (On an H200, five matmuls with dQ added up in L2 take longer when
written like this: see the ablation in notebook 27. hopper_backward does better.)

Where those would leave SMs without a program, `backward_kernel` has both kinds of programs side by side; and
if that is still too few, each walks over a part of its keys or queries, and `sum_kernel` adds the parts.

`dkdv_kernel` works on transposed tiles (S^T = K Q^T): P^T and dS^T are then already the left operands of dV
and dK, and never leave the registers. Tuples that functions pass on are those of triton_forward.
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_forward import (
    key_range,
    load_logsumexp,
    load_tile,
    matmul_in_chunks,
    own_tile,
    pointers,
)

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def probabilities(s, lse, rest, scale, EXACT: tl.constexpr):
    """P = exp(scale * s - L); if EXACT, rounded where scale * s - L is small."""
    return tl.exp2((s * scale - lse) * LOG2E - rest * LOG2E if EXACT else s * (scale * LOG2E) - lse * LOG2E)


@triton.jit
def add_dq_tiles(
    dq, saved, sources, head, rows, keys, scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    constants: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles in [first_key, last_key) to dQ. saved: (q, do, lse, rest, delta)."""
    D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK = constants
    q, do, lse, rest, delta = saved
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
        p = probabilities(s, lse[:, None], rest[:, None], scale, PRECISION != "tf32")
        ds = (p * (dp - delta[:, None])).to(k.dtype)
        dq = tl.dot(ds, k, dq, input_precision=PRECISION)
    return dq


@triton.jit
def own_dq(
    place, sources, saved, delta_ptr, output, sizes, CAUSAL: tl.constexpr, EVEN_KEYS: tl.constexpr,
    SPLIT: tl.constexpr, constants: tl.constexpr,
):  # fmt: skip
    """dQ of a tile of queries; delta for dkdv_kernel, if there is a place for it.

    place: of `own_tile`. saved: (o_ptr, lse_ptr, rest_ptr, strides of o). delta_ptr: or None.
    output: (dq_ptr, strides of dq).
    """
    D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, _ = constants
    tile, batch_head, batch, head = place
    q_src, do_src = sources[0], sources[3]
    o_ptr, lse_ptr, rest_ptr, stride_ob, stride_oh, stride_on, stride_od = saved
    dq_ptr, stride_dqb, stride_dqh, stride_dqn, stride_dqd = output
    n_heads, n_queries, n_keys, part_queries, span, scale = sizes
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
    lse, rest = load_logsumexp(lse_ptr + lse_rows, rest_ptr + lse_rows, in_range, PRECISION != "tf32")
    if delta_ptr is not None:
        tl.store(delta_ptr + lse_rows, delta, mask=in_range)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    first_key, unmasked, last_key = key_range(first_query, n_keys, span, BLOCK_M, BLOCK_N, CAUSAL, SPLIT)
    loaded = (q, do, lse, rest, delta)
    rows = (first_query, n_queries, queries)
    dq = add_dq_tiles(
        dq, loaded, sources, head_index, rows, (first_key, unmasked, n_keys), scale, False, CAUSAL,
        constants,
    )  # fmt: skip
    if CAUSAL or not EVEN_KEYS:
        dq = add_dq_tiles(
            dq, loaded, sources, head_index, rows, (unmasked, last_key, n_keys), scale, True, CAUSAL,
            constants,
        )  # fmt: skip
    if SPLIT:
        inside = inside & (first_key < last_key)
        dq_ptr += (tl.program_id(1) * part_queries).to(tl.int64) * D
    dq_tile = pointers(dq_ptr, batch, head, queries, dims, stride_dqb, stride_dqh, stride_dqn, stride_dqd)
    tl.store(dq_tile, (dq * scale).to(dq_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dq_kernel(
    q_src, k_src, v_src, do_src, o_ptr, lse_ptr, rest_ptr, delta_ptr, dq_ptr,
    stride_ob, stride_oh, stride_on, stride_od, stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    n_heads, n_queries, n_keys, scale,
    CAUSAL: tl.constexpr, EVEN_KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dQ, and delta for dkdv_kernel. Grid: (query tiles * batch * heads,)."""
    place = own_tile(tl.program_id(0), n_queries, n_heads, BLOCK_M, CAUSAL)
    saved = (o_ptr, lse_ptr, rest_ptr, stride_ob, stride_oh, stride_on, stride_od)
    output = (dq_ptr, stride_dqb, stride_dqh, stride_dqn, stride_dqd)
    sizes = (n_heads, n_queries, n_keys, 0, 0, scale)
    constants: tl.constexpr = (D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK)
    own_dq(
        place, (q_src, k_src, v_src, do_src), saved, delta_ptr, output, sizes, CAUSAL, EVEN_KEYS, False,
        constants,
    )  # fmt: skip


@triton.jit
def query_range(
    first_key, n_queries, span, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """(first_query, unmasked, last_query): none before the first sees a key; all from `unmasked` on see all.

    SPLIT and span as in `key_range`.
    """
    first_query = 0
    unmasked = 0
    last_query = n_queries
    if CAUSAL:
        first_query = first_key // BLOCK_M * BLOCK_M
        unmasked = tl.cdiv(first_key + BLOCK_N - 1, BLOCK_M) * BLOCK_M
    if SPLIT:
        start = tl.program_id(1) * span
        first_query = tl.maximum(first_query, start)
        unmasked = tl.maximum(unmasked, start)
        last_query = tl.minimum(last_query, start + span)
    return first_query, unmasked, last_query


@triton.jit
def add_dkdv_tiles(
    grads, tiles, sources, sums, head, keys, rows, scale, DIAGONAL: tl.constexpr, GIVEN: tl.constexpr,
    constants: tl.constexpr,
):  # fmt: skip
    """Adds the query tiles in [first_query, last_query) to grads, (dK, dV). tiles: (k, v).

    sums: (L, rest, delta) if GIVEN; else (L, rest, o_ptr, strides of o's rows and dims): delta is made here.
    Queries and keys outside the tensors are harmless: such a query adds zeros, because its q and dO read as
    zero, and such a key only spoils a row that is never stored.
    """
    D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK = constants
    dk, dv = grads
    k, v = tiles
    q_src, k_src, v_src, do_src = sources
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
        in_range = queries < n_queries
        lse, rest = load_logsumexp(sums[0] + queries, sums[1] + queries, in_range, PRECISION != "tf32")
        if GIVEN:
            delta = tl.load(sums[2] + queries, mask=in_range, other=0.0)
        else:
            dims = tl.arange(0, BLOCK_D)
            o_tile = sums[2] + queries[:, None].to(tl.int64) * sums[3] + dims[None, :] * sums[4]
            o = tl.load(o_tile, mask=in_range[:, None] & (dims[None, :] < D), other=0.0)
            delta = tl.sum(o.to(tl.float32) * do.to(tl.float32), 1)
        if DIAGONAL:
            st = tl.where(queries[None, :] >= columns[:, None], st, -float("inf"))
        pt = probabilities(st, lse[None, :], rest[None, :], scale, PRECISION != "tf32")
        dst = (pt * (dpt - delta[None, :])).to(q.dtype)
        dk = tl.dot(dst, q, dk, input_precision=PRECISION)
        dv = tl.dot(pt.to(do.dtype), do, dv, input_precision=PRECISION)
    return dk, dv


@triton.jit
def own_dkdv(
    place, sources, sums, outputs, sizes, CAUSAL: tl.constexpr, GIVEN: tl.constexpr, SPLIT: tl.constexpr,
    constants: tl.constexpr,
):  # fmt: skip
    """dK and dV of a tile of keys.

    place: of `own_tile`. sums: of `add_dkdv_tiles`, of this head. outputs: (dk_ptr, dv_ptr, strides of each).
    """
    D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, _, _ = constants
    tile, _, batch, head = place
    k_src, v_src = sources[1], sources[2]
    dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dkn, stride_dkd = outputs[:6]
    stride_dvb, stride_dvh, stride_dvn, stride_dvd = outputs[6:]
    n_heads, n_queries, n_keys, part_keys, span, scale = sizes
    head_index = (batch, head, n_heads)

    first_key = tile * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    k = load_tile(k_src, head_index, first_key, n_keys, D, BLOCK_N, BLOCK_D, USE_TMA)
    v = load_tile(v_src, head_index, first_key, n_keys, D, BLOCK_N, BLOCK_D, USE_TMA)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    ours = (first_key, n_keys, keys)
    first_query, unmasked, last_query = query_range(
        first_key, n_queries, span, BLOCK_M, BLOCK_N, CAUSAL, SPLIT
    )
    if CAUSAL:
        rows = (first_query, tl.minimum(unmasked, last_query), n_queries)
        dk, dv = add_dkdv_tiles(
            (dk, dv), (k, v), sources, sums, head_index, ours, rows, scale, True, GIVEN, constants
        )
    rows = (unmasked, last_query, n_queries)
    dk, dv = add_dkdv_tiles(
        (dk, dv), (k, v), sources, sums, head_index, ours, rows, scale, False, GIVEN, constants
    )

    dims = tl.arange(0, BLOCK_D)
    inside = (keys[:, None] < n_keys) & (dims[None, :] < D)
    if SPLIT:
        start = tl.program_id(1) * span
        inside = inside & (start < n_queries) & (first_query < start + span)
        dk_ptr += (tl.program_id(1) * part_keys).to(tl.int64) * D
        dv_ptr += (tl.program_id(1) * part_keys).to(tl.int64) * D
    dk_tile = pointers(dk_ptr, batch, head, keys, dims, stride_dkb, stride_dkh, stride_dkn, stride_dkd)
    dv_tile = pointers(dv_ptr, batch, head, keys, dims, stride_dvb, stride_dvh, stride_dvn, stride_dvd)
    tl.store(dk_tile, (dk * scale).to(dk_ptr.dtype.element_ty), mask=inside)
    tl.store(dv_tile, dv.to(dv_ptr.dtype.element_ty), mask=inside)


@triton.jit
def dkdv_kernel(
    q_src, k_src, v_src, do_src, lse_ptr, rest_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, n_queries, n_keys, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr,
):  # fmt: skip
    """dK and dV. Grid: (key tiles * batch * heads,)."""
    place = own_tile(tl.program_id(0), n_keys, n_heads, BLOCK_N, False)  # the first keys have most queries
    first_row = place[1].to(tl.int64) * n_queries
    sums = (lse_ptr + first_row, rest_ptr + first_row, delta_ptr + first_row)
    outputs = (dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dkn, stride_dkd,
               stride_dvb, stride_dvh, stride_dvn, stride_dvd)  # fmt: skip
    sizes = (n_heads, n_queries, n_keys, 0, 0, scale)
    constants: tl.constexpr = (D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK)
    own_dkdv(
        place, (q_src, k_src, v_src, do_src), sums, outputs, sizes,
        CAUSAL, True, False, constants,
    )  # fmt: skip


@triton.jit
def backward_kernel(
    q_src, k_src, v_src, do_src, o_ptr, lse_ptr, rest_ptr, dq_ptr, dk_ptr, dv_ptr,
    stride_ob, stride_oh, stride_on, stride_od, stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, n_queries, n_keys, part_queries, part_keys, span, scale,
    CAUSAL: tl.constexpr, EVEN_KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV in one launch. Grid: ((query tiles + key tiles) * batch * heads, parts).

    The last programs own keys, and make delta themselves: nobody waits for anybody. With SPLIT a program
    walks over `span` rows, and what it writes is its part of (parts, batch, heads, n, d), for sum_kernel.
    """
    sources = (q_src, k_src, v_src, do_src)
    constants: tl.constexpr = (D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK)
    key_programs = tl.cdiv(n_keys, BLOCK_N) * (part_keys // n_keys)
    query_programs = tl.num_programs(0) - key_programs
    if tl.program_id(0) < query_programs:
        place = own_tile(tl.program_id(0), n_queries, n_heads, BLOCK_M, CAUSAL)
        saved = (o_ptr, lse_ptr, rest_ptr, stride_ob, stride_oh, stride_on, stride_od)
        output = (dq_ptr, stride_dqb, stride_dqh, stride_dqn, stride_dqd)
        sizes = (n_heads, n_queries, n_keys, part_queries, span, scale)
        own_dq(place, sources, saved, None, output, sizes, CAUSAL, EVEN_KEYS, SPLIT, constants)
    else:
        key_place = own_tile(tl.program_id(0) - query_programs, n_keys, n_heads, BLOCK_N, False)
        o_head = o_ptr + key_place[2].to(tl.int64) * stride_ob + key_place[3].to(tl.int64) * stride_oh
        first_row = key_place[1].to(tl.int64) * n_queries
        sums = (lse_ptr + first_row, rest_ptr + first_row, o_head, stride_on, stride_od)
        outputs = (dk_ptr, dv_ptr, stride_dkb, stride_dkh, stride_dkn, stride_dkd,
                   stride_dvb, stride_dvh, stride_dvn, stride_dvd)  # fmt: skip
        key_sizes = (n_heads, n_queries, n_keys, part_keys, span, scale)
        own_dkdv(key_place, sources, sums, outputs, key_sizes, CAUSAL, False, SPLIT, constants)


@triton.jit
def add_parts(
    parts_ptr, output, place, first_part, last_part, n_rows, part_rows,
    D: tl.constexpr, BLOCK_D: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """One tile of ROWS rows of the sum over parts. output: (ptr, strides)."""
    ptr, stride_b, stride_h, stride_n, stride_d = output
    tile, batch_head, batch, head = place
    rows = tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < n_rows) & (dims[None, :] < D)
    part_size = tl.cast(part_rows, tl.int64) * D
    tile_rows = batch_head.to(tl.int64) * n_rows + rows
    part = parts_ptr + first_part * part_size + tile_rows[:, None] * D + dims[None, :]
    total = tl.zeros([ROWS, BLOCK_D], tl.float32)
    for _ in tl.range(first_part, last_part, num_stages=3):
        total += tl.load(part, mask=inside, other=0.0)
        part += part_size
    out_tile = pointers(ptr, batch, head, rows, dims, stride_b, stride_h, stride_n, stride_d)
    tl.store(out_tile, total.to(ptr.dtype.element_ty), mask=inside)


@triton.jit
def sum_kernel(
    dq_parts_ptr, dk_parts_ptr, dv_parts_ptr, dq_ptr, dk_ptr, dv_ptr,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, n_queries, n_keys, part_queries, part_keys, span,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """dQ, dK and dV of their parts, added in order: the same bits every time.

    BLOCK_M, BLOCK_N: queries and keys that programs owned which wrote the parts; multiples of ROWS. Grid:
    ((tiles of ROWS queries + tiles of ROWS keys) * batch * heads,).
    """
    key_programs = tl.cdiv(n_keys, ROWS) * (part_keys // n_keys)
    query_programs = tl.num_programs(0) - key_programs
    if tl.program_id(0) < query_programs:
        place = own_tile(tl.program_id(0), n_queries, n_heads, ROWS, False)
        first_query = place[0] * ROWS // BLOCK_M * BLOCK_M
        _, _, last_key = key_range(first_query, n_keys, span, BLOCK_M, 1, CAUSAL, False)
        output = (dq_ptr, stride_dqb, stride_dqh, stride_dqn, stride_dqd)
        last_part = tl.cdiv(last_key, span)
        add_parts(dq_parts_ptr, output, place, 0, last_part, n_queries, part_queries, D, BLOCK_D, ROWS)
    else:
        key_place = own_tile(tl.program_id(0) - query_programs, n_keys, n_heads, ROWS, False)
        first_key = key_place[0] * ROWS // BLOCK_N * BLOCK_N
        first_row, _, _ = query_range(first_key, n_queries, span, 1, BLOCK_N, CAUSAL, False)
        parts = first_row // span, tl.cdiv(n_queries, span)
        dk = (dk_ptr, stride_dkb, stride_dkh, stride_dkn, stride_dkd)
        dv = (dv_ptr, stride_dvb, stride_dvh, stride_dvn, stride_dvd)
        add_parts(dk_parts_ptr, dk, key_place, parts[0], parts[1], n_keys, part_keys, D, BLOCK_D, ROWS)
        add_parts(dv_parts_ptr, dv, key_place, parts[0], parts[1], n_keys, part_keys, D, BLOCK_D, ROWS)
