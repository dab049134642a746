"""Triton's interpreter, mended: where it computes otherwise than compiled code does.

bfloat16: NumPy has none, and the interpreter computes with its bit patterns as integers. Here every operation
is done in float32 and rounded once, to the nearest, as a GPU's is; atomic additions are refused. Masks: of
truth values a sum is an exclusive or, not an or. NaN: clamp, minimum and maximum drop it unless they are told
to pass it on.
tests/kernels/test_interpreter.py has the table of cases; what runs on a GPU is not touched.
"""

import numpy as np
import triton.language as tl
from triton._C.libtriton import ir
from triton.runtime import interpreter
from triton.runtime.interpreter import (
    InterpreterBuilder,
    ReduceOps,
    TensorHandle,
)

_sum = ReduceOps.sum
_patch_tensor = interpreter._patch_lang_tensor


def _is_bfloat16(x: TensorHandle) -> bool:
    return x.dtype.scalar == tl.bfloat16


def _numbers(bits: np.ndarray) -> np.ndarray:
    """The float32 numbers of bfloat16's bit patterns, which are their upper halves."""
    return (bits.astype(np.uint32) << 16).view(np.float32)


def _bits(numbers: np.ndarray) -> np.ndarray:
    """Numbers as bfloat16's bit patterns, rounded to the nearest, ties to even; NaN as a GPU writes it."""
    with np.errstate(over="ignore"):
        single = numbers.astype(np.float32)
    bits = single.view(np.uint32)
    # The upper 16 bits stay. 0x7FFF carries into them if the lower were more than 0x8000, a half of the last
    # that stays; if that one is_odd, a half carries, too: 0x3F808000 (1 + 2^-8) becomes 0x3F80, 0x3F818000
    # (1 + 3 * 2^-8) 0x3F82.
    is_odd = (bits >> 16) & 1
    nearest = (bits + np.uint32(0x7FFF) + is_odd) >> 16
    return np.where(np.isnan(single), 0x7FFF, nearest).astype(np.uint16)


def _wide(x: TensorHandle) -> TensorHandle:
    """The same numbers in a type that NumPy has."""
    return TensorHandle(_numbers(x.data), tl.float32) if _is_bfloat16(x) else x


def _rounded(numbers: np.ndarray) -> TensorHandle:
    return TensorHandle(_bits(numbers), tl.bfloat16)


def _truth(values: np.ndarray) -> TensorHandle:
    return TensorHandle(values, tl.int1)


class MendedBuilder(InterpreterBuilder):
    """Its methods are named and called as Triton's own."""

    def cast_impl(self, src, dtype):
        if src.dtype.scalar == dtype.scalar:
            return super().cast_impl(src, dtype)
        src = _wide(src)
        is_rounded = dtype.scalar == tl.bfloat16
        return _rounded(src.data) if is_rounded else super().cast_impl(src, dtype)

    def create_fp_to_fp(self, src, dtype, rounding):
        if dtype.scalar == tl.bfloat16 and rounding == ir.ROUNDING_MODE.RTNE:
            return self.cast_impl(src, dtype)
        return super().create_fp_to_fp(src, dtype, rounding)

    def binary_op(self, lhs, rhs, op):
        if _is_bfloat16(lhs):
            result = op(_wide(lhs).data, _wide(rhs).data)
            return _truth(result) if result.dtype == np.bool_ else _rounded(result)
        # One bit wraps around, but NumPy's sum of truth values is an or, and it refuses their difference.
        if op in (np.add, np.subtract) and lhs.data.dtype == rhs.data.dtype == np.bool_:
            op = np.logical_xor
        result = super().binary_op(lhs, rhs, op)
        # A comparison's result has the type of its operands, of which Triton 3.9 makes numbers again.
        return _truth(result.data) if result.data.dtype == np.bool_ else result

    def unary_op(self, x, op):
        result = op(_wide(x).data)
        return _rounded(result) if _is_bfloat16(x) else TensorHandle(result, x.dtype.scalar)

    def create_fma(self, x, y, z):
        result = super().create_fma(_wide(x), _wide(y), _wide(z))
        return _rounded(result.data) if _is_bfloat16(z) else result

    def create_dot(self, a, b, *rest):
        return super().create_dot(_wide(a), _wide(b), *rest)

    def get_bf16(self, value):
        return _rounded(np.array([value]))

    def create_clampf(self, x, low, high, propagate):
        is_passed_on = propagate == ir.PROPAGATE_NAN.ALL
        larger = np.maximum if is_passed_on else np.fmax
        smaller = np.minimum if is_passed_on else np.fmin
        bounded = self.binary_op(x, low, larger)
        return self.binary_op(bounded, high, smaller)

    def create_minnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmin)

    def create_maxnumf(self, lhs, rhs):
        return self.binary_op(lhs, rhs, np.fmax)

    def create_atomic_rmw(self, kind, ptr, val, *rest):
        if _is_bfloat16(val):
            raise TypeError("the interpreter cannot add bfloat16 atomically; add float32")
        return super().create_atomic_rmw(kind, ptr, val, *rest)


def reduce_sum(self, x):
    if not _is_bfloat16(x.handle):
        return _sum(self, x)
    bits = x.handle.data
    if self.axis is None:
        # (2, 4, 8) -> (64, 1, 1): all along the first axis, and as many axes as before, for keep_dims.
        bits = bits.reshape(-1, *np.ones(bits.ndim - 1, int))
    axis = self.axis or 0
    # Halves onto halves, as threads reduce; every sum is rounded.
    while bits.shape[axis] > 1:
        first, second = np.split(bits, 2, axis)
        bits = _bits(_numbers(first) + _numbers(second))
    if not self.keep_dims:
        bits = bits[0].item() if self.axis is None else bits.squeeze(axis)
    return self.to_tensor(bits, x.dtype)


def _patch_tensor_with_index(tensor: type, scope) -> None:
    """In Triton 3.6 range() takes an array of one element, as NumPy no longer does."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda number: number.handle.data.item())


def mend() -> None:
    """Put these in place of the interpreter's own."""
    interpreter.interpreter_builder.__class__ = MendedBuilder
    ReduceOps.sum = reduce_sum
    interpreter._patch_lang_tensor = _patch_tensor_with_index
