"""Triton's interpreter, in half the time.

Wherever a kernel calls a function, Triton looks through all names of its language for what to interpret,
though the kernel's launch has done so: that is half of what most kernels take here.
"""

import triton.language as tl
from triton.runtime import interpreter

_patch_lang = interpreter._patch_lang


def _patch_once(function):
    """Triton's, but nothing for a function whose language is interpreted already."""
    for value in function.__globals__.values():
        if (value is tl or value is tl.core) and tl.core.is_builtin(value.load):
            return _patch_lang(function)
    return interpreter._LangPatchScope()


interpreter._patch_lang = _patch_once
