"""Launching with little work on the host: what depends on shapes alone is settled once and kept.

A short sequence keeps the GPU busy for a few microseconds; choosing tiles, checking strides and finding the
compiled kernel again at every call would take longer than the kernel itself.
"""

import contextlib
import dataclasses
import threading
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.runtime import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from .tuning import Tile

INTERPRETED = triton.knobs.runtime.interpret
# Triton's own functions choose between compiler and interpreter when Triton is first imported.
TOO_LATE = INTERPRETED and isinstance(tl.max, JITFunction)
ALIGNMENT = 16  # bytes; what the copy engine asks of addresses and of every stride but the last
Shape = tuple[int, ...]

_thread = threading.local()
_descriptor_defaults = {
    field.name: field.default
    for field in dataclasses.fields(TensorDescriptor)
    if field.default is not dataclasses.MISSING
}


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
        self.grid = (programs, 1, 1)
        self.options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if tile.maxnreg:
            self.options["maxnreg"] = tile.maxnreg
        self.compiled = None

    def __call__(self, *tensors: Tensor | TensorDescriptor) -> None:
        if self.compiled is None:  # always so in the interpreter
            self.compiled = self.kernel[self.grid](*tensors, *self.numbers, **self.constants, **self.options)
        else:
            self.compiled[self.grid](*tensors, *self.numbers, *self.constants.values())


def loadable(x: Tensor, descriptors: bool) -> Tensor:
    """x itself if the kernels can read it where it is, otherwise a copy.

    Descriptors need a last stride of 1 and the others in multiples of 16 bytes, pointers a contiguous tensor.
    """
    if x.data_ptr() % ALIGNMENT == 0 and _readable(x.shape, x.stride(), x.element_size(), descriptors):
        return x
    unit = ALIGNMENT // x.element_size()
    width = triton.cdiv(x.shape[-1], unit) * unit if descriptors else x.shape[-1]
    return x.new_empty((*x.shape[:-1], width))[..., : x.shape[-1]].copy_(x)


@lru_cache(maxsize=1024)
def _readable(shape: Shape, strides: Shape, itemsize: int, descriptors: bool) -> bool:
    expected = 1
    for size, stride in zip(reversed(shape), reversed(strides), strict=True):
        if size > 1 and not descriptors and stride != expected:
            return False
        expected *= size
    outer = [stride * itemsize for size, stride in zip(shape[:-1], strides, strict=False) if size > 1]
    unit_last = strides[-1] == 1 or shape[-1] == 1
    return not descriptors or (unit_last and all(stride and stride % ALIGNMENT == 0 for stride in outer))


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


def on(device: torch.device) -> contextlib.AbstractContextManager:
    """Make the device current.

    The first time in a thread, make its context current too: descriptors need one, and autograd's own threads
    start without. Any kernel of PyTorch's brings it.
    """
    if device.type != "cuda":
        return contextlib.nullcontext()
    if device not in _thread.__dict__.setdefault("devices", set()):
        torch.zeros(1, device=device)
        _thread.devices.add(device)
    return torch.cuda.device(device)
