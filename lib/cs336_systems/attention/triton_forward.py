"""FlashAttention-2's forward pass as one Triton kernel (Dao 2023, algorithm 1). No torch in here.

Notation, as in the paper: Q K^T = S (scores), softmax(S) = P, P V = O, L = logsumexp of each row of S. One
program owns BLOCK_M queries of one head and walks over the keys in tiles of BLOCK_N, keeping for each query a
running maximum m, a running total of exp(s - m) and an unnormalised output.

    q [BLOCK_M, BLOCK_D]    k, v [BLOCK_N, BLOCK_D]    s, p [BLOCK_M, BLOCK_N]
    acc [BLOCK_M, BLOCK_D]  m, total, lse [BLOCK_M]    BLOCK_D: D, rounded up to a power of two

Exponentials are powers of two, for which the hardware has an instruction. The scale 1/sqrt(d) and log2(e)
fold into one constant, so that exp(scale * s - max) is a single multiply-add and one exp2. In float32 with
all its bits (EXACT) a maximum of 100 is not multiplied and rounded: it is one of the scores as they are, and
s - max loses nothing where the weight is large. Nor do the bits of L get lost that do not fit into a float32:
they are kept beside it, as `rest`. (PyTorch keeps P, whose large weights large scores leave exact.)

Q, K and V (batch, heads, n, d) come as tensor descriptors where the GPU has TMA (Hopper and newer), which
then loads whole tiles, and as pointers to contiguous tensors elsewhere. What lies outside reads as zero
either way. (On Hopper, hopper_forward does the same for 16 bits, float32_planes for long float32 sequences.)

Where there are fewer programs than SMs, several share a tile of queries, each with a part of the keys
(SPLIT), and `merge_kernel` puts their parts of O and L together, as in Flash-Decoding (Dao et al. 2023).

CHUNK is for float32 without TF32 ("ieee"), where Triton splits each operand of a matmul in registers, into
two or three parts. Scores sum over the whole head size, and their operands would take more registers than
there are: with CHUNK those are loaded and multiplied so many dimensions at a time. (Once more, that is, in
every round of the loop. From L1 or L2, it costs less than registers that have run out.)

What functions pass on together is a tuple:

    head       (batch, head, n_heads)
    constants  (D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK)
"""

import triton
import triton.language as tl

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def load_tile(
    source, head, first_row, n_rows,
    D: tl.constexpr, BLOCK: tl.constexpr, BLOCK_D: tl.constexpr, USE_TMA: tl.constexpr,
):  # fmt: skip
    """Rows [first_row, first_row + BLOCK) of one head as [BLOCK, BLOCK_D], zero outside its (n_rows, D)."""
    if USE_TMA:
        tile = source.load([head[0], head[1], first_row, 0]).reshape([BLOCK, BLOCK_D])
    else:
        tile = load_by_pointers(source, head, first_row, n_rows, 0, D, BLOCK, BLOCK_D)
    return tile


@triton.jit
def load_by_pointers(
    source, head, first_row, n_rows, first_dim, D: tl.constexpr, BLOCK: tl.constexpr, WIDTH: tl.constexpr
):
    batch, head, n_heads = head
    rows = first_row + tl.arange(0, BLOCK)
    dims = first_dim + tl.arange(0, WIDTH)
    head_start = source + (batch * n_heads + head).to(tl.int64) * n_rows * D
    inside = (rows[:, None] < n_rows) & (dims[None, :] < D)
    return tl.load(head_start + rows[:, None] * D + dims[None, :], mask=inside, other=0.0)


