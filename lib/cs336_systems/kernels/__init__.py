"""Triton kernels other than attention's, and what all kernels need from the machine (runtime).

weighted_sum is the handout's worked example; rms_norm, rotary, swiglu and cross_entropy are the fused kernels
of a training step. Each is imported on first use: it needs triton.
"""

from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

import torch

HAS_TRITON = find_spec("triton") is not None  # not on macOS
__all__ = ["cross_entropy", "rms_norm", "rotary", "swiglu", "weighted_sum"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")


def why_no_triton(device: torch.device) -> str:
    """Why the kernels cannot run on the device; "" where they can."""
    if not HAS_TRITON:
        return "our kernels need triton, which is not installed"
    from cs336_systems.kernels.runtime import INTERPRETED  # imports triton

    if device.type == "cuda" or INTERPRETED:
        return ""
    return "where there is a GPU our kernels run on it; on a CPU in the interpreter (TRITON_INTERPRET=1)"
