"""Attention in Triton as notebooks 24 and 25 teach it: contiguous tensors, one tile a program, nothing else.

The same code as those notebooks' solutions, which a test compares, for the notebooks that measure it later.
Strides, TMA, split loops and checked inputs are `flash_triton`'s.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def load_tile(ptr, rows, n_rows, D: tl.constexpr, COLUMNS: tl.constexpr):
    """Some rows of a contiguous (n_rows, D) matrix; zeros beyond its edges."""
    columns = tl.arange(0, COLUMNS)
    places = ptr + rows[:, None] * D + columns
    inside = (rows[:, None] < n_rows) & (columns < D)
    return tl.load(places, mask=inside, other=0.0)


@triton.jit
def store_tile(ptr, block, rows, n_rows, D: tl.constexpr, COLUMNS: tl.constexpr):
    """The same places, written."""
    columns = tl.arange(0, COLUMNS)
    places = ptr + rows[:, None] * D + columns
    inside = (rows[:, None] < n_rows) & (columns < D)
    tl.store(places, block, mask=inside)


@triton.jit
def is_visible(rows, keys, n_keys, CAUSAL: tl.constexpr):
    """Which keys exist, and are seen from which rows."""
    visible = keys < n_keys
    if CAUSAL:
        visible = visible & (rows[:, None] >= keys)
    return visible


@triton.jit
def visit_keys(q, k, v, visible, m, total, acc, scale_log2):
    """The state of the online softmax after one more tile of keys."""
    s = tl.dot(q, k.T, input_precision="ieee") * scale_log2
    s = tl.where(visible, s, -float("inf"))
    m_new = tl.maximum(m, tl.max(s, 1))
    # Where no key was seen yet, -inf - -inf would be NaN.
    base = tl.where(m_new == -float("inf"), 0.0, m_new)
    p = tl.exp2(s - base[:, None])
    correction = tl.exp2(m - base)
    total = correction * total + tl.sum(p, 1)
    values = tl.dot(p.to(v.dtype), v, input_precision="ieee")
    acc = correction[:, None] * acc + values
    return m_new, total, acc


@triton.jit
def attend(
    q,
    k_ptr,
    v_ptr,
    rows,
    n_keys,
    scale_log2,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """O and L of a tile of queries, from all tiles of keys that they see."""
    m = tl.full(rows.shape, -float("inf"), tl.float32)
    total = tl.zeros_like(m)
    acc = tl.zeros(q.shape, tl.float32)
    # Under a causal mask no row of this tile sees a key behind its last row.
    end = min(n_keys, tl.max(rows) + 1) if CAUSAL else n_keys
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_tile(k_ptr, keys, n_keys, D, COLUMNS)
        v = load_tile(v_ptr, keys, n_keys, D, COLUMNS)
        visible = is_visible(rows, keys, n_keys, CAUSAL)
        m, total, acc = visit_keys(q, k, v, visible, m, total, acc, scale_log2)
    # ln 2: from powers of two to a natural logarithm
    lse = (m + tl.log2(total)) * 0.6931471805599453
    return acc / total[:, None], lse


@triton.jit
def forward_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    o_ptr,
    lse_ptr,
    n_queries,
    n_keys,
    scale_log2,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """O and L of one tile of queries of one sequence."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence = tl.program_id(1)
    first_query = sequence * n_queries
    k_ptr += sequence * n_keys * D
    v_ptr += sequence * n_keys * D
    q = load_tile(q_ptr + first_query * D, rows, n_queries, D, COLUMNS)
    o, lse = attend(q, k_ptr, v_ptr, rows, n_keys, scale_log2, D, COLUMNS, KEYS, CAUSAL)
    # A store rounds to the type of what it writes to.
    store_tile(o_ptr + first_query * D, o, rows, n_queries, D, COLUMNS)
    tl.store(lse_ptr + first_query + rows, lse, mask=rows < n_queries)


def launch_forward(q, k, v, is_causal=False, rows=32, keys=32, kernel=forward_kernel, **options):
    """O (..., n_queries, d) and L (..., n_queries) of contiguous q, k, v; options: num_warps, num_stages."""
    n_queries, d = q.shape[-2:]
    n_keys = k.shape[-2]
    o = torch.empty_like(q)
    lse = q.new_empty(q.shape[:-1], dtype=torch.float32)
    scale_log2 = 1.4426950408889634 * d**-0.5
    # A tile is a power of two wide, and a matmul in 16 bits sums up no less than 16.
    columns = max(16, triton.next_power_of_2(d))
    grid = triton.cdiv(n_queries, rows), q.shape[:-2].numel()
    blocks = d, columns, rows, keys, is_causal
    kernel[grid](q, k, v, o, lse, n_queries, n_keys, scale_log2, *blocks, **options)
    return o, lse


def delta(do, o):
    """D = rowsum(dO * O), (..., n_queries), in float32."""
    return (do.float() * o.float()).sum(-1)


@triton.jit
def tile_gradients(q, k, v, do, lse, delta, visible, scale):
    """P and dS of a tile of queries and a tile of keys."""
    s = tl.dot(q, k.T, input_precision="ieee") * scale
    s = tl.where(visible, s - lse[:, None], -float("inf"))
    # log2(e): from natural logarithms to powers of two
    p = tl.exp2(s * 1.4426950408889634)
    dp = tl.dot(do, v.T, input_precision="ieee")
    ds = p * (dp - delta[:, None])
    return p, ds


