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

STREAM = 3  # where the stream is in a call of Triton's launcher: after the grid
MAX_MAPS = 1024
# Tritons whose launcher KernelLaunch can take apart; with others every launch goes through Triton. Of these a
# launch was compared argument by argument with Triton's own; on a GPU only 3.6 and 3.7 have run.
KNOWN_INSIDE = "3.6.", "3.7.", "3.8.", "3.9."


# Where among a kernel's arguments a tensor's address goes or, by TMA, its map.
Slot = tuple[int, "TensorMaps | None"]


class KernelLaunch:
    """A kernel with its grid and every argument but the tensors: `run` takes those.

    Args:
        programs: how many, and of how many splits: the grid.
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
        self.kernel = kernel
        self.grid = programs + (1,)
        self.descriptors = descriptors
        # Tensors come first among a kernel's parameters.
        names = kernel.arg_names
        self.tensor_names = [name for name in names if name.endswith(("_src", "_dst", "_ptr"))]
        self.arguments = [arguments[name] for name in names[len(self.tensor_names) :]]
        self.options = {"num_warps": tile.num_warps, "num_stages": tile.num_stages}
        if tile.max_registers:
            self.options["maxnreg"] = tile.max_registers
        self.run: Callable[..., None] = self.run_through_triton

    def run_through_triton(self, *tensors: Tensor) -> None:
        """The first time, and always where nothing compiles or an unknown Triton launches as it likes."""
        device = tensors[0].device
        with device_context(device):
            launch = self.kernel[self.grid]
            compiled = launch(*self.described(tensors), *self.arguments, **self.options)
            if compiled is not None and triton.__version__.startswith(KNOWN_INSIDE):
                arguments, slots = self._tensor_slots(compiled, device)
                self.run = replay(compiled, self.grid, arguments, slots)

    def _tensor_slots(self, compiled: Any, device: torch.device) -> tuple[list[Any], list[Slot]]:
        """All that the driver passes to the kernel, tensors left out, and the slots that these fill."""
        arguments: list[Any] = []
        slots: list[Slot] = []
        tensordesc_meta = compiled.metadata.tensordesc_meta or ()
        for descriptor, meta in zip(self.descriptors, tensordesc_meta, strict=True):
            slots.append((len(arguments), TensorMaps(descriptor, meta, device)))
            arguments.append(None)
            arguments += descriptor.shape
            arguments += descriptor.strides
        for _ in self.tensor_names[len(slots) :]:
            slots.append((len(arguments), None))
            arguments.append(None)
        return arguments + self.arguments, slots

    def compile(self, *tensors: Tensor) -> Any:
        """What Triton compiles for such tensors, on the meta device too, without a launch."""
        return self.kernel.warmup(
            *self.described(tensors), *self.arguments, grid=self.grid, **self.options
        )

    def described(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """The tensors, the first of them as the descriptors that TMA takes."""
        pairs = zip(self.descriptors, tensors, strict=False)
        described = [_with_tensor(descriptor, x) for descriptor, x in pairs]
        return described + list(tensors[len(described) :])


def replay(
    compiled: Any, grid: tuple[int, ...], arguments: list[Any], slots: list[Slot]
) -> Callable[..., None]:
    """Triton's launch of a compiled kernel, again for other tensors and on the stream of now.

    Triton would encode every descriptor again, and ask the driver about each tensor, but not about an
    address. Its launch hooks, by which its own profiler listens, are not called; memory for scratch, which
    it would allocate, our kernels do not use.

    The call is written out and compiled with every argument in its place: to fill in a list and unpack it
    takes 0.9 to 1.8 us more, of 6 to 11 us a launch (H100, torch 2.11, Triton 3.6, Python 3.12).

    Returns:
        Takes the tensors, on the device that is current now.
    """
    driver = triton.runtime.driver.active
    launch, options, is_packed = _record_call(compiled, grid, arguments)
    # Triton 3.8 and newer unload a kernel that nobody holds any more.
    values = {"launch": launch, "stream": driver.get_current_stream, "compiled": compiled}
    values["device"] = driver.get_current_device()
    values |= {f"option{place}": option for place, option in enumerate(options)}
    values |= {f"argument{place}": argument for place, argument in enumerate(arguments)}
    values |= {f"maps{number}": maps for number, (_, maps) in enumerate(slots)}

    before_kernel = [f"option{place}" for place in range(len(options))]
    before_kernel[STREAM] = "stream(device)"
    of_kernel = [f"argument{place}" for place in range(len(arguments))]
    for number, (slot, maps) in enumerate(slots):
        address = f"x{number}.data_ptr()"
        of_kernel[slot] = address if maps is None else f"maps{number}[{address}]"

    passed = ", ".join(of_kernel)
    if is_packed:
        passed = f"({passed},)"
    tensors = ", ".join(f"x{number}" for number in range(len(slots)))
    return eval(f"lambda {tensors}: launch({', '.join(before_kernel)}, {passed})", values)


def _record_call(
    compiled: Any, grid: tuple[int, ...], arguments: list[Any]
) -> tuple[Callable[..., None], list[Any], bool]:
    """Triton's function in C that launches, what precedes a kernel's arguments, whether they are a tuple."""
    recorder = copy.copy(compiled.run)
    call: list[Any] = []
    recorder.launch = lambda *values: call.extend(values)
    hooks = None, None, None  # and their argument
    recorder(*grid, None, compiled.function, compiled.packed_metadata, *hooks, *arguments)
    launch = compiled.run.launch
    if compiled.metadata.tensordesc_meta:
        # Around the one in C, this one encodes descriptors.
        launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    # Triton 3.7 and newer have the kernel's arguments in a tuple, which comes last.
    if call[-1] == tuple(arguments):
        return launch, call[:-1], True
    # Triton 3.6 has them one by one.
    return launch, call[: -len(arguments)], False


class TensorMaps(dict):
    """What TMA reads of a descriptor, by the address of the tensor: addresses come again and again."""

    def __init__(self, descriptor: Any, meta: dict[str, Any], device: torch.device) -> None:
        super().__init__()
        self.descriptor = descriptor
        self.meta = meta
        self.device = device

    def __missing__(self, address: int) -> Any:
        from triton.backends.nvidia.driver import make_tensordesc_arg

        if len(self) == MAX_MAPS:
            self.clear()
        base = SimpleNamespace(data_ptr=lambda: address)
        with device_context(self.device):
            arguments = [_with_tensor(self.descriptor, base), self.meta]
            # Triton 3.8 and 3.9 have a third, for another vendor's GPUs.
            if len(inspect.signature(make_tensordesc_arg).parameters) > 2:
                arguments.append(None)
            self[address], *_ = make_tensordesc_arg(*arguments)
        return self[address]


def _with_tensor(descriptor: Any, x: Any) -> Any:
    """A copy of the descriptor for this tensor, without the constructor's checks."""
    described = copy.copy(descriptor)
    described.base = x
    return described
