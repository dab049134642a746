"""Rotary embedding (Su et al. 2021) in Triton: backward is the forward of the opposite angle.

    y[2k] = x[2k] cos - x[2k+1] sin     y[2k+1] = x[2k] sin + x[2k+1] cos

The transposed rotation is the inverse one, so backward needs the two tables and nothing of x. A program owns
some positions and loops over their heads: it reads a position's cosines and sines once, not once a head.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.runtime import kernel_function, launch_kernel, load_float32, row_tiles
from cs336_systems.kernels.tensors import check_tensors

# Elements of a tile, where a head has no more: a program keeps two tables of half as many in registers, too.
TILE = 2048


@triton.jit
def rotary_kernel(
    x_ptr,
    cos_ptr,
    sin_ptr,
    y_ptr,
    stride_xb,
    stride_xh,
    stride_xs,
    stride_yb,
    stride_yh,
    stride_ys,
    n_heads,
    sequence,
    d,
    INVERSE: tl.constexpr,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y, shaped as x (batch, n_heads, sequence, d). Grid: (batch * tiles of ROWS positions,)."""
    tiles = tl.cdiv(sequence, ROWS)
    batch = (tl.program_id(0) // tiles).to(tl.int64)
    rows = ((tl.program_id(0) % tiles) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    pairs = tl.arange(0, COLUMNS // 2)[None, :]
    known = (rows < sequence) & (pairs < d // 2)
    cos = load_float32(cos_ptr + rows * (d // 2) + pairs, known)
    sin = load_float32(sin_ptr + rows * (d // 2) + pairs, known)
    if INVERSE:
        sin = -sin
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (rows < sequence) & (columns < d)
    x_tile = x_ptr + batch * stride_xb + rows * stride_xs + columns
    y_tile = y_ptr + batch * stride_yb + rows * stride_ys + columns
    for _ in tl.range(n_heads):
        x = load_float32(x_tile, inside)
        # Loaded whole and parted in registers: loads of every other element would be narrow.
        even, odd = tl.split(tl.reshape(x, (ROWS, COLUMNS // 2, 2)))
        turned = tl.join(even * cos - odd * sin, even * sin + odd * cos)
        y = tl.reshape(turned, (ROWS, COLUMNS))
        tl.store(y_tile, y, mask=inside)
        x_tile += stride_xh
        y_tile += stride_yh


@kernel_function
def rotate(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
    """x (..., s, d) turned by the angles of the tables (s or more, d / 2), or back; in x's layout, mostly."""
    # (batch, heads, s, d): dimensions are added, or all before the heads folded into one.
    x4 = x[(None,) * (4 - x.dim())] if x.dim() <= 4 else x.flatten(0, -4)
    if x4.stride(-1) != 1:
        x4 = x4.contiguous()
    batch, heads, sequence, d = x4.shape
    # It has x's strides: heads that lie side by side in x, as the model's, do so in y.
    y4 = torch.empty_like(x4)
    # 2 * d is no limit: the next power of two is less.
    tiles, options = row_tiles(sequence, d, TILE, 2 * d, 4)
    tensors = (x4, cos.contiguous(), sin.contiguous(), y4)
    sizes = x4.stride()[:3] + y4.stride()[:3] + (heads, sequence, d)
    grid = (batch * tiles,)
    launch_kernel(rotary_kernel, grid, *tensors, *sizes, INVERSE=inverse, **options)
    return y4.reshape(x.shape)


class RotaryTriton(torch.autograd.Function):
    """`apply(x, cos, sin, inverse)`: see `rotary`. Saves the tables, which are there anyway."""

    @staticmethod
    def forward(ctx, x: Tensor, cos: Tensor, sin: Tensor, inverse: bool) -> Tensor:
        ctx.save_for_backward(cos, sin)
        ctx.inverse = inverse
        return rotate(x, cos, sin, inverse)

    @staticmethod
    def backward(ctx, dy: Tensor):
        return RotaryTriton.apply(dy, *ctx.saved_tensors, not ctx.inverse), None, None, None


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the pair (x[2k], x[2k+1]) at position p by the angle whose cosine is cos[p, k].

    Args:
        x: (..., s, d) of float32, bfloat16 or float16; heads that are a view of (b, s, h * d) stay one.
        cos, sin: (s or more, d / 2), of one of these dtypes; they get no gradient.

    Raises:
        TypeError: another dtype. ValueError: shapes that do not fit, an odd d, devices.
    """
    fits = x.dim() >= 2 and cos.dim() == 2 and cos.shape == sin.shape
    fits = fits and len(cos) >= x.shape[-2] and 0 < x.shape[-1] == 2 * cos.shape[1]
    allowed = "(..., s, d) with an even d, and twice (s or more, d / 2)"
    check_tensors("x, cos, sin", x, cos, sin, fits=fits, allowed=allowed)
    return RotaryTriton.apply(x, cos, sin, False)
