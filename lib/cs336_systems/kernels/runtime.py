"""What every Triton kernel goes through: compiler or interpreter, device, PyTorch's dispatcher."""

import contextlib
import threading
from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._dynamo import guards
from torch._subclasses import FakeTensor
from triton.runtime import JITFunction

from cs336_systems.kernels.autograd_guards import needs_dispatcher

INTERPRETED = triton.knobs.runtime.interpret
# Triton's own functions choose between compiler and interpreter when Triton is first imported.
TOO_LATE = INTERPRETED and isinstance(tl.max, JITFunction)
# Bytes: what TMA asks of addresses and of every stride but the last.
ALIGNMENT = 16
INTERPRETER = (0, 0)  # in place of a compute capability
# torch.cuda.current_device in half the time: where there are tensors on a GPU, CUDA runs. None without CUDA.
current_device = getattr(torch._C, "_cuda_getDevice", None)


if INTERPRETED:
    from cs336_systems.kernels import interpreter

    interpreter.mend()


@triton.jit
def load_float32(places, inside):
    """The numbers at these places, computed with in float32 whatever their dtype is; outside 0."""
    return tl.load(places, mask=inside, other=0.0).to(tl.float32)


def kernel_function(function: Callable[..., Any], mutates: str = "") -> Callable[..., Any]:
    """Decorates a function of tensors that launches kernels: a custom operator where PyTorch must see them.

    Kernels take addresses, so PyTorch's dispatcher does nothing for them. The direct call is the fast path.
    While torch.compile or make_fx traces, under FakeTensorMode and other modes, for subclasses of Tensor and
    for tensors without memory (fake, meta) or with a lazy negation, the operator runs. The function is its
    own fake implementation: there `launch_kernel` does nothing.

    mutates: the name of its first tensor, if it overwrites that: the version counter then counts it.
    """
    name = f"{function.__module__.rpartition('.')[2]}_{function.__name__}"
    changed = [mutates] if mutates else ()
    operator = torch.library.custom_op(f"cs336_systems::{name}", function, mutates_args=changed)
    operator.register_fake(function)

    @wraps(function)
    def call(*arguments: Any) -> Any:
        if needs_dispatcher(*arguments):
            return operator(*arguments)
        result = function(*arguments)
        if mutates and not arguments[0].is_inference():
            torch.autograd.graph.increment_version(arguments[0])
        return result

    return call


def launch_kernel(kernel: Any, grid: tuple[int, ...], *arguments: Any, **options: Any) -> None:
    """kernel[grid](*arguments, **options) on the device of the first tensor; of a fake one nothing runs."""
    x = next(x for x in arguments if isinstance(x, Tensor))
    if x.is_meta or isinstance(x, FakeTensor):
        return
    check_device(x)
    if 0 not in grid:
        with device_context(x.device):
            kernel[grid](*arguments, **options)


def row_tiles(
    n_rows: int, d: int, elements: int, widest: int, most_warps: int
) -> tuple[int, dict[str, int]]:
    """Cut (n_rows, d) into tiles: how many, one below the other, and their ROWS, COLUMNS and num_warps.

    COLUMNS is d, up to a power of two, but at most `widest`; ROWS as many as `elements` of a tile allow, and
    one at least; num_warps from 4 to most_warps.
    """
    columns = min(triton.next_power_of_2(d), widest)
    rows = max(1, min(elements // columns, triton.next_power_of_2(n_rows)))
    # A warp for 512 elements, 16 a thread.
    num_warps = min(max(rows * columns // 512, 4), most_warps)
    return triton.cdiv(n_rows, rows), {"ROWS": rows, "COLUMNS": columns, "num_warps": num_warps}


def check_device(x: Tensor) -> None:
    """Refuse a tensor on a device where no kernel runs.

    Raises:
        ValueError: x is neither on a CUDA GPU nor are kernels interpreted.
        RuntimeError: kernels should be interpreted, and Triton was imported too early for that.
    """
    if not (x.is_cuda or INTERPRETED):
        allowed = "a CUDA GPU, or any device in Triton's interpreter (TRITON_INTERPRET=1)"
        raise ValueError(f"the tensors are on {x.device}; allowed: {allowed}")
    if TOO_LATE:
        raise RuntimeError(
            "triton was imported before cs336_systems, which chooses Triton's interpreter where there is "
            "no GPU; import cs336_systems first, or set TRITON_INTERPRET=1"
        )


def capability(device: torch.device) -> tuple[int, int]:
    """The compute capability of a GPU, or INTERPRETER."""
    return INTERPRETER if INTERPRETED else torch.cuda.get_device_capability(device)


def sm_count(device: torch.device) -> int:
    """How many SMs a GPU has; 1 in the interpreter."""
    return 1 if INTERPRETED else torch.cuda.get_device_properties(device).multi_processor_count


def aligned(x: Tensor) -> Tensor:
    """x itself if its address is a multiple of ALIGNMENT, otherwise a copy."""
    return x if x.data_ptr() % ALIGNMENT == 0 else x.clone()


def allocator(device: torch.device) -> Callable[[tuple, tuple, torch.dtype], Tensor]:
    """Makes tensors of such a shape, strides and dtype as Inductor's code does: sooner than torch.empty_like.

    Of a GPU it is the current one.
    """
    return guards._empty_strided_cuda if device.type == "cuda" else guards._empty_strided_cpu


_thread = threading.local()
_NOTHING = contextlib.nullcontext()


def device_context(device: torch.device) -> contextlib.AbstractContextManager:
    """Make the device current, which takes time only where it is not.

    The first time in a thread, make its context current too: descriptors need one, and autograd's own threads
    start without. Any kernel of PyTorch's brings it.
    """
    # Whose contexts are this thread's, too.
    devices = _thread.__dict__.setdefault("devices", set())
    if device not in devices:
        if device.type != "cuda":
            return _NOTHING
        torch.zeros(1, device=device)
        devices.add(device)
    return _NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)
