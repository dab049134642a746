"""FlashAttention-2 in float32 with all its bits, on Hopper's matmuls of bfloat16. No torch in here.

A float32 number is the sum of three of bfloat16, x = x0 + x1 + x2, with 8 bits each. So a matrix has three
planes, and of the nine products of two matrices' planes those six count that are not below the last bit.
Triton's own "bf16x6" splits in registers, again for every tile that is loaded, and what comes out of
registers keeps it from Hopper's fast matmuls. Here `split_kernel` writes the planes of Q, K, V and dO once,
the kernels load them by TMA, and only P and dS, which are made in registers, are split there.

The loops keep LLVM from moving code out of them (disable_licm): what it finds are addresses of planes in
shared memory, nearly a hundred registers of them.

The algorithms and the notation are those of triton_forward and triton_backward. A split matrix is a tuple of
its planes; in memory, a tensor (batch, heads * 3, n, d). What functions pass on together is a tuple:

    head       (batch, head * 3), the first of a head's planes
    constants  (BLOCK_D, the rows of a tile that is loaded in the loop)
"""

import triton
import triton.language as tl

from cs336_systems.attention.triton_backward import probabilities, query_range
from cs336_systems.attention.triton_forward import (
    key_range,
    load_logsumexp,
    own_tile,
    pointers,
    softmax_step,
    store_logsumexp,
)


