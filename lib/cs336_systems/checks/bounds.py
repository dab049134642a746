"""In Triton's interpreter what goes wrong on a GPU goes wrong, too.

An access outside a kernel's tensors is an AssertionError, before it happens.
On a CPU such a store overwrites whatever the allocator keeps there, and ends the process, a notebook's kernel
too. Pointers, block pointers and tensor descriptors are watched where all of them end: in the interpreter's
native functions, which take arrays of addresses and of masks. And of float32 tl.dot multiplies ten bits, as
tensor cores do, unless it is told otherwise.
"""

import contextlib
import sys
from collections import Counter
from collections.abc import Iterator
from functools import partial
from unittest.mock import patch

import numpy as np
from torch import Tensor
from torch.utils._pytree import tree_leaves

# Native functions, what they do, and the places of the addresses and of the mask among their arguments.
_ACCESSES = {"load": ("loads", 0, 1), "store": ("stores", 0, 2), "atomic_rmw": ("adds", 1, 3)}

# Decorates what fills with zeros: while it runs, they are NaN.
_nan_for_zeros = patch("numpy.zeros_like", partial(np.full_like, fill_value=np.nan))


@contextlib.contextmanager
def inside_tensors() -> Iterator[Counter]:
    """Interpreted kernels cannot reach beyond the tensors they are given, and multiply in TF32 by default.

    It is not for kernels that take addresses from integers. In another interpreter than the one that is known
    here kernels run unwatched.

    Yields what they have done: numbers that they loaded, stored and added, calls of tl.dot, divisions.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    work = Counter()
    with contextlib.ExitStack() as stack:
        # `_replacements` raises it of an interpreter that is not known here.
        with contextlib.suppress(AttributeError):
            for where, functions in _replacements(interpreter, work).items():
                stack.enter_context(patch.multiple(where, **functions))
        yield work


def _replacements(interpreter, work):
    """By where they are, functions that watch and count; AttributeError: the interpreter is another one."""
    # Of the one that runs: its name, and the extents of its tensors.
    kernel = {}
    native = interpreter._interpreter
    builder = interpreter.InterpreterBuilder
    executor = interpreter.GridExecutor
    # What is masked without an `other` is on a GPU whatever a register held.
    masked_load = _nan_for_zeros(builder.create_masked_load)
    replacements = {executor: {"_init_args_hst": _noted(executor._init_args_hst, kernel)}}
    replacements[native] = {
        name: partial(_access, getattr(native, name), kernel, work, *access)
        for name, access in _ACCESSES.items()
    }
    replacements[builder] = {
        "create_masked_load": np.errstate(invalid="ignore")(masked_load),
        "create_fdiv": _counted(builder.create_fdiv, work, "divisions"),
        "create_dot": _counted(_in_tf32(builder.create_dot), work, "dots"),
    }
    return replacements


def _access(function, kernel, work, verb, address_place, mask_place, *args):
    """Call a native function, if it stays inside tensors."""
    addresses = args[address_place]
    # Of a block pointer the mask may be of one dimension.
    wanted = np.broadcast_to(args[mask_place], addresses.shape)
    outside = _outside(addresses[wanted.astype(bool)], kernel["extents"])
    assert not outside, (
        f"{kernel['name']} {verb} {outside} numbers outside its tensors: is the place right, and are both "
        "edges masked?"
    )
    work[verb] += wanted.sum()
    return function(*args)


def _noted(to_host, kernel):
    """What copies a kernel's arguments to the host, and then knows where they lie."""

    def note(executor, *device_arguments):
        arguments = to_host(executor, *device_arguments)
        kernel.update(name=executor.fn.__name__, extents=_extents(arguments))
        return arguments

    return note


def _counted(function, work, what):
    def count(*args):
        work[what] += 1
        return function(*args)

    return count


def _in_tf32(dot):
    def dot_in_tf32(builder, a, b, acc, precision, *rest):
        # 16 bits have no more than ten that count.
        if precision.name == "TF32" and a.data.itemsize == 4:
            a = _in_ten_bits(a)
            b = _in_ten_bits(b)
        return dot(builder, a, b, acc, precision, *rest)

    return dot_in_tf32


def _in_ten_bits(x):
    """What TF32 keeps of an operand of 32 bits."""
    bits = x.data.view("uint32") & 0xFFFFE000
    return type(x)(bits.view("float32"), x.dtype)


def _outside(addresses, extents):
    inside = np.zeros(addresses.shape, bool)
    for first, end in extents:
        inside |= (addresses >= first) & (addresses < end)
    return np.sum(~inside)


def _extents(arguments):
    """The addresses of each tensor's first number and behind its last."""
    extents = []
    for leaf in tree_leaves(arguments):
        # Of a descriptor or a wrapper: its tensor.
        x = getattr(leaf, "base", leaf)
        if isinstance(x, Tensor) and x.numel():
            last = x[(-1,) * x.ndim]
            extents.append((x.data_ptr(), last.data_ptr() + x.element_size()))
    return extents
