"""What the Triton kernels of both passes share: loads, matmuls by precision, ranges. No torch in here.

    q, o [BLOCK_M, BLOCK_D]    k, v [BLOCK_N, BLOCK_D]    BLOCK_D: the head size D, up to a power of two

Q, K, V (batch, heads, n, d) come as tensor descriptors where the GPU has TMA (Hopper and newer), which loads
whole tiles, and as pointers to contiguous tensors elsewhere. What lies outside reads as zero either way.

PRECISION says how float32 is multiplied: "tf32", or so that no bits are lost (EXACT): "bf16x6" and "tf32x3"
are Triton's own, which split operands in registers at every use; with "bf16x3" the operands come from memory
as three bfloat16 matrices each (see bf16x3). CHUNK is for Triton's own: scores sum over the whole head size,
and their operands would take more registers than there are, so they are loaded and multiplied CHUNK
dimensions at a time. (Once more in every round of the loop; from L1 or L2, it costs less than spills.)

Tuples that functions pass on:

    head       (batch, head, n_heads)
    q_rows     (tile, source, its first row, n_rows): a tile of a tensor, and what it was loaded from; so are
               k_rows, v_rows, do_rows, and here a_rows and b_rows
    keys       (first_key, last_key, n_keys): the keys that a loop takes, last_key not included
    rows       (first_query, last_query, n_queries): likewise of queries
    place      (tile, batch * n_heads + head, batch, head): what a program owns, of `program_tile`
    strides    of a (batch, heads, n, d) tensor

`queries` is a vector, the numbers of a tile's rows; so are `keys` and `rows` in functions that do not unpack
them.
"""

from typing import NamedTuple

import triton
import triton.language as tl

from cs336_systems.attention.bf16x3 import product, split_bf16

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


class Form(NamedTuple):
    """What a kernel is compiled for, besides dtypes.

    In a kernel its fields are Python's values. Where a constexpr is asked for, as by jitted functions, a name
    is declared as one: `D: tl.constexpr = form.D`.
    """

    D: int  # the head size
    BLOCK_D: int  # up to a power of two
    BLOCK_M: int  # queries of a tile
    BLOCK_N: int  # keys of a tile
    USE_TMA: bool  # sources are descriptors, else pointers
    PRECISION: str  # of matmuls
    EXACT: bool  # PRECISION is not "tf32", which 16 bits have, too
    CHUNK: int  # dimensions at a time; 0: all
    CAUSAL: bool
    EVEN_QUERIES: bool  # BLOCK_M divides n_queries
    EVEN_KEYS: bool  # BLOCK_N divides n_keys
    SPLIT: bool  # a program takes split_size rows of its loop, by program_id(1)


@triton.jit
def load_tile(source, head, first_row, n_rows, BLOCK: tl.constexpr, form: tl.constexpr):
    """Rows [first_row, first_row + BLOCK) of one head as [BLOCK, BLOCK_D], zero outside its (n_rows, D).

    If PRECISION is "bf16x3", a tuple of the three matrices of which they are the sum.
    """
    D: tl.constexpr = form.D
    BLOCK_D: tl.constexpr = form.BLOCK_D
    if form.PRECISION == "bf16x3":
        # A head's three matrices stand one after the other, as if they were heads.
        part = head[1] * 3
        x0 = source.load([head[0], part, first_row, 0]).reshape([BLOCK, BLOCK_D])
        x1 = source.load([head[0], part + 1, first_row, 0]).reshape([BLOCK, BLOCK_D])
        x2 = source.load([head[0], part + 2, first_row, 0]).reshape([BLOCK, BLOCK_D])
        tile = (x0, x1, x2)
    elif form.USE_TMA:
        tile = source.load([head[0], head[1], first_row, 0]).reshape([BLOCK, BLOCK_D])
    else:
        tile = load_by_pointers(source, head, first_row, n_rows, 0, D, BLOCK, BLOCK_D)
    return tile


