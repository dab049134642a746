"""What every Triton kernel here needs from the machine: compiler or interpreter, device, alignment."""

import contextlib
import threading
from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch._C._dynamo import guards
from triton.runtime import JITFunction

INTERPRETED = triton.knobs.runtime.interpret
# Triton's own functions choose between compiler and interpreter when Triton is first imported.
TOO_LATE = INTERPRETED and isinstance(tl.max, JITFunction)
ALIGNMENT = 16  # bytes; what TMA asks of addresses and of every stride but the last
INTERPRETER = (0, 0)  # in place of a compute capability
# torch.cuda.current_device in half the time: where there are tensors on a GPU, CUDA runs. None without CUDA.
current_device = getattr(torch._C, "_cuda_getDevice", None)


def _mend_index() -> None:
    """Let range() in a kernel take a number: an array of one element, which NumPy from 2.4 on makes no int of."""
    from triton.runtime import interpreter

    prepare = interpreter._patch_lang_tensor

    def prepare_with_index(tensor: type, scope: "interpreter._LangPatchScope") -> None:
        prepare(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda number: number.handle.data.item())

    interpreter._patch_lang_tensor = prepare_with_index


if INTERPRETED and triton.__version__.startswith("3.6."):  # 3.7 does so itself
    _mend_index()


def check_device(names: str, x: Tensor) -> None:
    """Refuse tensors, called by these names, on a device where no kernel runs.

    Raises:
        ValueError: x is neither on a CUDA GPU nor are kernels interpreted.
        RuntimeError: kernels should be interpreted, and Triton was imported too early for that.
    """
    if not (x.is_cuda or INTERPRETED):
        raise ValueError(
            f"{names} are on {x.device}; allowed: a CUDA GPU, or any device in Triton's interpreter "
            "(TRITON_INTERPRET=1)"
        )
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
    devices = _thread.__dict__.setdefault("devices", set())  # whose contexts are this thread's, too
    if device not in devices:
        if device.type != "cuda":
            return _NOTHING
        torch.zeros(1, device=device)
        devices.add(device)
    return _NOTHING if device.index == torch.cuda.current_device() else torch.cuda.device(device)
