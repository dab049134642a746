"""Triton kernels other than attention's, and what all kernels need from the machine (runtime).

weighted_sum is the handout's worked example; rms_norm, rotary, swiglu and cross_entropy are the fused kernels
of a training step. Each is imported on first use: it needs triton.
"""

from importlib import import_module
from types import ModuleType

__all__ = ["cross_entropy", "rms_norm", "rotary", "swiglu", "weighted_sum"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
