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

# Native functions, what they do, and which of their arguments are the addresses and the mask.
_ACCESSES = {"load": ("loads", 0, 1), "store": ("stores", 0, 2), "atomic_rmw": ("adds", 1, 3)}

_nan_for_zeros = patch("numpy.zeros_like", partial(np.full_like, fill_value=np.nan))


@contextlib.contextmanager
def inside_tensors() -> Iterator[Counter]:
    """Interpreted kernels cannot reach beyond the tensors they are given, and multiply in TF32 by default.

    It is not for kernels that take addresses from integers. In another interpreter than the one that is known
    here kernels run unwatched.

    Yields what they have done: numbers that they loaded, stored and added, calls of tl.dot, divisions.
    """
    interpreter = sys.modules.get("triton.runtime.interpreter")
    name = "kernels"
    extents = []
    work = Counter()

    def watched(original, does, addresses, mask):
        def access(*args):
            places = args[addresses]
            # Of a block pointer the mask may be of one dimension.
            wanted = np.broadcast_to(args[mask], places.shape)
            outside = _outside(places[wanted.astype(bool)], extents)
            assert not outside, (
                f"{name} {does} {outside} numbers outside its tensors: is the place right, and are both "
                "edges masked?"
            )
            work[does] += wanted.sum()
            return original(*args)

        return access

    def to_host(executor, *device_arguments):
        nonlocal name, extents
        arguments = to_host_of_triton(executor, *device_arguments)
        name = executor.fn.__name__
        extents = _extents(arguments)
        return arguments

    def divide(*args):
        work["divisions"] += 1
        return divide_of_triton(*args)

    def dot(builder, a, b, acc, precision, *rest):
        work["dots"] += 1
        # 16 bits have no more than ten that count.
        if precision.name == "TF32" and a.data.itemsize == 4:
            a = _in_ten_bits(a)
            b = _in_ten_bits(b)
        return dot_of_triton(builder, a, b, acc, precision, *rest)

    with contextlib.ExitStack() as patches:
        try:
            native = interpreter._interpreter
            builder = interpreter.InterpreterBuilder
            # What is masked without an `other` is on a GPU whatever a register held.
            nan_where_masked = _nan_for_zeros(builder.create_masked_load)
            load = np.errstate(invalid="ignore")(nan_where_masked)
            divide_of_triton = builder.create_fdiv
            dot_of_triton = builder.create_dot
            to_host_of_triton = interpreter.GridExecutor._init_args_hst
            accesses = {
                access: watched(getattr(native, access), *places)
                for access, places in _ACCESSES.items()
            }
        except AttributeError:
            pass
        else:
            patches.enter_context(patch.multiple(native, **accesses))
            patches.enter_context(
                patch.multiple(builder, create_dot=dot, create_fdiv=divide, create_masked_load=load)
            )
            patches.enter_context(patch.object(interpreter.GridExecutor, "_init_args_hst", to_host))
        yield work


def _in_ten_bits(x):
    """What TF32 keeps of an operand of 32 bits."""
    bits = x.data.view("uint32") & 0xFFFFE000
    return type(x)(bits.view("float32"), x.dtype)


def _outside(places, extents):
    inside = np.zeros(places.shape, bool)
    for first, end in extents:
        inside |= (places >= first) & (places < end)
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
