"""The gate of SwiGLU (Shazeer 2020) in Triton, forward and backward.

    c = silu(a) b, silu(a) = a s, s = sigmoid(a)     da = dc b s (1 + a (1 - s))     db = dc silu(a)

Backward computes s again from a, so nothing is kept but a and b; c, which the layer after it needs in its own
backward, can be made on the way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.autograd_guards import first_order_only
from cs336_systems.kernels.runtime import kernel_function, launch_kernel, load_float32
from cs336_systems.kernels.tensors import check_tensors

# Elements of a program: 16 a thread are on their way at once.
BLOCK = 2048


@triton.jit
def swiglu_forward_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    n,
    BLOCK: tl.constexpr,
):
    """c (n,). Grid: (blocks of BLOCK elements,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = load_float32(a_ptr + i, i < n)
    b = load_float32(b_ptr + i, i < n)
    tl.store(c_ptr + i, a * tl.sigmoid(a) * b, mask=i < n)


@triton.jit
def swiglu_backward_kernel(
    dc_ptr,
    a_ptr,
    b_ptr,
    da_ptr,
    db_ptr,
    c_ptr,
    n,
    BLOCK: tl.constexpr,
):
    """da, db and perhaps c (n,). Grid: (blocks of BLOCK elements,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dc = load_float32(dc_ptr + i, i < n)
    a = load_float32(a_ptr + i, i < n)
    b = load_float32(b_ptr + i, i < n)
    # Made again: the kernel waits for memory anyhow, and a kept s would be one more tensor to read.
    s = tl.sigmoid(a)
    da = dc * b * s * (1 + a * (1 - s))
    tl.store(da_ptr + i, da, mask=i < n)
    tl.store(db_ptr + i, dc * a * s, mask=i < n)
    if c_ptr is not None:
        tl.store(c_ptr + i, a * s * b, mask=i < n)


@kernel_function
def forward(a: Tensor, b: Tensor) -> Tensor:
    """c of a and b, all of one shape; contiguous."""
    a = a.contiguous()
    b = b.contiguous()
    c = torch.empty_like(a)
    n = a.numel()
    launch_kernel(swiglu_forward_kernel, (triton.cdiv(n, BLOCK),), a, b, c, n, BLOCK=BLOCK)
    return c


@kernel_function
def backward(dc: Tensor, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """da and db of dc, a and b, all of one shape; contiguous."""
    inputs = [x.contiguous() for x in (dc, a, b)]
    da = torch.empty_like(inputs[0])
    db = torch.empty_like(da)
    launch_backward(*inputs, da, db)
    return da, db


def launch_backward(
    dc: Tensor, a: Tensor, b: Tensor, da: Tensor, db: Tensor, c: Tensor | None = None
) -> None:
    """Write da, db and, where there is a c, c; all contiguous. da may be a's memory, db b's, and c dc's."""
    n = a.numel()
    grid = (triton.cdiv(n, BLOCK),)
    # An element is read before it is written, and by no other program: hence the outputs may be the inputs.
    launch_kernel(swiglu_backward_kernel, grid, dc, a, b, da, db, c, n, BLOCK=BLOCK)


class SwiGLUTriton(torch.autograd.Function):
    """`apply(a, b)`: see `swiglu`."""

    @staticmethod
    def forward(ctx, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return forward(a, b)

    @staticmethod
    @first_order_only
    def backward(ctx, dc: Tensor):
        return backward(dc, *ctx.saved_tensors)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b, of one shape and dtype, computed in float32: float32, bfloat16 or float16, any strides.

    Raises:
        TypeError: dtypes that differ or are not supported. ValueError: shapes or devices that differ.
    """
    check_tensors("a, b", a, b, fits=a.shape == b.shape, allowed="the same one", same_dtype=True)
    return SwiGLUTriton.apply(a, b)
