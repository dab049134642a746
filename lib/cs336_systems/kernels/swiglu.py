"""The gate of SwiGLU (Shazeer 2020) in Triton, forward and backward.

    c = silu(a) b, silu(a) = a s, s = sigmoid(a)     da = dc b s (1 + a (1 - s))     db = dc silu(a)

Backward computes s again from a, so nothing is kept but a and b; c, which the layer after it needs in its own
backward, can be made on the way.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from cs336_systems.kernels.autograd_guards import differentiable
from cs336_systems.kernels.runtime import kernel_function, launch_kernel
from cs336_systems.kernels.tensors import check_tensors

BLOCK = 2048  # elements of a program: 16 a thread


@triton.jit
def swiglu_forward_kernel(a_ptr, b_ptr, c_ptr, n, BLOCK: tl.constexpr):
    """c (n,). Grid: (blocks of BLOCK elements,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    a = tl.load(a_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    tl.store(c_ptr + i, (a * tl.sigmoid(a) * b).to(c_ptr.dtype.element_ty), mask=i < n)


@triton.jit
def swiglu_backward_kernel(
    dc_ptr, a_ptr, b_ptr, da_ptr, db_ptr, c_ptr, n, BLOCK: tl.constexpr, WITH_C: tl.constexpr
):  # fmt: skip
    """da, db and perhaps c (n,). Grid: (blocks of BLOCK elements,)."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    dc = tl.load(dc_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    a = tl.load(a_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    b = tl.load(b_ptr + i, mask=i < n, other=0.0).to(tl.float32)
    s = tl.sigmoid(a)
    da = dc * b * s * (1 + a * (1 - s))
    tl.store(da_ptr + i, da.to(da_ptr.dtype.element_ty), mask=i < n)
    tl.store(db_ptr + i, (dc * a * s).to(db_ptr.dtype.element_ty), mask=i < n)
    if WITH_C:
        tl.store(c_ptr + i, (a * s * b).to(c_ptr.dtype.element_ty), mask=i < n)


@kernel_function
def forward(a: Tensor, b: Tensor) -> Tensor:
    """c of a and b, all of one shape; contiguous."""
    a, b = a.contiguous(), b.contiguous()
    c = torch.empty_like(a)
    launch_kernel(
        swiglu_forward_kernel, (triton.cdiv(a.numel(), BLOCK),), a, b, c, a.numel(), BLOCK=BLOCK
    )
    return c


@kernel_function
def backward(dc: Tensor, a: Tensor, b: Tensor, with_c: bool = False) -> list[Tensor]:
    """da, db and, if it is asked for, c of dc, a and b, all of one shape; contiguous."""
    dc, a, b = dc.contiguous(), a.contiguous(), b.contiguous()
    made = [torch.empty_like(a) for _ in range(3 if with_c else 2)]
    outputs = made if with_c else [*made, None]
    grid = (triton.cdiv(a.numel(), BLOCK),)
    launch_kernel(
        swiglu_backward_kernel, grid, dc, a, b, *outputs, a.numel(), BLOCK=BLOCK, WITH_C=with_c
    )
    return made


_swiglu = differentiable(forward, backward)


def swiglu(a: Tensor, b: Tensor) -> Tensor:
    """silu(a) * b, of one shape and dtype, computed in float32: float32, bfloat16 or float16, any strides.

    Raises:
        TypeError: dtypes that differ or are not supported. ValueError: shapes or devices that differ.
    """
    check_tensors("a, b", a, b, fits=a.shape == b.shape, allowed="the same one", same_dtype=True)
    return _swiglu(a, b)