@triton.jit
def load_by_pointers(
    source,
    head,
    first_row,
    n_rows,
    first_dim,
    D: tl.constexpr,
    BLOCK: tl.constexpr,
    WIDTH: tl.constexpr,
):
    """[BLOCK, WIDTH] of one head of a contiguous tensor, from first_row and first_dim on."""
    batch, head_index, n_heads = head
    rows = first_row + tl.arange(0, BLOCK)
    dims = first_dim + tl.arange(0, WIDTH)
    # Only heads may lie more than 2^31 numbers apart: inside of one, 32 bits do, at half the registers.
    head_start = source + (batch * n_heads + head_index).to(tl.int64) * n_rows * D
    inside = (rows[:, None] < n_rows) & (dims[None, :] < D)
    return tl.load(head_start + rows[:, None] * D + dims[None, :], mask=inside, other=0.0)


@triton.jit
def dot(a, b, acc, form: tl.constexpr):
    """acc + A B; acc may be None.

    Products of split operands are added outside of the matmul, which cuts bits off where an addition rounds.
    """
    if form.PRECISION == "bf16x3":
        result = product(a, b, False) if acc is None else acc + product(a, b, False)
    else:
        result = tl.dot(a, b, acc, input_precision=form.PRECISION)
    return result


@triton.jit
def dot_transposed(a_rows, b_rows, head, SCORES: tl.constexpr, form: tl.constexpr):
    """A B^T, of a_rows and b_rows.

    SCORES: infinite ones keep their sign, in bf16x3 and, without CHUNK, in bf16x6: -inf weighs nothing.
    """
    D: tl.constexpr = form.D
    BLOCK_D: tl.constexpr = form.BLOCK_D
    PRECISION: tl.constexpr = form.PRECISION
    CHUNK: tl.constexpr = form.CHUNK
    a, a_src, first_a, n_a = a_rows
    b, b_src, first_b, n_b = b_rows
    if CHUNK:
        result = tl.zeros([a.shape[0], b.shape[0]], tl.float32)
        for first_dim in tl.static_range(0, BLOCK_D, CHUNK):
            a_part = load_by_pointers(a_src, head, first_a, n_a, first_dim, D, a.shape[0], CHUNK)
            b_part = load_by_pointers(b_src, head, first_b, n_b, first_dim, D, b.shape[0], CHUNK)
            result = tl.dot(a_part, b_part.T, result, input_precision=PRECISION)
    elif PRECISION == "bf16x3":
        result = product(a, (b[0].T, b[1].T, b[2].T), SCORES)
    elif SCORES and PRECISION == "bf16x6":
        # Triton's own has no clamp: there +inf of small products hides a -inf.
        result = product(split_bf16(a), split_bf16(b.T), True)
    else:
        result = tl.dot(a, b.T, input_precision=PRECISION)
    return result


@triton.jit
def operand(x, like, form: tl.constexpr):
    """What was computed in float32, to be multiplied by a tile that was loaded like this one."""
    return split_bf16(x) if form.PRECISION == "bf16x3" else x.to(like.dtype)


@triton.jit
def mask_scores(s, queries, first_key, n_keys, form: tl.constexpr):
    """Scores with the keys from first_key on; minus infinity where a query does not see them."""
    columns = first_key + tl.arange(0, form.BLOCK_N)
    visible = columns[None, :] < n_keys
    if form.CAUSAL:
        visible = visible & (queries[:, None] >= columns[None, :])
    return tl.where(visible, s, -float("inf"))


@triton.jit
def program_tile(program, n_rows, n_heads, BLOCK: tl.constexpr, LAST_FIRST: tl.constexpr):
    """`place`, (tile, batch * n_heads + head, batch, head): the tile of BLOCK rows that a program owns."""
    # Programs begin in their order: those of one head together, whose keys and values L2 then has.
    tiles = tl.cdiv(n_rows, BLOCK)
    tile = program % tiles
    if LAST_FIRST:
        # Of causal queries the last see the most keys, and the short rows fill the gaps at the end.
        tile = tiles - 1 - tile
    batch_head = program // tiles
    return tile, batch_head, batch_head // n_heads, batch_head % n_heads


