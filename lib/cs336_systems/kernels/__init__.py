"""Triton kernels other than attention's, and what all kernels need from the machine (runtime).

`kernels.weighted_sum` is imported on first use: it needs triton.
"""

from importlib import import_module
from types import ModuleType

__all__ = ["weighted_sum"]


def __getattr__(name: str) -> ModuleType:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return import_module(f"{__name__}.{name}")
