"""How tensors lie in memory, in which of these ways kernels can load them, and what TMA is told of it."""

from typing import Any

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.choose import cdiv
from cs336_systems.kernels.runtime import ALIGNMENT

Shape = tuple[int, ...]
Layout = tuple[Shape, Shape]  # shape, strides


def layout(x: Tensor) -> Layout:
    """All that a launcher needs to know of a tensor but its address."""
    return x.shape, x.stride()


def as_bhnd(layout: Layout) -> Layout:
    """That of an (..., n, d) tensor of two to four dimensions as (batch, heads, n, d)."""
    shape, strides = layout
    missing = 4 - len(shape)
    return (1,) * missing + tuple(shape), (0,) * missing + tuple(strides)


def contiguous(shape: Shape, unit: int = 1) -> Layout:
    """That of a tensor that is contiguous, but for rows that begin at multiples of so many numbers."""
    strides = [1]
    step = cdiv(shape[-1], unit) * unit
    for size in reversed(shape[:-1]):
        strides.append(step)
        step *= size
    return shape, tuple(reversed(strides))


def tma_compatible(layout: Layout, itemsize: int) -> bool:
    """Whether TMA can load from such a tensor: a last stride of 1, the others in multiples of 16 bytes."""
    shape, strides = layout
    if strides[-1] != 1 and shape[-1] != 1:
        return False
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        step = stride * itemsize
        if size > 1 and (step == 0 or step % ALIGNMENT != 0):
            return False
    return True


def kernel_layout(layout: Layout, itemsize: int, use_tma: bool) -> Layout:
    """The layout itself if the kernels can load from such a tensor, else that of a copy.

    For TMA its rows are padded to 16 bytes; for pointers it is contiguous.
    """
    shape, strides = layout
    if use_tma:
        unit = ALIGNMENT // itemsize
        return layout if tma_compatible(layout, itemsize) else contiguous(shape, unit)
    copied = contiguous(shape)
    for size, stride, wanted in zip(shape, strides, copied[1], strict=True):
        if size > 1 and stride != wanted:
            return copied
    return layout


def describe(layout: Layout, block: Shape, dtype: torch.dtype, in_shared: Any = None) -> Any:
    """The descriptor, still of no tensor, by which TMA loads tiles of the shape `block` from such a layout.

    in_shared: for Gluon's kernels, how a tile lies in shared memory.
    """
    shape, strides = layout
    steps = []
    for size, stride in zip(shape[:-1], strides[:-1], strict=True):
        # Nobody steps along a single element, but TMA refuses a stride that is no multiple of 16 bytes.
        steps.append(stride if size > 1 else ALIGNMENT)
    steps.append(1)
    base = torch.empty(0, dtype=dtype, device="meta")
    arguments = base, list(shape), steps, list(block)
    if in_shared is None:
        return TensorDescriptor(*arguments)
    return GluonDescriptor(*arguments, layout=in_shared)
