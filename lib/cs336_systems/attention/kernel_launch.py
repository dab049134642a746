"""One kernel, prepared to be launched again and again.

A short sequence keeps the GPU busy for a few microseconds; finding the compiled kernel again at every launch,
as Triton does, would take longer than the kernel itself.
"""

import copy
import inspect
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import triton
from torch import Tensor

from cs336_systems.attention.config import Tile

STREAM = 3  # where among a compiled kernel's arguments it is: after the grid
MAX_MAPS = 1024
KNOWN_INSIDE = (3, 6), (3, 7)  # the Tritons beneath whose launcher KernelLaunch can reach


class KernelLaunch:
    """A kernel with its grid and every argument but the tensors: call it with those.

    Args:
        programs: and, of those whose walk is split, into how many parts.
        arguments: by name; of more than the kernel takes, those that it takes.
        descriptors: for the first tensors, which the kernel loads by TMA.
    """

    def __init__(
        self,
        kernel: Any,
        programs: tuple[int, int],
        arguments: dict[str, int | float | bool | str],
        tile: Tile,
        descriptors: Sequence[Any] = (),
    ) -> None:
        self.kernel, self.grid, self.descriptors = kernel, (*programs, 1), descriptors
        names = kernel.arg_names
        self.tensor_names = [name for name in names if name.endswith(("_src", "_ptr"))]  # they come first
        self.arguments = tuple(arguments[name] for name in names[len(self.tensor_names) :])
        self.options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if tile.max_registers:
            self.options["maxnreg"] = tile.max_registers
        self.launch = None

    def __call__(self, *tensors: Tensor) -> None:
        if self.launch is None:
            compiled = self.kernel[self.grid](*self.described(tensors), *self.arguments, **self.options)
            # The interpreter compiles nothing; a Triton that is not known launches as it likes.
            if compiled is not None and triton_version() in KNOWN_INSIDE:
                self._prepare(compiled, tensors)
            return
        arguments = self.launch_arguments.copy()
        arguments[STREAM] = self.current_stream(self.device)
        for i, maps, x in zip(self.map_places, self.maps, tensors, strict=False):
            arguments[i] = maps[x.data_ptr()]
        for i, x in zip(self.pointer_places, tensors[len(self.maps) :], strict=True):
            arguments[i] = x.data_ptr()
        self.launch(*arguments)

    def _prepare(self, compiled: Any, tensors: tuple[Tensor, ...]) -> None:
        """Do once what Triton does at every launch, so that addresses and the stream are all that is left.

        Triton would encode every descriptor again, and ask the driver about each tensor, but not about an
        address. Its launch hooks, by which its own profiler listens, are not called; memory for scratch,
        which it would allocate, our kernels do not use.
        """
        driver = triton.runtime.driver.active
        self.device, self.current_stream = driver.get_current_device(), driver.get_current_stream
        recorder, recorded = copy.copy(compiled.run), []
        launch, recorder.launch = recorder.launch, lambda *arguments: recorded.extend(arguments)
        if self.descriptors:
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]  # takes tensor maps
        self.maps, map_places, arguments = [], [], []
        for descriptor, meta in zip(self.descriptors, compiled.metadata.tensordesc_meta or (), strict=True):
            self.maps.append(TensorMaps(descriptor, meta))
            map_places.append(len(arguments))
            arguments += [None, *descriptor.shape, *descriptor.strides]
        pointers = range(len(arguments), len(arguments) + len(tensors) - len(self.maps))
        arguments += [*(None for _ in pointers), *self.arguments]
        hooks = None, None, None  # and what they are told
        recorder(*self.grid, None, compiled.function, compiled.packed_metadata, *hooks, *arguments)
        if isinstance(recorded[-1], tuple):  # Triton 3.7; 3.6 passes them one by one
            c_launch, first = launch, len(recorded) - 1
            recorded += recorded.pop()
            self.launch = lambda *arguments: c_launch(*arguments[:first], arguments[first:])
        else:
            self.launch, first = launch, len(recorded) - len(arguments)
        self.map_places = [first + i for i in map_places]
        self.pointer_places = [first + i for i in pointers]
        self.launch_arguments = recorded

    def compile(self, *tensors: Tensor) -> Any:
        """What Triton compiles for such tensors, on the meta device too, without a launch."""
        return self.kernel.warmup(*self.described(tensors), *self.arguments, grid=self.grid, **self.options)

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """The tensors, the first of them as the descriptors that the kernel loads by."""
        described = [_with_tensor(each, x) for each, x in zip(self.descriptors, tensors, strict=False)]
        return *described, *tensors[len(described) :]


class TensorMaps(dict):
    """What TMA reads of a descriptor, by the address of the tensor: addresses come again and again."""

    def __init__(self, descriptor: Any, meta: dict[str, Any]) -> None:
        super().__init__()
        self.descriptor, self.meta = descriptor, meta

    def __missing__(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) == MAX_MAPS:
            self.clear()
        base = SimpleNamespace(data_ptr=lambda: address)
        self[address], *_ = make_tensordesc_arg(_with_tensor(self.descriptor, base), self.meta)
        return self[address]


def _with_tensor(descriptor: Any, x: Any) -> Any:
    """A copy of the descriptor for this tensor, without the constructor's checks."""
    described = copy.copy(descriptor)
    described.base = x
    return described


def triton_version() -> tuple[int, ...]:
    return tuple(map(int, triton.__version__.split(".")[:2]))
