"""Launching with little work on the host: what depends on shapes alone is settled once and kept.

A short sequence keeps the GPU busy for a few microseconds; choosing tiles, checking strides and finding the
compiled kernel again at every call would take longer than the kernel itself.
"""

import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from cs336_systems.attention.config import Tile

INTERPRETED = triton.knobs.runtime.interpret
# Triton's own functions choose between compiler and interpreter when Triton is first imported.
TOO_LATE = INTERPRETED and isinstance(tl.max, JITFunction)
ALIGNMENT = 16  # bytes; what the copy engine asks of addresses and of every stride but the last
Shape = tuple[int, ...]
Layout = tuple[Shape, Shape]  # shape, strides

_descriptor_defaults = {
    field.name: field.default
    for field in dataclasses.fields(TensorDescriptor)
    if field.default is not dataclasses.MISSING
}


def check_device(names: str, x: Tensor) -> None:
    """Raises ValueError where no kernel runs, naming the tensors."""
    if not (x.is_cuda or INTERPRETED):
        raise ValueError(
            f"{names} are on {x.device}; allowed: a CUDA GPU, or any device in Triton's interpreter "
            "(TRITON_INTERPRET=1)"
        )


class Launch:
    """A kernel with its grid, its numbers and its options: call it with the tensors that are left to say."""

    def __init__(
        self,
        kernel: Any,
        programs: int,
        numbers: tuple[int | float, ...],
        constants: dict[str, Any],
        tile: Tile,
    ) -> None:
        """The kernel's arguments in order: tensors, then `numbers`, then `constants`, its constexprs."""
        if TOO_LATE:
            raise RuntimeError(
                "triton was imported before cs336_systems, which chooses Triton's interpreter where there is "
                "no GPU; import cs336_systems first, or set TRITON_INTERPRET=1"
            )
        self.kernel, self.numbers, self.constants = kernel, numbers, constants
        self.by_position = *numbers, *constants.values()
        self.grid = (programs, 1, 1)
        self.options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if tile.maxnreg:
            self.options["maxnreg"] = tile.maxnreg
        self.run_compiled = None

    def __call__(self, *tensors: Tensor | TensorDescriptor) -> None:
        if self.run_compiled is not None:
            self.run_compiled(*tensors, *self.by_position)
            return
        compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants, **self.options)
        if compiled is not None:  # the interpreter compiles nothing
            self.run_compiled = compiled[self.grid]


def layout(x: Tensor) -> Layout:
    """All that a plan needs to know of a tensor but its address."""
    return x.shape, x.stride()


def aligned(x: Tensor) -> Tensor:
    """x itself if the copy engine can read from its address, otherwise a copy."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def readable(layout: Layout, itemsize: int, descriptors: bool) -> bool:
    """Whether the kernels can read such a tensor where it is.

    Descriptors need a last stride of 1 and the others in multiples of 16 bytes, pointers a contiguous tensor.
    """
    shape, strides = layout
    if not descriptors:
        steps = zip(shape, strides, _contiguous(shape), strict=True)
        return all(size == 1 or stride == expected for size, stride, expected in steps)
    outer = [stride * itemsize for size, stride in zip(shape[:-1], strides, strict=False) if size > 1]
    unit_last = strides[-1] == 1 or shape[-1] == 1
    return unit_last and all(stride and stride % ALIGNMENT == 0 for stride in outer)


def readable_copy(x: Tensor, descriptors: bool) -> Tensor:
    """A copy that the kernels can read, of layout `layout_of_copy`."""
    shape, strides = layout_of_copy(x.shape, x.element_size(), descriptors)
    return x.new_empty_strided(shape, strides).copy_(x)


def layout_of_copy(shape: Shape, itemsize: int, descriptors: bool) -> Layout:
    """Contiguous; for descriptors, but for the rows, which begin at multiples of 16 bytes."""
    unit = ALIGNMENT // itemsize if descriptors else 1
    return shape, _contiguous((*shape[:-1], triton.cdiv(shape[-1], unit) * unit))


def _contiguous(shape: Shape) -> Shape:
    return tuple(math.prod(shape[i + 1 :]) for i in range(len(shape)))


def four_dims(shape: Shape, strides: Shape) -> tuple[Shape, Shape]:
    """Shape and strides of an (..., n, d) tensor of two to four dimensions as (batch, heads, n, d)."""
    missing = 4 - len(shape)
    return (1,) * missing + tuple(shape), (0,) * missing + tuple(strides)


def describer(
    shape: Shape, strides: Shape, block_shape: Shape, gluon_layout: Any = None
) -> Callable[[Tensor], Any]:
    """A function that describes any tensor of this shape and these strides as tiles of block_shape.

    It fills in the address only: TensorDescriptor's own constructor checks everything again at every launch.
    Gluon's descriptors say how a tile lies in shared memory, too.
    """
    outer = [stride if size > 1 else ALIGNMENT for size, stride in zip(shape[:-1], strides, strict=False)]
    fields = {"shape": list(shape), "strides": [*outer, 1], "block_shape": list(block_shape)}
    fields = _descriptor_defaults | fields
    if gluon_layout is None:
        kind = TensorDescriptor
    else:
        from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as kind

        fields["layout"] = gluon_layout

    def describe(x: Tensor) -> Any:
        descriptor = kind.__new__(kind)
        descriptor.__dict__.update(fields, base=x)
        return descriptor

    return describe


class _Thread(threading.local):
    def __init__(self) -> None:
        self.devices: set[torch.device] = set()  # whose contexts are this thread's, too


_thread = _Thread()
_NOTHING = contextlib.nullcontext()


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Make the device current, which takes time only where it is not.

    The first time in a thread, make its context current too: descriptors need one, and autograd's own threads
    start without. Any kernel of PyTorch's brings it.
    """
    if device.type != "cuda":
        return _NOTHING
    if device not in _thread.devices:
        torch.zeros(1, device=device)
        _thread.devices.add(device)
    return _NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)
