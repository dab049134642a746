"""Triton's interpreter, in about half of the time: importing this file changes it, for the whole process.

Wherever a kernel calls a function, Triton looks through all names of its language for what to interpret,
though the kernel's launch has done so: that is up to half of what our kernels take here. Of the rest up to a
third is for sums and products of integers, computed once more in 64 bits for an assertion that is made only
where Triton debugs; and for each result it makes its table of NumPy's types.
"""

from dataclasses import replace

import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_np_dtypes = {}


def _patch_once(function):
    """Triton's, but nothing for a function whose language is interpreted already."""
    for value in function.__globals__.values():
        if (value is tl or value is tl.core) and tl.core.is_builtin(value.load):
            return _patch_lang(function)
    return interpreter._LangPatchScope()


def _get_known(dtype):
    """Triton's, of numbers, pointers or blocks of them."""
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _get_np_dtype(dtype)
    return _np_dtypes[name]


interpreter._patch_lang = _patch_once
interpreter._get_np_dtype = _get_known
builder = interpreter.interpreter_builder
builder.options = replace(builder.options, sanitize_overflow=builder.options.debug)
