"""Row-wise weighted sum in Triton, forward and backward: the handout's worked example.

    y[i] = sum_j x[i, j] w[j]        dx[i, j] = dy[i] w[j]        dw[j] = sum_i dy[i] x[i, j]

Every element is used once or twice, so the only cost is moving it: each is read and written once. dw sums
over rows that different programs own: each adds up its own, PyTorch adds up those partial sums. No atomic
additions, so the result is deterministic.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.autograd_guards import first_order_only
from cs336_systems.kernels.runtime import kernel_function, launch_kernel, load_float32, row_tiles
from cs336_systems.kernels.tensors import check_tensors

# Elements of a tile: 32 a thread, 128 bytes in float32, are on their way at once and hide memory's latency.
TILE = 4096
WIDEST = 1024  # columns of a tile
MOST_PARTIALS = 1024  # rows of partial sums of dw


@triton.jit
def forward_kernel(
    x_ptr,
    w_ptr,
    y_ptr,
    stride_xr,
    stride_xd,
    stride_w,
    n_rows,
    d,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """y (n_rows,). Grid: (row tiles,); a program owns ROWS rows and loops over their columns."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    # Offsets are int64: 2^31 elements are 4 GiB in 16 bits, and a matrix may have more.
    x_rows = x_ptr + rows[:, None].to(tl.int64) * stride_xr
    y = tl.zeros([ROWS], tl.float32)
    for first in tl.range(0, d, COLUMNS):
        columns = first + tl.arange(0, COLUMNS)
        inside = (rows[:, None] < n_rows) & (columns[None, :] < d)
        x_tile = x_rows + columns[None, :].to(tl.int64) * stride_xd
        x = tl.load(x_tile, mask=inside, other=0.0)
        w = tl.load(w_ptr + columns.to(tl.int64) * stride_w, mask=columns < d, other=0.0)
        y += tl.sum(x.to(tl.float32) * w.to(tl.float32)[None, :], axis=1)
    tl.store(y_ptr + rows, y, mask=rows < n_rows)


@triton.jit
def backward_kernel(
    x_ptr,
    w_ptr,
    dy_ptr,
    dx_ptr,
    partial_ptr,
    stride_xr,
    stride_xd,
    stride_w,
    stride_dy,
    n_rows,
    d,
    rows_each,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    """dx (n_rows, d) and a row of partial sums of dw. Grid: (partials, column tiles).

    A program owns COLUMNS columns of rows_each rows and loops over the rows, its partial sum in registers.
    """
    part = tl.program_id(0)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    in_row = columns < d
    w = load_float32(w_ptr + columns.to(tl.int64) * stride_w, in_row)
    first_row = part * rows_each
    last_row = tl.minimum(first_row + rows_each, n_rows)
    # In registers until the program's last row, so dw costs one row of writes a program.
    partial = tl.zeros([COLUMNS], tl.float32)
    for first in tl.range(first_row, last_row, ROWS):
        rows = first + tl.arange(0, ROWS)
        long_rows = rows[:, None].to(tl.int64)
        inside = (rows[:, None] < last_row) & in_row[None, :]
        dy_rows = dy_ptr + rows.to(tl.int64) * stride_dy
        dy = load_float32(dy_rows, rows < last_row)
        x_tile = x_ptr + long_rows * stride_xr + columns[None, :].to(tl.int64) * stride_xd
        x = load_float32(x_tile, inside)
        dx = dy[:, None] * w[None, :]
        dx_tile = dx_ptr + long_rows * d + columns[None, :]
        tl.store(dx_tile, dx, mask=inside)
        partial += tl.sum(dy[:, None] * x, axis=0)
    tl.store(partial_ptr + part.to(tl.int64) * d + columns, partial, mask=in_row)


@kernel_function
def forward(x: Tensor, weight: Tensor) -> Tensor:
    """y (...) of x (..., d) and weight (d,), any strides; sums in float32."""
    rows = x.reshape(-1, len(weight))
    y = x.new_empty(x.shape[:-1])
    n_rows, d = rows.shape
    tiles, options = row_tiles(n_rows, d, TILE, WIDEST, 4)
    strides = rows.stride() + weight.stride()
    launch_kernel(forward_kernel, (tiles,), rows, weight, y, *strides, n_rows, d, **options)
    return y


@kernel_function
def backward(dy: Tensor, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
    """dx (..., d) and dw (d,), from dy (...), x (..., d) and weight (d,), any strides."""
    rows = x.reshape(-1, len(weight))
    dy = dy.reshape(-1)
    dx = x.new_empty(x.shape)
    n_rows, d = rows.shape
    tiles, options = row_tiles(n_rows, d, TILE, WIDEST, 4)
    # A row of partial sums of dw for each tile of rows, until there are enough programs to fill a GPU.
    rows_each = triton.cdiv(n_rows, min(tiles, MOST_PARTIALS))
    partial = x.new_empty((triton.cdiv(n_rows, rows_each), d), dtype=torch.float32)
    tensors = (rows, weight, dy, dx, partial)
    sizes = rows.stride() + weight.stride() + dy.stride() + (n_rows, d, rows_each)
    grid = (len(partial), triton.cdiv(d, options["COLUMNS"]))
    launch_kernel(backward_kernel, grid, *tensors, *sizes, **options)
    return dx, partial.sum(0).to(weight.dtype)


class WeightedSum(torch.autograd.Function):
    """`apply(x, weight)`: see `weighted_sum`."""

    @staticmethod
    def forward(ctx, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return forward(x, weight)

    @staticmethod
    @first_order_only
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        return backward(dy, *ctx.saved_tensors)


def weighted_sum(x: Tensor, weight: Tensor) -> Tensor:
    """Sum of each row of x, its elements weighted, without x * weight in memory.

    x is (..., d) with any leading dimensions, none included, and weight (d,); the result is (...), in x's
    dtype, summed in float32.

    Raises:
        TypeError: dtypes that differ or are not supported.
        ValueError: devices or shapes that do not fit, an empty tensor, a device that kernels do not run on.
    """
    fits = x.dim() >= 1 and weight.shape == x.shape[-1:] and 0 not in x.shape
    allowed = "(..., d) and (d,), no dimension of size 0"
    check_tensors("x, weight", x, weight, fits=fits, allowed=allowed, same_dtype=True)
    return WeightedSum.apply(x, weight)