@triton.jit
def matmul_in_chunks(
    a, b, head, D: tl.constexpr, BLOCK_A: tl.constexpr, BLOCK_B: tl.constexpr, BLOCK_D: tl.constexpr,
    CHUNK: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """A B^T [BLOCK_A, BLOCK_B], of two tiles of rows, each (source, its first row, n_rows)."""
    a_src, first_a, n_a = a
    b_src, first_b, n_b = b
    product = tl.zeros([BLOCK_A, BLOCK_B], tl.float32)
    for first_dim in tl.static_range(0, BLOCK_D, CHUNK):
        a_part = load_by_pointers(a_src, head, first_a, n_a, first_dim, D, BLOCK_A, CHUNK)
        b_part = load_by_pointers(b_src, head, first_b, n_b, first_dim, D, BLOCK_B, CHUNK)
        product = tl.dot(a_part, b_part.T, product, input_precision=PRECISION)
    return product


@triton.jit
def own_tile(program, n_rows, n_heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """(tile, batch * n_heads + head, batch, head) of this program.

    LAST_FIRST: of causal queries the last see the most keys, and the short rows fill the gaps at the end.
    """
    tiles = tl.cdiv(n_rows, BLOCK)
    tile = program % tiles
    if LAST_FIRST:
        tile = tiles - 1 - tile
    batch_head = program // tiles
    return tile, batch_head, batch_head // n_heads, batch_head % n_heads


@triton.jit
def key_range(
    first_query, n_keys, span, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, CAUSAL: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """(first_key, unmasked, last_key): all queries of the tile see the keys of this program from first_key to
    unmasked, none sees those from last_key on.

    Only the tiles of keys between the last two pay for a mask. If the keys are split, a program has at most
    `span` of them, or none at all: then first_key is not below last_key.
    """
    first_key = 0
    unmasked = n_keys // BLOCK_N * BLOCK_N
    last_key = n_keys
    if CAUSAL:
        unmasked = tl.minimum(unmasked, first_query // BLOCK_N * BLOCK_N)
        last_key = tl.minimum(n_keys, first_query + BLOCK_M)
    if SPLIT:
        first_key = tl.program_id(1) * span
        last_key = tl.minimum(last_key, first_key + span)
        unmasked = tl.maximum(tl.minimum(unmasked, last_key), first_key)
    return first_key, unmasked, last_key


@triton.jit
def pointers(ptr, batch, head, rows, dims, stride_b, stride_h, stride_n, stride_d):
    """Of a (rows, dims) tile of a (batch, heads, n, d) tensor of any strides."""
    base = ptr + batch.to(tl.int64) * stride_b + head.to(tl.int64) * stride_h
    return base + rows[:, None].to(tl.int64) * stride_n + dims[None, :] * stride_d


@triton.jit
def softmax_step(s, m, scale_log2, EXACT: tl.constexpr):
    """(exp(scale * s - max), by what earlier sums shrink, max): the maximum grows from m to that of s too.

    The maximum is of s if EXACT, else of scale_log2 * s.
    """
    if EXACT:
        maximum = tl.maximum(m, tl.max(s, 1))
        p = tl.exp2((s - maximum[:, None]) * scale_log2)
        correction = tl.exp2((m - maximum) * scale_log2)
    else:
        maximum = tl.maximum(m, tl.max(s, 1) * scale_log2)
        p = tl.exp2(s * scale_log2 - maximum[:, None])
        correction = tl.exp2(m - maximum)
    return p, correction, maximum


@triton.jit
def store_logsumexp(lse_ptr, rest_ptr, rows, in_range, m, unit, total, EXACT: tl.constexpr):
    """L = unit * m + log(total); if EXACT, rest too."""
    log = tl.log2(total) * LN2
    lse = tl.fma(m, unit, log)
    tl.store(lse_ptr + rows, lse, mask=in_range)
    if EXACT:
        tl.store(rest_ptr + rows, tl.fma(m, unit, -lse) + log, mask=in_range)


@triton.jit
def load_logsumexp(lse_ptr, rest_ptr, in_range, EXACT: tl.constexpr):
    """(L, rest), rest being zero if not EXACT."""
    lse = tl.load(lse_ptr, mask=in_range, other=0.0)
    rest = tl.load(rest_ptr, mask=in_range, other=0.0) if EXACT else tl.zeros_like(lse)
    return lse, rest


@triton.jit
def attend(
    state, q, sources, head, rows, keys, scale_log2, MASKED: tl.constexpr, CAUSAL: tl.constexpr,
    constants: tl.constexpr,
):  # fmt: skip
    """Online softmax over the key tiles in [first_key, last_key). state: (acc, total, m)."""
    D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK = constants
    acc, total, m = state
    q_src, k_src, v_src = sources
    first_query, n_queries, queries = rows
    first_key, last_key, n_keys = keys
    for start in tl.range(first_key, last_key, BLOCK_N, disable_licm=CHUNK > 0):
        k = load_tile(k_src, head, start, n_keys, D, BLOCK_N, BLOCK_D, USE_TMA)
        if CHUNK:
            q_rows, k_rows = (q_src, first_query, n_queries), (k_src, start, n_keys)
            s = matmul_in_chunks(q_rows, k_rows, head, D, BLOCK_M, BLOCK_N, BLOCK_D, CHUNK, PRECISION)
        else:
            s = tl.dot(q, k.T, input_precision=PRECISION)
        if MASKED:
            columns = start + tl.arange(0, BLOCK_N)
            visible = columns[None, :] < n_keys
            if CAUSAL:
                visible = visible & (queries[:, None] >= columns[None, :])
            s = tl.where(visible, s, -float("inf"))
        p, correction, m = softmax_step(s, m, scale_log2, PRECISION != "tf32")
        total = total * correction + tl.sum(p, 1)
        acc = acc * correction[:, None]
        v = load_tile(v_src, head, start, n_keys, D, BLOCK_N, BLOCK_D, USE_TMA)
        acc = tl.dot(p.to(v.dtype), v, acc, input_precision=PRECISION)
    return acc, total, m


@triton.jit
def forward_kernel(
    q_src, k_src, v_src, o_ptr, lse_ptr, rest_ptr, stride_ob, stride_oh, stride_on, stride_od,
    n_heads, n_queries, n_keys, part_queries, span, scale, scale_log2,
    CAUSAL: tl.constexpr, EVEN_KEYS: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
    CHUNK: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """O (batch, heads, n_queries, d), L and, if EXACT, rest (batch * heads, n_queries).

    Grid: (query tiles * batch * heads, parts). With SPLIT a program has `span` keys, and what it writes is
    its part of (parts, batch, heads, n_queries, d) and (parts, batch * heads, n_queries), for merge_kernel.
    """
    tile, batch_head, batch, head = own_tile(tl.program_id(0), n_queries, n_heads, BLOCK_M, CAUSAL)
    head_index = (batch, head, n_heads)

    first_query = tile * BLOCK_M
    queries = first_query + tl.arange(0, BLOCK_M)
    q = load_tile(q_src, head_index, first_query, n_queries, D, BLOCK_M, BLOCK_D, USE_TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    m = tl.full([BLOCK_M], -float("inf"), tl.float32)

    first_key, unmasked, last_key = key_range(first_query, n_keys, span, BLOCK_M, BLOCK_N, CAUSAL, SPLIT)
    sources = (q_src, k_src, v_src)
    rows = (first_query, n_queries, queries)
    constants: tl.constexpr = (D, BLOCK_D, BLOCK_M, BLOCK_N, USE_TMA, PRECISION, CHUNK)
    acc, total, m = attend(
        (acc, total, m), q, sources, head_index, rows, (first_key, unmasked, n_keys), scale_log2, False,
        CAUSAL, constants,
    )  # fmt: skip
    if CAUSAL or not EVEN_KEYS:
        acc, total, m = attend(
            (acc, total, m), q, sources, head_index, rows, (unmasked, last_key, n_keys), scale_log2, True,
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
    EXACT: tl.constexpr = PRECISION != "tf32"
    unit = scale if EXACT else LN2
    store_logsumexp(lse_ptr, rest_ptr, lse_rows, in_range, m, unit, total, EXACT)
    o = (acc / total[:, None]).to(o_ptr.dtype.element_ty)
    dims = tl.arange(0, BLOCK_D)
    o_tile = o_ptr + batch.to(tl.int64) * stride_ob + head.to(tl.int64) * stride_oh
    o_tile += queries[:, None].to(tl.int64) * stride_on + dims[None, :] * stride_od
    tl.store(o_tile, o, mask=in_range[:, None] & (dims[None, :] < D))


@triton.jit
def merge_kernel(
    o_parts_ptr, lse_parts_ptr, rest_parts_ptr, o_ptr, lse_ptr, rest_ptr,
    stride_ob, stride_oh, stride_on, stride_od, n_heads, n_queries, n_keys, part_queries, span,
    CAUSAL: tl.constexpr, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """O, L and rest of the parts of them: by the online softmax, of which each part is one step.

    BLOCK_M: of the kernel that wrote the parts; a multiple of ROWS. Grid: (tiles of ROWS * batch * heads,).
    Stages: the loads of two parts are under way while one is added, which takes a fraction of their latency.
    """
    tile, batch_head, batch, head = own_tile(tl.program_id(0), n_queries, n_heads, ROWS, False)
    queries = tile * ROWS + tl.arange(0, ROWS)
    dims = tl.arange(0, BLOCK_D)
    in_range = queries < n_queries
    inside = in_range[:, None] & (dims[None, :] < D)
    _, _, last_key = key_range(tile * ROWS // BLOCK_M * BLOCK_M, n_keys, span, BLOCK_M, 1, CAUSAL, False)
    rows = batch_head.to(tl.int64) * n_queries + queries
    EXACT: tl.constexpr = PRECISION != "tf32"
    lse_part, rest_part = lse_parts_ptr + rows, rest_parts_ptr + rows
    o_part = o_parts_ptr + rows[:, None] * D + dims[None, :]
    part_size = tl.cast(part_queries, tl.int64)
    acc = tl.zeros([ROWS, BLOCK_D], tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    m = tl.full([ROWS], -float("inf"), tl.float32)
    for _ in tl.range(0, tl.cdiv(last_key, span), num_stages=3):
        lse, rest = load_logsumexp(lse_part, rest_part, in_range, EXACT)
        m_new = tl.maximum(m, lse)
        weight = tl.exp(lse - m_new + rest)
        correction = tl.exp(m - m_new)
        acc = acc * correction[:, None] + tl.load(o_part, mask=inside, other=0.0) * weight[:, None]
        total = total * correction + weight
        m = m_new
        lse_part += part_size
        rest_part += part_size
        o_part += part_size * D
    store_logsumexp(lse_ptr, rest_ptr, rows, in_range, m, 1.0, total, EXACT)
    o_tile = pointers(o_ptr, batch, head, queries, dims, stride_ob, stride_oh, stride_on, stride_od)
    tl.store(o_tile, (acc / total[:, None]).to(o_ptr.dtype.element_ty), mask=inside)
