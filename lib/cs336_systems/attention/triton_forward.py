"""FlashAttention-2's forward pass as one Triton kernel (Dao 2023, algorithm 1). No torch in here.

Notation, as in the paper: Q K^T = S (scores), softmax(S) = P, P V = O, L = logsumexp of each row of S. One
program owns BLOCK_M queries of one head and loops over the keys in tiles of BLOCK_N, keeping for each query a
running maximum m, a running total of exp(s - m) and an unnormalised output.

    s, p [BLOCK_M, BLOCK_N]    acc [BLOCK_M, BLOCK_D]    m, total, lse [BLOCK_M]; the others: triton_common

Exponentials are powers of two, for which the hardware has an instruction. The scale 1/sqrt(d) and log2(e)
fold into one constant, so that exp(scale * s - max) is a single multiply-add and one exp2. In float32 without
lost bits (EXACT) the maximum is not scaled, which would round it: it is one of the scores as they are, and
s - max loses nothing where the weight is large. And what L loses when it is rounded is kept beside it, as
`residual`.

Where there are fewer programs than SMs, several share a tile of queries, each with some of the keys (SPLIT),
and `merge_kernel` merges their O and L, as in Flash-Decoding (Dao et al. 2023).

On Hopper, hopper_forward does the same for 16 bits.
"""

import triton
import triton.language as tl

from cs336_systems.attention.bf16x3 import LOWEST
from cs336_systems.attention.triton_common import (
    LN2,
    dot,
    dot_transposed,
    key_range,
    last_key_of,
    load_logsumexp,
    load_tile,
    mask_scores,
    operand,
    program_tile,
    store_tile,
)


@triton.jit
def softmax_step(s, m, scale_log2, form: tl.constexpr):
    """(P of a tile before its division, the factor for earlier sums, the maximum of m and of the tile).

    m and the maximum are of s if EXACT, else of scale_log2 * s.
    """
    if form.EXACT:
        # Subtracted before it is scaled: nothing is rounded off where s is near the maximum.
        maximum = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2((s - maximum[:, None]) * scale_log2)
        correction = tl.exp2((m - maximum) * scale_log2)
    else:
        # One multiply-add and one exp2 for a score.
        maximum = tl.maximum(m, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - maximum[:, None])
        correction = tl.exp2(m - maximum)
    return p, correction, maximum


@triton.jit
def store_logsumexp(
    lse_ptr, residual_ptr, rows, in_range, m, unit, total, SPLIT: tl.constexpr, form: tl.constexpr
):
    """Store L = unit * m + log(total); if EXACT, the residual too. Returns what to divide O by.

    Where all scores are minus infinity the total is 0, and O is to be 0. L is infinite there, as in
    FlashAttention-2, so that P is 0 in backward; of a split it is minus infinity, and its weight 0.
    """
    empty = total == 0.0
    total = tl.where(empty, 1.0, total)
    log = tl.log2(total) * LN2
    lse = tl.fma(m, unit, log)
    of_empty: tl.constexpr = -float("inf") if SPLIT else float("inf")
    tl.store(lse_ptr + rows, tl.where(empty, of_empty, lse), mask=in_range)
    if form.EXACT:
        # The fma subtracts before it rounds: m * unit, rounded by itself, has lost what is asked for.
        residual = tl.where(empty, 0.0, tl.fma(m, unit, -lse) + log)
        tl.store(residual_ptr + rows, residual, mask=in_range)
    return total


@triton.jit
def attend(
    state,
    q_rows,
    sources,
    head,
    queries,
    keys,
    scale_log2,
    MASKED: tl.constexpr,
    form: tl.constexpr,
):
    """Online softmax over the key tiles in [first_key, last_key). state: (acc, total, m)."""
    BLOCK_N: tl.constexpr = form.BLOCK_N
    acc, total, m = state
    k_src, v_src = sources
    first_key, last_key, n_keys = keys
    # What LLVM would move out of the loop are addresses: of split operands nearly a hundred registers.
    KEEP: tl.constexpr = form.CHUNK > 0 or form.PRECISION == "bf16x3"
    for start in tl.range(first_key, last_key, BLOCK_N, disable_licm=KEEP):
        k = load_tile(k_src, head, start, n_keys, BLOCK_N, form)
        s = dot_transposed(q_rows, (k, k_src, start, n_keys), head, True, form)
        if MASKED:
            s = mask_scores(s, queries, start, n_keys, form)
        p, correction, m = softmax_step(s, m, scale_log2, form)
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None]
        v = load_tile(v_src, head, start, n_keys, BLOCK_N, form)
        acc = dot(operand(p, v, form), v, acc, form)
    return acc, total, m