@triton.jit
def last_key_of(first_query, n_keys, form: tl.constexpr):
    """No query of the tile from first_query on sees the keys from this one on."""
    last_key = n_keys
    if form.CAUSAL:
        last_key = tl.minimum(n_keys, first_query + form.BLOCK_M)
    return last_key


@triton.jit
def key_range(first_query, n_keys, split_size, form: tl.constexpr):
    """(first_key, unmasked, last_key): this program's keys; all of its queries see those before `unmasked`.

    Only the tiles of keys between the last two pay for a mask. Causal, BLOCK_M 64, BLOCK_N 32, queries 64 to
    127, 200 keys:

        not split           (0, 64, 128)
        split_size 64       (0, 64, 64), (64, 64, 128); two without keys: (128, 128, 128), (192, 192, 128)
    """
    first_key = 0
    unmasked = n_keys // form.BLOCK_N * form.BLOCK_N
    last_key = last_key_of(first_query, n_keys, form)
    if form.CAUSAL:
        # The diagonal begins in the tile with the first query.
        unmasked = tl.minimum(unmasked, first_query // form.BLOCK_N * form.BLOCK_N)
    if form.SPLIT:
        first_key = tl.program_id(1) * split_size
        last_key = tl.minimum(last_key, first_key + split_size)
        unmasked = tl.maximum(tl.minimum(unmasked, last_key), first_key)
    return first_key, unmasked, last_key


@triton.jit
def query_range(first_key, n_queries, split_size, form: tl.constexpr):
    """(first_query, unmasked, last_query): this program's queries; those from `unmasked` on see all its keys.

    Causal, BLOCK_M 32, BLOCK_N 64, keys 64 to 127, 200 queries:

        not split           (64, 128, 200)
        split_size 128      (64, 128, 128), (128, 128, 200)
    """
    first_query = 0
    unmasked = 0
    last_query = n_queries
    BLOCK_M: tl.constexpr = form.BLOCK_M
    if form.CAUSAL:
        first_query = first_key // BLOCK_M * BLOCK_M
        # The first tile that begins at the last of these keys or behind it.
        unmasked = tl.cdiv(first_key + form.BLOCK_N - 1, BLOCK_M) * BLOCK_M
    if form.SPLIT:
        start = tl.program_id(1) * split_size
        first_query = tl.maximum(first_query, start)
        unmasked = tl.maximum(unmasked, start)
        last_query = tl.minimum(last_query, start + split_size)
    return first_query, unmasked, last_query


@triton.jit
def pointers(ptr, strides, place, rows, dims):
    """Pointers to a (rows, dims) tile of a (batch, heads, n, d) tensor of any strides."""
    # In 64 bits, rows too: strides are any, and 32 bits overflow where heads lie between a head's rows.
    base = ptr + place[2].to(tl.int64) * strides[0] + place[3].to(tl.int64) * strides[1]
    return base + rows[:, None].to(tl.int64) * strides[2] + dims[None, :] * strides[3]


@triton.jit
def store_tile(ptr, strides, place, rows, in_range, tile, D: tl.constexpr):
    """Store those rows of a tile that are in_range, in the dtype of the tensor."""
    tile = tile.to(ptr.dtype.element_ty)
    dims = tl.arange(0, tile.shape[1])
    inside = in_range[:, None] & (dims[None, :] < D)
    tl.store(pointers(ptr, strides, place, rows, dims), tile, mask=inside)


@triton.jit
def load_logsumexp(lse_ptr, residual_ptr, in_range, form: tl.constexpr):
    """(L, residual), the residual being zero if not EXACT."""
    lse = tl.load(lse_ptr, mask=in_range, other=0.0)
    residual = tl.zeros_like(lse)
    if form.EXACT:
        residual = tl.load(residual_ptr, mask=in_range, other=0.0)
    return lse, residual
