"""Kernels with a fault in them, for readers and checks that have to find it."""

from types import FunctionType

import triton


def planted(kernel, **pieces):
    """The Triton kernel with other pieces in place of the functions that it calls by these names."""
    function = FunctionType(kernel.fn.__code__, kernel.fn.__globals__ | pieces, kernel.fn.__name__)
    function.__annotations__ = kernel.fn.__annotations__
    return triton.jit(function)