@triton.jit
def split_kernel(
    q_ptr, k_ptr, v_ptr, do_ptr, q_planes_ptr, k_planes_ptr, v_planes_ptr, do_planes_ptr,
    stride_qb, stride_qh, stride_qn, stride_qd, stride_kb, stride_kh, stride_kn, stride_kd,
    stride_vb, stride_vh, stride_vn, stride_vd, stride_dob, stride_doh, stride_don, stride_dod,
    n_heads, n_queries, n_keys, part_queries, part_keys,
    D: tl.constexpr, ROW: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
):  # fmt: skip
    """The planes of q, k, v and, where the grid has programs for it, do; in rows of ROW numbers.

    Grid: (row tiles * batch * heads of all of them,).
    """
    of_queries = tl.cdiv(n_queries, BLOCK_M) * (part_queries // n_queries)
    of_keys = tl.cdiv(n_keys, BLOCK_M) * (part_keys // n_keys)
    program = tl.program_id(0)
    shape: tl.constexpr = (D, ROW, BLOCK_D, BLOCK_M)
    if program < of_queries:
        q = (q_ptr, stride_qb, stride_qh, stride_qn, stride_qd)
        split_tile(q, q_planes_ptr, program, n_queries, n_heads, shape)
    elif program < of_queries + of_keys:
        k = (k_ptr, stride_kb, stride_kh, stride_kn, stride_kd)
        split_tile(k, k_planes_ptr, program - of_queries, n_keys, n_heads, shape)
    elif program < of_queries + 2 * of_keys:
        v = (v_ptr, stride_vb, stride_vh, stride_vn, stride_vd)
        split_tile(v, v_planes_ptr, program - of_queries - of_keys, n_keys, n_heads, shape)
    else:
        do = (do_ptr, stride_dob, stride_doh, stride_don, stride_dod)
        split_tile(do, do_planes_ptr, program - of_queries - 2 * of_keys, n_queries, n_heads, shape)


@triton.jit
def split_tile(x, planes_ptr, program, n_rows, n_heads, shape: tl.constexpr):
    """x: (ptr, strides) of a (batch, heads, n_rows, D) tensor."""
    D, ROW, BLOCK_D, BLOCK_M = shape
    x_ptr, stride_b, stride_h, stride_n, stride_d = x
    tile, batch_head, batch, head = own_tile(program, n_rows, n_heads, BLOCK_M, False)
    rows = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    inside = (rows[:, None] < n_rows) & (dims[None, :] < D)
    x_tile = pointers(x_ptr, batch, head, rows, dims, stride_b, stride_h, stride_n, stride_d)
    x0, x1, x2 = split(tl.load(x_tile, mask=inside, other=0.0), planes_ptr.dtype.element_ty)
    size = tl.cast(n_rows, tl.int64) * ROW
    planes = planes_ptr + batch_head * 3 * size + rows[:, None] * ROW + dims[None, :]
    tl.store(planes, x0, mask=inside)
    tl.store(planes + size, x1, mask=inside)
    tl.store(planes + 2 * size, x2, mask=inside)


@triton.jit
def split(x, dtype: tl.constexpr):
    """The planes of a float32 tile. dtype: bfloat16; float32 in the interpreter, which cannot multiply it.

    An infinite number becomes NaN, as do the few below 2^128 that bfloat16 rounds up to it.
    """
    x0 = x.to(tl.bfloat16)
    rest = x - x0.to(tl.float32)
    x1 = rest.to(tl.bfloat16)
    x2 = (rest - x1.to(tl.float32)).to(tl.bfloat16)
    return x0.to(dtype), x1.to(dtype), x2.to(dtype)


@triton.jit
def load_planes(source, head, row, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr):
    """Rows [row, row + BLOCK) of one head, zero outside."""
    batch, plane = head
    x0 = source.load([batch, plane, row, 0]).reshape([BLOCK, BLOCK_D])
    x1 = source.load([batch, plane + 1, row, 0]).reshape([BLOCK, BLOCK_D])
    x2 = source.load([batch, plane + 2, row, 0]).reshape([BLOCK, BLOCK_D])
    return x0, x1, x2


@triton.jit
def transposed(a):
    return a[0].T, a[1].T, a[2].T


@triton.jit
def matmul(a, b):
    """A B, from small products to large: matmuls cut off what does not fit into the sum so far.

    For the same reason long sums are made of such products outside, where additions round.
    """
    product = tl.dot(a[1], b[1])
    product = tl.dot(a[2], b[0], product)
    product = tl.dot(a[0], b[2], product)
    product = tl.dot(a[1], b[0], product)
    product = tl.dot(a[0], b[1], product)
    return tl.dot(a[0], b[0], product)


@triton.jit
def hide(s, queries, start, n_keys, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr):
    """Scores with the keys from start on; minus infinity where a query does not see them."""
    columns = start + tl.arange(0, BLOCK_N)
    visible = columns[None, :] < n_keys
    if CAUSAL:
        visible = visible & (queries[:, None] >= columns[None, :])
    return tl.where(visible, s, -float("inf"))


@triton.jit
def attend(
    state, q, sources, head, queries, keys, scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    constants: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles in [first_key, last_key). state: (acc, total, m)."""
    acc, total, m = state
    k_src, v_src = sources
    first_key, last_key, n_keys = keys
    BLOCK_D, BLOCK_N = constants
    for start in tl.range(first_key, last_key, BLOCK_N, disable_licm=True):
        k = load_planes(k_src, head, start, BLOCK_N, BLOCK_D)
        s = matmul(q, transposed(k))
        if MASKED:
            s = hide(s, queries, start, n_keys, BLOCK_N, CAUSAL)
        p, correction, m = softmax_step(s, m, scale_log2, True)
        total = total * correction + tl.sum(p, 1)
        v = load_planes(v_src, head, start, BLOCK_N, BLOCK_D)
        acc = acc * correction[:, None] + matmul(split(p, v[0].dtype), v)
    return acc, total, m


@triton.jit
def planes_forward_kernel(
    q_src, k_src, v_src, o_ptr, lse_ptr, rest_ptr, stride_ob, stride_oh, stride_on, stride_od,
    n_heads, n_queries, n_keys, part_queries, span, scale, scale_log2,
    CAUSAL: tl.constexpr, EVEN_KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """O, L and rest, or parts of them, and the grid, as forward_kernel's."""
    tile, batch_head, batch, head = own_tile(tl.program_id(0), n_queries, n_heads, BLOCK_M, CAUSAL)

    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    planes = (batch, head * 3)
    q = load_planes(q_src, planes, first_query, BLOCK_M, BLOCK_D)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)

    first_key, unmasked, last_key = key_range(first_query, n_keys, span, BLOCK_M, BLOCK_N, CAUSAL, SPLIT)
    sources = (k_src, v_src)
    constants: tl.constexpr = (BLOCK_D, BLOCK_N)
    acc, total, m = attend(
        (acc, total, m), q, sources, planes, queries, (first_key, unmasked, n_keys), scale_log2, False,
        CAUSAL, constants,
    )  # fmt: skip
    if CAUSAL or not EVEN_KEYS:
        acc, total, m = attend(
            (acc, total, m), q, sources, planes, queries, (unmasked, last_key, n_keys), scale_log2, True,
            CAUSAL, constants,
        )  # fmt: skip

    in_range = queries < n_queries
    if SPLIT:
        in_range = in_range & (first_key < last_key)
        m = tl.where(first_key < last_key, m, 0.0)
        total = tl.where(first_key < last_key, total, 1.0)
        lse_ptr += tl.program_id(1) * part_queries
        rest_ptr += tl.program_id(1) * part_queries
        o_ptr += (tl.program_id(1) * part_queries).to(tl.int64) * D
    lse_rows = batch_head.to(tl.int64) * n_queries + queries
    store_logsumexp(lse_ptr, rest_ptr, lse_rows, in_range, m, scale, total, True)
    o = acc / total[:, None]
    dims = tl.arange(0, BLOCK_D)
    o_tile = o_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    o_tile += queries[:, None].to(tl.int64) * stride_on + dims[None, :] * stride_od
    tl.store(o_tile, o, mask=in_range[:, None] & (dims[None, :] < D))


@triton.jit
def add_dq_tiles(
    dq, saved, sources, head, queries, keys, scale, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    constants: tl.constexpr,
):  # fmt: skip
    """Adds the key tiles in [first_key, last_key) to dQ. saved: (q, do, lse, rest, delta)."""
    q, do, lse, rest, delta = saved
    k_src, v_src = sources
    first_key, last_key, n_keys = keys
    BLOCK_D, BLOCK_N = constants
    for start in tl.range(first_key, last_key, BLOCK_N, disable_licm=True):
        k = load_planes(k_src, head, start, BLOCK_N, BLOCK_D)
        s = matmul(q, transposed(k))
        if MASKED:
            s = hide(s, queries, start, n_keys, BLOCK_N, CAUSAL)
        p = probabilities(s, lse[:, None], rest[:, None], scale, True)
        dp = matmul(do, transposed(load_planes(v_src, head, start, BLOCK_N, BLOCK_D)))
        ds = p * (dp - delta[:, None])
        dq += matmul(split(ds, k[0].dtype), k)
    return dq


@triton.jit
def planes_dq_kernel(
    q_src, k_src, v_src, do_src, o_ptr, do_ptr, lse_ptr, rest_ptr, delta_ptr, dq_ptr,
    stride_ob, stride_oh, stride_on, stride_od, stride_dob, stride_doh, stride_don, stride_dod,
    stride_dqb, stride_dqh, stride_dqn, stride_dqd,
    n_heads, n_queries, n_keys, part_queries, span, scale,
    CAUSAL: tl.constexpr, EVEN_KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dQ or parts of it, and delta for planes_dkdv_kernel. Grid: (query tiles * batch * heads, parts)."""
    tile, batch_head, batch, head = own_tile(tl.program_id(0), n_queries, n_heads, BLOCK_M, CAUSAL)
    planes = (batch, head * 3)

    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, BLOCK_D)
    in_range = queries < n_queries
    inside = in_range[:, None] & (dims[None, :] < D)
    o_tile = pointers(o_ptr, batch, head, queries, dims, stride_ob, stride_oh, stride_on, stride_od)
    do_tile = pointers(do_ptr, batch, head, queries, dims, stride_dob, stride_doh, stride_don, stride_dod)
    delta = tl.sum(tl.load(o_tile, mask=inside, other=0.0) * tl.load(do_tile, mask=inside, other=0.0), 1)
    lse_rows = batch_head.to(tl.int64) * n_queries + queries
    lse, rest = load_logsumexp(lse_ptr + lse_rows, rest_ptr + lse_rows, in_range, True)
    tl.store(delta_ptr + lse_rows, delta, mask=in_range)
    q = load_planes(q_src, planes, first_query, BLOCK_M, BLOCK_D)
    do = load_planes(do_src, planes, first_query, BLOCK_M, BLOCK_D)
    dq = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)

    first_key, unmasked, last_key = key_range(first_query, n_keys, span, BLOCK_M, BLOCK_N, CAUSAL, SPLIT)
    saved, sources = (q, do, lse, rest, delta), (k_src, v_src)
    constants: tl.constexpr = (BLOCK_D, BLOCK_N)
    dq = add_dq_tiles(
        dq, saved, sources, planes, queries, (first_key, unmasked, n_keys), scale, False, CAUSAL,
        constants,
    )  # fmt: skip
    if CAUSAL or not EVEN_KEYS:
        dq = add_dq_tiles(
            dq, saved, sources, planes, queries, (unmasked, last_key, n_keys), scale, True, CAUSAL,
            constants,
        )  # fmt: skip
    if SPLIT:
        inside = inside & (first_key < last_key)
        dq_ptr += (tl.program_id(1) * part_queries).to(tl.int64) * D
    dq_tile = pointers(dq_ptr, batch, head, queries, dims, stride_dqb, stride_dqh, stride_dqn, stride_dqd)
    tl.store(dq_tile, dq * scale, mask=inside)


@triton.jit
def add_dkdv_tiles(
    grads, tiles, sources, head, columns, rows, scale, DIAGONAL: tl.constexpr, constants: tl.constexpr
):
    """Adds the query tiles in [first_query, last_query) to grads, (dK, dV). tiles: (k, v).

    What lies outside the tensors is harmless, as in triton_backward.
    """
    dk, dv = grads
    k, v = tiles
    q_src, do_src, lse_ptr, rest_ptr, delta_ptr = sources
    first_query, last_query, n_queries = rows
    BLOCK_D, BLOCK_M = constants
    for start in tl.range(first_query, last_query, BLOCK_M, disable_licm=True):
        queries = start + tl.arange(0, BLOCK_M)
        q = load_planes(q_src, head, start, BLOCK_M, BLOCK_D)
        st = matmul(k, transposed(q))
        in_range = queries < n_queries
        lse, rest = load_logsumexp(lse_ptr + queries, rest_ptr + queries, in_range, True)
        if DIAGONAL:
            st = tl.where(queries[None, :] >= columns[:, None], st, -float("inf"))
        pt = probabilities(st, lse[None, :], rest[None, :], scale, True)
        do = load_planes(do_src, head, start, BLOCK_M, BLOCK_D)
        dv += matmul(split(pt, do[0].dtype), do)
        dpt = matmul(v, transposed(do))
        delta = tl.load(delta_ptr + queries, mask=in_range, other=0.0)
        dst = pt * (dpt - delta[None, :])
        dk += matmul(split(dst, q[0].dtype), q)
    return dk, dv


@triton.jit
def planes_dkdv_kernel(
    q_src, k_src, v_src, do_src, lse_ptr, rest_ptr, delta_ptr, dk_ptr, dv_ptr,
    stride_dkb, stride_dkh, stride_dkn, stride_dkd, stride_dvb, stride_dvh, stride_dvn, stride_dvd,
    n_heads, n_queries, n_keys, part_keys, span, scale,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """dK and dV, or parts of them. Grid: (key tiles * batch * heads, parts)."""
    # causal: the first keys have the most queries
    tile, batch_head, batch, head = own_tile(tl.program_id(0), n_keys, n_heads, BLOCK_N, False)
    planes = (batch, head * 3)
    lse_ptr += batch_head.to(tl.int64) * n_queries
    rest_ptr += batch_head.to(tl.int64) * n_queries
    delta_ptr += batch_head.to(tl.int64) * n_queries

    first_key = tile * BLOCK_N
    keys = first_key + tl.arange(0, BLOCK_N)
    k = load_planes(k_src, planes, first_key, BLOCK_N, BLOCK_D)
    v = load_planes(v_src, planes, first_key, BLOCK_N, BLOCK_D)
    dk = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    dv = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)

    sources = (q_src, do_src, lse_ptr, rest_ptr, delta_ptr)
    constants: tl.constexpr = (BLOCK_D, BLOCK_M)
    first_query, unmasked, last_query = query_range(
        first_key, n_queries, span, BLOCK_M, BLOCK_N, CAUSAL, SPLIT
    )
    if CAUSAL:
        rows = (first_query, tl.minimum(unmasked, last_query), n_queries)
        dk, dv = add_dkdv_tiles((dk, dv), (k, v), sources, planes, keys, rows, scale, True, constants)
    rows = (unmasked, last_query, n_queries)
    dk, dv = add_dkdv_tiles((dk, dv), (k, v), sources, planes, keys, rows, scale, False, constants)

    dims = tl.arange(0, BLOCK_D)
    inside = (keys[:, None] < n_keys) & (dims[None, :] < D)
    if SPLIT:
        start = tl.program_id(1) * span
        inside = inside & (start < n_queries) & (first_query < start + span)
        dk_ptr += (tl.program_id(1) * part_keys).to(tl.int64) * D
        dv_ptr += (tl.program_id(1) * part_keys).to(tl.int64) * D
    dk_tile = pointers(dk_ptr, batch, head, keys, dims, stride_dkb, stride_dkh, stride_dkn, stride_dkd)
    dv_tile = pointers(dv_ptr, batch, head, keys, dims, stride_dvb, stride_dvh, stride_dvn, stride_dvd)
    tl.store(dk_tile, dk * scale, mask=inside)
    tl.store(dv_tile, dv, mask=inside)
