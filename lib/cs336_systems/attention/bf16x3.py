"""float32 without lost bits on Hopper's matmuls of bfloat16. No torch in here.

A float32 number is the sum of three of bfloat16, x = x0 + x1 + x2, with 8 bits each. So a float32 matrix is
the sum of three, and of the nine products of two such sums those six count that are not below the last bit.
Triton's own "bf16x6" splits in registers, again for every tile that is loaded, and what comes out of
registers keeps it from Hopper's fast matmuls. Here `split_kernel` splits Q, K, V and dO once, in memory
(batch, heads * 3, n, d), the kernels load the three by TMA, and only P and dS, which are made in registers,
are split there. In a kernel, a split matrix is a tuple of three.
"""

import triton
import triton.language as tl

# Of float32's numbers. A running maximum begins there: from minus infinity, a tile whose scores are all minus
# infinity would make exp(-inf - -inf), NaN; this way it makes exp(-inf), at no cost.
LOWEST = tl.constexpr(-3.4028234663852886e38)


@triton.jit
def split_bf16(x):
    """A float32 tile as the sum of three of bfloat16.

    Of an infinite number x1 and x2 are NaN. Of the few numbers below 2^128 that bfloat16 rounds up to
    infinity x1 is minus infinity, and x2 NaN; likewise of their negatives.
    """
    x0 = x.to(tl.bfloat16)
    rest = x - x0.to(tl.float32)
    x1 = rest.to(tl.bfloat16)
    x2 = (rest - x1.to(tl.float32)).to(tl.bfloat16)
    return x0, x1, x2


@triton.jit
def product(a, b, CLAMP: tl.constexpr):
    """A B, from small products to large: matmuls cut off what does not fit into the sum so far.

    CLAMP: the sum of the small ones stays finite, so that of an infinite result the large one tells the sign.
    """
    small = tl.dot(a[1], b[1])
    small = tl.dot(a[2], b[0], small)
    small = tl.dot(a[0], b[2], small)
    small = tl.dot(a[1], b[0], small)
    small = tl.dot(a[0], b[1], small)
    if CLAMP:
        # One instruction on Hopper; of NaN either bound.
        small = tl.clamp(small, LOWEST, -LOWEST)
    return tl.dot(a[0], b[0], small)


@triton.jit
def split_kernel(
    q_ptr,
    k_ptr,
    v_ptr,
    do_ptr,
    q_split_ptr,
    k_split_ptr,
    v_split_ptr,
    do_split_ptr,
    q_strides,
    k_strides,
    v_strides,
    do_strides,
    n_heads,
    n_queries,
    n_keys,
    all_queries,
    all_keys,
    ROW: tl.constexpr,
    form: tl.constexpr,
):
    """Split the numbers of q, k, v and, where the grid has programs for it, do; into rows of ROW numbers.

    Grid: (row tiles * batch * heads of all of them,).
    """
    # batch * heads is all_queries // n_queries; each tensor's programs come after those of the one before.
    BLOCK_M: tl.constexpr = form.BLOCK_M
    query_programs = tl.cdiv(n_queries, BLOCK_M) * (all_queries // n_queries)
    key_programs = tl.cdiv(n_keys, BLOCK_M) * (all_keys // n_keys)
    program = tl.program_id(0)
    if program < query_programs:
        _split_tile(q_ptr, q_strides, q_split_ptr, program, n_queries, n_heads, ROW, form)
    elif program < query_programs + key_programs:
        program -= query_programs
        _split_tile(k_ptr, k_strides, k_split_ptr, program, n_keys, n_heads, ROW, form)
    elif program < query_programs + 2 * key_programs:
        program = program - query_programs - key_programs
        _split_tile(v_ptr, v_strides, v_split_ptr, program, n_keys, n_heads, ROW, form)
    else:
        program -= query_programs + 2 * key_programs
        _split_tile(do_ptr, do_strides, do_split_ptr, program, n_queries, n_heads, ROW, form)


@triton.jit
def _split_tile(
    x_ptr,
    strides,
    split_ptr,
    program,
    n_rows,
    n_heads,
    ROW: tl.constexpr,
    form: tl.constexpr,
):
    """Split one tile of rows of x; program counts among those of x."""
    BLOCK_M: tl.constexpr = form.BLOCK_M
    tiles = tl.cdiv(n_rows, BLOCK_M)
    batch_head = (program // tiles).to(tl.int64)
    rows = program % tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    dims = tl.arange(0, form.BLOCK_D)
    inside = (rows[:, None] < n_rows) & (dims[None, :] < form.D)
    x_tile = x_ptr + batch_head // n_heads * strides[0] + batch_head % n_heads * strides[1]
    x_tile += rows[:, None].to(tl.int64) * strides[2] + dims[None, :] * strides[3]
    x0, x1, x2 = split_bf16(tl.load(x_tile, mask=inside, other=0.0))
    # The three matrices of a head stand one after the other, for TMA as three heads.
    part_size = tl.cast(n_rows, tl.int64) * ROW
    part = split_ptr + batch_head * 3 * part_size + rows[:, None] * ROW + dims[None, :]
    tl.store(part, x0, mask=inside)
    tl.store(part + part_size, x1, mask=inside)
    tl.store(part + 2 * part_size, x2, mask=inside)