@triton.jit
def forward_kernel(
    q_src,
    k_src,
    v_src,
    o_ptr,
    lse_ptr,
    residual_ptr,
    o_strides,
    n_heads,
    n_queries,
    n_keys,
    all_queries,
    split_size,
    scale,
    scale_log2,
    form: tl.constexpr,
):
    """O (batch, heads, n_queries, d), L and, if EXACT, its residual (batch * heads, n_queries).

    Grid: (query tiles * batch * heads, splits). With SPLIT a program has split_size keys, and writes into
    (splits, batch, heads, n_queries, d) and (splits, batch * heads, n_queries), for merge_kernel.
    """
    D: tl.constexpr = form.D
    BLOCK_D: tl.constexpr = form.BLOCK_D
    BLOCK_M: tl.constexpr = form.BLOCK_M
    CAUSAL: tl.constexpr = form.CAUSAL
    SPLIT: tl.constexpr = form.SPLIT
    place = program_tile(tl.program_id(0), n_queries, n_heads, BLOCK_M, CAUSAL)
    head = (place[2], place[3], n_heads)

    first_query = place[0] * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    q = load_tile(q_src, head, first_query, n_queries, BLOCK_M, form)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    # Not from minus infinity: see LOWEST.
    m = tl.full([BLOCK_M], LOWEST, tl.float32)

    first, unmasked, last = key_range(first_query, n_keys, split_size, form)
    q_rows = (q, q_src, first_query, n_queries)
    sources = (k_src, v_src)
    state = (acc, total, m)
    keys = (first, unmasked, n_keys)
    state = attend(state, q_rows, sources, head, queries, keys, scale_log2, False, form)
    # The last tiles alone have hidden keys, and pay for a mask.
    if CAUSAL or not form.EVEN_KEYS:
        keys = (unmasked, last, n_keys)
        state = attend(state, q_rows, sources, head, queries, keys, scale_log2, True, form)
    acc, total, m = state

    in_range = queries < n_queries
    if SPLIT:
        # A split without keys writes nothing; `merge_kernel` does not read it.
        in_range = in_range & (first < last)
        lse_ptr += tl.program_id(1) * all_queries
        residual_ptr += tl.program_id(1) * all_queries
        o_ptr += (tl.program_id(1) * all_queries).to(tl.int64) * D
    lse_rows = place[1].to(tl.int64) * n_queries + queries
    # What makes natural logarithms of m: it is of s if EXACT, else of scale_log2 * s, in powers of two.
    unit = scale if form.EXACT else LN2
    total = store_logsumexp(lse_ptr, residual_ptr, lse_rows, in_range, m, unit, total, SPLIT, form)
    store_tile(o_ptr, o_strides, place, queries, in_range, acc / total[:, None], D)


@triton.jit
def merge_kernel(
    split_o_ptr,
    split_lse_ptr,
    split_residual_ptr,
    o_ptr,
    lse_ptr,
    residual_ptr,
    o_strides,
    n_heads,
    n_queries,
    n_keys,
    all_queries,
    split_size,
    ROWS: tl.constexpr,
    form: tl.constexpr,
):
    """Merge the splits' O, L and residual by the online softmax, of which each split is one step.

    BLOCK_M: of the kernel that wrote the splits; a multiple of ROWS. Grid: (tiles of ROWS * batch * heads,).
    """
    D: tl.constexpr = form.D
    BLOCK_D: tl.constexpr = form.BLOCK_D
    place = program_tile(tl.program_id(0), n_queries, n_heads, ROWS, False)
    queries = place[0] * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    in_range = queries < n_queries
    inside = in_range[:, None] & (dims[None, :] < D)
    # The writer's tile with these rows: of the splits from its last key on nothing was written.
    first_query = place[0] * ROWS // form.BLOCK_M * form.BLOCK_M
    last_key = last_key_of(first_query, n_keys, form)
    rows = place[1].to(tl.int64) * n_queries + queries
    lse_tile = split_lse_ptr + rows
    residual_tile = split_residual_ptr + rows
    o_tile = split_o_ptr + rows[:, None] * D + dims[None, :]
    stride = tl.cast(all_queries, tl.int64)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], LOWEST, tl.float32)
    # Stages: two splits are being loaded while one is added, which takes a fraction of their latency.
    for _ in tl.range(0, tl.cdiv(last_key, split_size), num_stages=3):
        lse, residual = load_logsumexp(lse_tile, residual_tile, in_range, form)
        m_new = tl.maximum(m, lse)
        weight = tl.exp(lse - m_new + residual)
        correction = tl.exp(m - m_new)
        acc = acc * correction[:, None] + tl.load(o_tile, mask=inside, other=0.0) * weight[:, None]
        total = total * correction + weight
        m = m_new
        lse_tile += stride
        residual_tile += stride
        o_tile += stride * D
    total = store_logsumexp(lse_ptr, residual_ptr, rows, in_range, m, 1.0, total, False, form)
    store_tile(o_ptr, o_strides, place, queries, in_range, acc / total[:, None], D)
