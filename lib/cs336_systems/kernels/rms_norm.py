"""RMSNorm (Zhang and Sennrich 2019) in Triton, forward and backward.

    r[i] = 1 / sqrt(mean_j x[i, j]^2 + eps)     n[i, j] = x[i, j] r[i]     y[i, j] = n[i, j] w[j]

    g[i, j] = dy[i, j] w[j]     dx[i, j] = r[i] (g[i, j] - n[i, j] mean_j(g[i, j] n[i, j]))
    dw[j] = sum_i dy[i, j] n[i, j]

A row stays in registers from its first use to its last, so each tensor is read or written once. As in
`weighted_sum`, dw is a sum of partial sums, without atomic additions: deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels import runtime
from cs336_systems.kernels.autograd_guards import first_order_only
from cs336_systems.kernels.runtime import kernel_function, launch_kernel, load_float32, row_tiles
from cs336_systems.kernels.tensors import as_rows, check_tensors

TILE = 4096  # elements of a tile, where a row has no more
WIDEST = 32_768  # the longest row whose elements fit into the registers of one program
# Of the backward, whose programs loop over many rows. Two leave a thread 128 registers in rows of up to 4,096
# elements, 64 in rows of up to 8,192, else 32; where it takes more, an SM runs one at a time.
PROGRAMS_PER_SM = 2
# Bytes of shared memory that the next two tiles of dy and x may take on their way.
PREFETCHED = 2**16


@triton.jit
def rms_norm_forward_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    r_ptr,
    stride_x,
    n_rows,
    d,
    eps,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y (n_rows, d) and r (n_rows,). Grid: (row tiles,); a program owns ROWS whole rows."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = tl.arange(0, COLUMNS)[None, :]
    inside = (rows < n_rows) & (columns < d)
    x = load_float32(x_ptr + rows * stride_x + columns, inside)
    w = load_float32(w_ptr + columns, columns < d)
    r = tl.rsqrt(tl.sum(x * x, 1, keep_dims=True) / d + eps)
    tl.store(y_ptr + rows * d + columns, x * r * w, mask=inside)
    tl.store(r_ptr + rows, r, mask=rows < n_rows)


@triton.jit
def rms_norm_backward_kernel(
    dy_ptr,
    x_ptr,
    w_ptr,
    r_ptr,
    residual_ptr,
    y_ptr,
    dx_ptr,
    partial_ptr,
    stride_dy,
    stride_x,
    n_rows,
    d,
    rows_each,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    STAGES: tl.constexpr,
):
    """dx (n_rows, d) and a row of partial sums of dw. Grid: (partials,); a program owns rows_each rows.

    With three stages it loads tiles two ahead of use. A residual (n_rows, d) is added to dx, y is forward's.
    """
    part = tl.program_id(0)
    columns = tl.arange(0, COLUMNS)[None, :]
    w = load_float32(w_ptr + columns, columns < d)
    partial = tl.zeros([ROWS, COLUMNS], tl.float32)
    last_row = tl.minimum((part + 1) * rows_each, n_rows)
    for first in tl.range(part * rows_each, last_row, ROWS, num_stages=STAGES):
        rows = (first + tl.arange(0, ROWS)).to(tl.int64)[:, None]
        inside = (rows < last_row) & (columns < d)
        dy = load_float32(dy_ptr + rows * stride_dy + columns, inside)
        x = load_float32(x_ptr + rows * stride_x + columns, inside)
        r = tl.load(r_ptr + rows, mask=rows < last_row, other=0.0)
        n = x * r
        g = dy * w
        dx = r * (g - n * (tl.sum(g * n, 1, keep_dims=True) / d))
        # Added here, in float32, the residual's gradient costs one read: a sum of its own, two and a write.
        if residual_ptr is not None:
            dx += load_float32(residual_ptr + rows * d + columns, inside)
        tl.store(dx_ptr + rows * d + columns, dx, mask=inside)
        if y_ptr is not None:
            tl.store(y_ptr + rows * d + columns, n * w, mask=inside)
        partial += dy * n
    # Rows of the tile are added up once, at the end: in the loop it would be a reduction across warps a tile.
    total = tl.sum(partial, 0, keep_dims=True)
    tl.store(partial_ptr + part.to(tl.int64) * d + columns, total, mask=columns < d)


@kernel_function
def forward(x: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """y (..., d), and r in float32, one number a row, of x (..., d) and weight (d,)."""
    rows = as_rows(x)
    n_rows, d = rows.shape
    y = x.new_empty(x.shape)
    r = x.new_empty(n_rows, dtype=torch.float32)
    tiles, options = row_tiles(n_rows, d, TILE, WIDEST, 32)
    tensors = (rows, weight.contiguous(), y, r)
    sizes = (rows.stride(0), n_rows, d, eps)
    launch_kernel(rms_norm_forward_kernel, (tiles,), *tensors, *sizes, **options)
    return y, r


@kernel_function
def backward(
    dy: Tensor,
    x: Tensor,
    weight: Tensor,
    r: Tensor,
    residual: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx (..., d) and dw (d,) of dy and x (..., d), weight (d,) and r, and y again if there is a residual.

    residual: (..., d), added to dx: the gradient that reaches x past the norm. Without one y is empty.
    """
    d_rows = as_rows(dy)
    rows = as_rows(x)
    n_rows, d = rows.shape
    dx = x.new_empty(x.shape)
    y = x.new_empty(0)
    if residual is not None:
        residual = residual.contiguous()
        y = torch.empty_like(dx)
    tiles, options = row_tiles(n_rows, d, TILE, WIDEST, 32)
    # About as many programs as the GPU holds at once, each with a row of partial sums of dw.
    tiles_each = triton.cdiv(tiles, PROGRAMS_PER_SM * runtime.sm_count(x.device))
    rows_each = max(1, options["ROWS"] * tiles_each)
    partial = x.new_empty((triton.cdiv(n_rows, rows_each), d), dtype=torch.float32)
    tile_bytes = options["ROWS"] * options["COLUMNS"] * (dy.element_size() + x.element_size())
    # Wide tiles are loaded when they are needed: the next two would fill the shared memory.
    options["STAGES"] = 3 if 2 * tile_bytes <= PREFETCHED else 1
    inputs = (d_rows, rows, weight.contiguous(), r, residual)
    outputs = (None if residual is None else y, dx, partial)
    sizes = (d_rows.stride(0), rows.stride(0), n_rows, d, rows_each)
    grid = (len(partial),)
    launch_kernel(rms_norm_backward_kernel, grid, *inputs, *outputs, *sizes, **options)
    return dx, partial.sum(0).to(weight.dtype), y


class RMSNormTriton(torch.autograd.Function):
    """`apply(x, weight, eps)`: see `rms_norm`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, r = forward(x, weight, eps)
        ctx.save_for_backward(x, weight, r)
        return y

    @staticmethod
    @first_order_only
    def backward(ctx, dy: Tensor):
        dx, dw, _ = backward(dy, *ctx.saved_tensors)
        return dx, dw, None


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight over the last dimension, in x's dtype, computed in float32.

    Args:
        x: (..., d) of float32, bfloat16 or float16, any strides, no rows too.
        weight: (d,), of one of these dtypes; not always x's.

    Raises:
        TypeError: another dtype. ValueError: shapes that do not fit, a d that is 0 or over WIDEST, devices.
    """
    fits = x.dim() >= 1 and weight.shape == x.shape[-1:] and 1 <= x.shape[-1] <= WIDEST
    allowed = f"(..., d) and (d,), d from 1 to {WIDEST}"
    check_tensors("x, weight", x, weight, fits=fits, allowed=allowed)
    return RMSNormTriton.apply(x, weight, eps)
