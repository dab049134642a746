"""One kernel, prepared to be launched again and again.

A short sequence keeps the GPU busy for a few microseconds; finding the compiled kernel again at every launch,
as Triton does, would take longer than the kernel itself. So the first launch goes through Triton, and makes a
function of the tensors alone (`replay`) for all later ones.
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

STREAM = 3  # place of the stream in a call of Triton's launcher: after the grid's three numbers
MAX_MAPS = 1024  # of one tensor; then it begins anew
# Versions of Triton whose launcher `_record_call` can take apart; with others every launch goes through
# Triton. Of each a launch was compared with Triton's own, argument by argument; on a GPU, of 3.6 and 3.7.
KNOWN_INSIDE = "3.6.", "3.7.", "3.8.", "3.9."


# A tensor's place among the kernel's arguments, and what is passed there: the map for its address or, if
# None, the address itself.
Slot = tuple[int, "TensorMaps | None"]


class KernelLaunch:
    """A kernel with its grid and every argument but the tensors: `run` takes those.

    Args:
        programs: the grid, (programs, splits).
        arguments: by parameter name; there may be more than the kernel takes.
        tile: only for num_warps, num_stages and max_registers.
        descriptors: of the first tensors, which the kernel loads or stores by TMA; the others are pointers.
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
        """The first launch; every launch in the interpreter, and with a Triton not in KNOWN_INSIDE."""
        device = tensors[0].device
        with device_context(device):
            launch = self.kernel[self.grid]
            compiled = launch(*self.described(tensors), *self.arguments, **self.options)
            if compiled is not None and triton.__version__.startswith(KNOWN_INSIDE):
                arguments, slots = self._tensor_slots(compiled, device)
                self.run = replay(compiled, self.grid, arguments, slots)

    def _tensor_slots(self, compiled: Any, device: torch.device) -> tuple[list[Any], list[Slot]]:
        """All arguments as the driver passes them, None where a tensor goes, and the tensors' slots.

        Of forward_kernel with TMA, where a descriptor's map is followed by its sizes and strides:

            place       argument                           slot
            0           None, for q's map                  (0, q's maps)
            1 to 8      q's four sizes, four strides
            9 to 26     the same of k and v                (9, k's maps), (18, v's maps)
            27 to 29    None, for addresses of outputs     (27, None), (28, None), (29, None)
            30 ...      o_strides, n_heads, ..., form
        """
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
        """The kernel compiled for such tensors, which may be on the meta device; nothing is launched."""
        return self.kernel.warmup(
            *self.described(tensors), *self.arguments, grid=self.grid, **self.options
        )

    def described(self, tensors: tuple[Tensor, ...]) -> list[Any]:
        """The tensors, the first of them wrapped in their descriptors."""
        pairs = zip(self.descriptors, tensors, strict=False)
        described = [_with_tensor(descriptor, x) for descriptor, x in pairs]
        return described + list(tensors[len(described) :])


def replay(
    compiled: Any, grid: tuple[int, ...], arguments: list[Any], slots: list[Slot]
) -> Callable[..., None]:
    """A function of the tensors that repeats Triton's launch of a compiled kernel, on the stream of its call.

    At every launch Triton encodes descriptors, and asks the driver about each tensor, but not about an
    address. It also calls hooks, by which its profiler listens, and allocates scratch memory, which our
    kernels do not use: neither is done here.

    The function is generated with every argument in its place: to fill in a list and unpack it takes 0.9 to
    1.8 us more, of 6 to 11 us a launch (H100, torch 2.11, Triton 3.6, Python 3.12). For forward_kernel with
    TMA (see `_tensor_slots`), shortened, and without the inner parentheses in Triton 3.6:

        lambda x0, x1, x2, x3, x4, x5: launch(
            option0, option1, option2, stream(device), option4, ...,  # the grid, the stream, the kernel, ...
            (maps0[x0.data_ptr()], argument1, ..., maps1[x1.data_ptr()], argument10, ...,
             maps2[x2.data_ptr()], ..., x3.data_ptr(), x4.data_ptr(), x5.data_ptr(), argument30, ...))

    Its tensors have to be on the device that is current now.
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
    """(launch, options, is_packed): Triton's function in C that launches, what it is called with before the
    kernel's arguments, and whether those come as one tuple."""
    # A copy of Triton's launcher, whose call of `launch` is written down and not made.
    recorder = copy.copy(compiled.run)
    call: list[Any] = []
    recorder.launch = lambda *values: call.extend(values)
    hooks = None, None, None  # what they are told, and the two
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
    """Encoded descriptors (CUtensorMap) by the tensor's address: the allocator gives the same ones again."""

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
