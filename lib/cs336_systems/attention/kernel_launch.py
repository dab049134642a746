"""One kernel, prepared to be launched again and again.

A short sequence keeps the GPU busy for a few microseconds; finding the compiled kernel again at every launch,
as Triton does, would take longer than the kernel itself.
"""

import copy
import inspect
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import torch
import triton
from torch import Tensor

from cs336_systems.attention.tiles import Tile
from cs336_systems.kernels.runtime import device_context

STREAM = 3  # where among a compiled kernel's arguments it is: after the grid
MAX_MAPS = 1024
KNOWN_INSIDE = "3.6.", "3.7."  # Tritons whose launcher KernelLaunch can take apart


class KernelLaunch:
    """A kernel with its grid and every argument but the tensors: `run` takes those.

    Args:
        programs: and the number of splits.
        arguments: by name, also others than the kernel takes.
        descriptors: for the first tensors, which the kernel loads or stores by TMA.
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
        endings = "_src", "_dst", "_ptr"
        self.tensor_names = [name for name in names if name.endswith(endings)]  # they come first
        self.arguments = tuple(arguments[name] for name in names[len(self.tensor_names) :])
        self.options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if tile.max_registers:
            self.options["maxnreg"] = tile.max_registers
        self.run = self.run_through_triton

    def run_through_triton(self, *tensors: Tensor) -> None:
        """The first time, and always where nothing compiles or an unknown Triton launches as it likes."""
        with device_context(tensors[0].device):
            compiled = self.kernel[self.grid](
                *self.described(tensors), *self.arguments, **self.options
            )
            if compiled is not None and triton.__version__.startswith(KNOWN_INSIDE):
                self.run = self._prepared(compiled, tensors)

    def _prepared(self, compiled: Any, tensors: tuple[Tensor, ...]) -> Callable[..., None]:
        """Do once what Triton does at every launch, so that addresses and the stream are all that is left.

        Triton would encode every descriptor again, and ask the driver about each tensor, but not about an
        address. Its launch hooks, by which its own profiler listens, are not called; memory for scratch,
        which it would allocate, our kernels do not use.

        Returns:
            Takes the tensors, on the device that is current now.
        """
        driver = triton.runtime.driver.active
        device = driver.get_current_device()
        recorder, recorded = copy.copy(compiled.run), []
        launch, recorder.launch = recorder.launch, lambda *arguments: recorded.extend(arguments)
        if self.descriptors:
            launch = inspect.getclosurevars(launch).nonlocals["launcher"]  # takes tensor maps
        maps, places, arguments = [], [], []  # places: where each tensor's address or map is
        for descriptor, meta in zip(
            self.descriptors, compiled.metadata.tensordesc_meta or (), strict=True
        ):
            maps.append(TensorMaps(descriptor, meta, tensors[0].device))
            places.append(len(arguments))
            arguments += [None, *descriptor.shape, *descriptor.strides]
        for _ in tensors[len(maps) :]:
            places.append(len(arguments))
            arguments.append(None)
        arguments += self.arguments
        hooks = None, None, None  # and their argument
        recorder(*self.grid, None, compiled.function, compiled.packed_metadata, *hooks, *arguments)
        if packed := isinstance(recorded[-1], tuple):  # Triton 3.7; 3.6 passes them one by one
            recorded += recorded.pop()
        first = len(recorded) - len(arguments)

        # An expression with every argument in its place: filling a list in at every launch takes longer.
        known = {f"argument{i}": x for i, x in enumerate(recorded)}
        written = list(known)
        written[STREAM] = "stream(device)"
        for i, place in enumerate(places):
            written[first + place] = (
                f"maps{i}[x{i}.data_ptr()]" if i < len(maps) else f"x{i}.data_ptr()"
            )
        inner = ", ".join(written[first:])
        inner = f"({inner},)" if packed else inner
        parameters = ", ".join(f"x{i}" for i in range(len(tensors)))
        known |= {"launch": launch, "stream": driver.get_current_stream, "device": device}
        known |= {f"maps{i}": each for i, each in enumerate(maps)}
        return eval(f"lambda {parameters}: launch({', '.join(written[:first])}, {inner})", known)

    def compile(self, *tensors: Tensor) -> Any:
        """What Triton compiles for such tensors, on the meta device too, without a launch."""
        return self.kernel.warmup(
            *self.described(tensors), *self.arguments, grid=self.grid, **self.options
        )

    def described(self, tensors: tuple[Tensor, ...]) -> tuple[Any, ...]:
        """The tensors, the first of them as the descriptors that TMA takes."""
        described = [
            _with_tensor(each, x) for each, x in zip(self.descriptors, tensors, strict=False)
        ]
        return *described, *tensors[len(described) :]


class TensorMaps(dict):
    """What TMA reads of a descriptor, by the address of the tensor: addresses come again and again."""

    def __init__(self, descriptor: Any, meta: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        self.descriptor, self.meta, self.device = descriptor, meta, device

    def __missing__(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) == MAX_MAPS:
            self.clear()
        base = SimpleNamespace(data_ptr=lambda: address)
        with device_context(self.device):
            self[address], *_ = make_tensordesc_arg(_with_tensor(self.descriptor, base), self.meta)
        return self[address]


def _with_tensor(descriptor: Any, x: Any) -> Any:
    """A copy of the descriptor for this tensor, without the constructor's checks."""
    described = copy.copy(descriptor)
    described.base = x
    return described