@triton.jit
def load_queries(
    q_ptr, do_ptr, lse_ptr, delta_ptr, rows, n_queries, D: tl.constexpr, COLUMNS: tl.constexpr
):
    """q, dO, L and D of some queries of one sequence."""
    q = load_tile(q_ptr, rows, n_queries, D, COLUMNS)
    do = load_tile(do_ptr, rows, n_queries, D, COLUMNS)
    # P = e^(S - L) of a row that is not there is 0.
    lse = tl.load(lse_ptr + rows, mask=rows < n_queries, other=float("inf"))
    delta = tl.load(delta_ptr + rows, mask=rows < n_queries, other=0.0)
    return q, do, lse, delta


@triton.jit
def sum_over_keys(
    q,
    do,
    lse,
    delta,
    k_ptr,
    v_ptr,
    rows,
    n_keys,
    scale,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """dQ of a tile of queries, from all tiles of keys that they see."""
    dq = tl.zeros(q.shape, tl.float32)
    # Under a causal mask no row of this tile sees a key behind its last row.
    end = min(n_keys, tl.max(rows) + 1) if CAUSAL else n_keys
    for start in range(0, end, KEYS):
        keys = start + tl.arange(0, KEYS)
        k = load_tile(k_ptr, keys, n_keys, D, COLUMNS)
        v = load_tile(v_ptr, keys, n_keys, D, COLUMNS)
        visible = is_visible(rows, keys, n_keys, CAUSAL)
        _, ds = tile_gradients(q, k, v, do, lse, delta, visible, scale)
        dq += tl.dot(ds.to(k.dtype), k, input_precision="ieee")
    return dq * scale


@triton.jit
def dq_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dq_ptr,
    n_queries,
    n_keys,
    scale,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """dQ of one tile of queries of one sequence."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    sequence = tl.program_id(1)
    first = sequence * n_queries
    q, do, lse, delta = load_queries(
        q_ptr + first * D,
        do_ptr + first * D,
        lse_ptr + first,
        delta_ptr + first,
        rows,
        n_queries,
        D,
        COLUMNS,
    )
    k_ptr += sequence * n_keys * D
    v_ptr += sequence * n_keys * D
    dq = sum_over_keys(
        q, do, lse, delta, k_ptr, v_ptr, rows, n_keys, scale, D, COLUMNS, KEYS, CAUSAL
    )
    # A store rounds to the type of what it writes to.
    store_tile(dq_ptr + first * D, dq, rows, n_queries, D, COLUMNS)


@triton.jit
def sum_over_queries(
    k,
    v,
    q_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    keys,
    n_queries,
    n_keys,
    scale,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """dK and dV of a tile of keys, from all tiles of queries that see them."""
    dk = tl.zeros(k.shape, tl.float32)
    dv = tl.zeros_like(dk)
    # Under a causal mask the rows before the tile's first key see none of its keys.
    begin = tl.min(keys) if CAUSAL else 0
    for start in range(begin, n_queries, ROWS):
        rows = start + tl.arange(0, ROWS)
        q, do, lse, delta = load_queries(
            q_ptr, do_ptr, lse_ptr, delta_ptr, rows, n_queries, D, COLUMNS
        )
        p, ds = tile_gradients(
            q, k, v, do, lse, delta, is_visible(rows, keys, n_keys, CAUSAL), scale
        )
        dv += tl.dot(p.to(do.dtype).T, do, input_precision="ieee")
        dk += tl.dot(ds.to(q.dtype).T, q, input_precision="ieee")
    return dk * scale, dv


@triton.jit
def dkdv_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    lse_ptr,
    delta_ptr,
    dk_ptr,
    dv_ptr,
    n_queries,
    n_keys,
    scale,
    D: tl.constexpr,
    COLUMNS: tl.constexpr,
    ROWS: tl.constexpr,
    KEYS: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """dK and dV of one tile of keys of one sequence."""
    keys = tl.program_id(0) * KEYS + tl.arange(0, KEYS)
    sequence = tl.program_id(1)
    first_query = sequence * n_queries
    first_key = sequence * n_keys * D
    k = load_tile(k_ptr + first_key, keys, n_keys, D, COLUMNS)
    v = load_tile(v_ptr + first_key, keys, n_keys, D, COLUMNS)
    dk, dv = sum_over_queries(
        k,
        v,
        q_ptr + first_query * D,
        do_ptr + first_query * D,
        lse_ptr + first_query,
        delta_ptr + first_query,
        keys,
        n_queries,
        n_keys,
        scale,
        D,
        COLUMNS,
        ROWS,
        CAUSAL,
    )
    store_tile(dk_ptr + first_key, dk, keys, n_keys, D, COLUMNS)
    store_tile(dv_ptr + first_key, dv, keys, n_keys, D, COLUMNS)


def launch_backward(kernel, do, q, k, v, o, lse, is_causal, outputs, tile=(32, 32), **options):
    """A program for each tile of queries if the kernel is dq_kernel, else of keys; options: num_warps, ..."""
    q, k, v, do, o, lse = (x.contiguous() for x in (q, k, v, do, o, lse))
    n_queries, d = q.shape[-2:]
    n_keys = k.shape[-2]
    rows, keys = tile
    tiles = triton.cdiv(n_queries, rows) if kernel is dq_kernel else triton.cdiv(n_keys, keys)
    grid = tiles, q.shape[:-2].numel()
    blocks = d, max(16, triton.next_power_of_2(d)), rows, keys, is_causal
    inputs = q, k, v, do, lse, delta(do, o)
    kernel[grid](*inputs, *outputs, n_queries, n_keys, d**-0.5, *blocks, **options)
    return outputs
