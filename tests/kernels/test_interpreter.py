"""One table: what an operation gives in the interpreter, or compiled for a GPU, is what PyTorch gives."""

import pytest
import torch
from torch import Tensor, inf, nan

pytest.importorskip("triton", reason="there is no triton for this platform")

import triton
import triton.language as tl
from layouts import DEVICE
from torch.testing import assert_close

from cs336_systems import checks  # noqa: F401  mends the interpreter and hastens it

N = 16


def numbers(dtype=torch.bfloat16) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(2, N, generator=generator)
    # Ties, a NaN, an infinity, a zero with a sign, and what only the larger type can tell apart.
    x[:6] = torch.tensor([1.0, 257.0, nan, inf, -0.0, 3.0])
    y[:6] = torch.tensor([2.0**-8, 1.0, 1.0, -1.0, 0.0, 1.0 + 2.0**-7])
    return x.to(DEVICE, dtype), y.to(DEVICE, dtype)


@triton.jit
def add(x, y):
    return x + y


@triton.jit
def negate(x, y):
    return -x


@triton.jit
def with_constants(x, y):
    return x * 0.3 + 1


@triton.jit
def greater(x, y):
    return tl.where(x > y, x, y)


@triton.jit
def filled(x, y):
    return tl.full((16,), 0.1, tl.bfloat16) + tl.zeros_like(x)


@triton.jit
def from_integers(x, y):
    return (tl.arange(0, 16) * 37).to(tl.bfloat16)


@triton.jit
def to_integers(x, y):
    return tl.where((x > -100) & (x < 1000), x, 0.0).to(tl.int32).to(tl.float32)


@triton.jit
def through_float16(x, y):
    return (x.to(tl.float16) * 1.5).to(tl.bfloat16)


@triton.jit
def least(x, y):
    return tl.minimum(x, y)


@triton.jit
def clamped(x, y):
    return tl.clamp(x.to(tl.float32), -1.0, 1.0)


@triton.jit
def clamped_with_nan(x, y):
    return tl.clamp(x.to(tl.float32), -1.0, 1.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def masks_added(x, y):
    return ((x > 0) + (y > 0)).to(tl.float32)


def multiples_of_37(x: Tensor, y: Tensor) -> Tensor:
    numbers = torch.arange(N, device=x.device)
    return (numbers * 37).to(x)


def without_nan(x: Tensor, y: Tensor) -> Tensor:
    between = x.float().clamp(-1, 1)
    return between.nan_to_num(-1)


def one_of_two(x: Tensor, y: Tensor) -> Tensor:
    is_positive = (x > 0) ^ (y > 0)
    return is_positive.float()


def whole_numbers(x: Tensor, y: Tensor) -> Tensor:
    is_small = (x > -100) & (x < 1000)
    kept = torch.where(is_small, x, 0.0)
    return kept.int().float()


# By the kernel's function: what PyTorch gives in the type of x.
TABLE = {
    add: torch.add,
    negate: lambda x, y: 0 - x,
    with_constants: lambda x, y: x * torch.tensor(0.3).to(x) + 1,
    greater: lambda x, y: torch.where(x > y, x, y),
    filled: lambda x, y: torch.full_like(x, 0.1),
    from_integers: multiples_of_37,
    to_integers: whole_numbers,
    through_float16: lambda x, y: (x.half() * 1.5).to(x),
    least: torch.fmin,
    clamped: without_nan,
    clamped_with_nan: lambda x, y: x.float().clamp(-1, 1),
    masks_added: one_of_two,
}


@triton.jit
def apply(x_ptr, y_ptr, z_ptr, FUNCTION: tl.constexpr):
    place = tl.arange(0, 16)
    x = tl.load(x_ptr + place)
    y = tl.load(y_ptr + place)
    z = FUNCTION(x, y)
    tl.store(z_ptr + place, z)


@pytest.mark.parametrize("function", TABLE, ids=lambda function: function.__name__)
def test_an_operation_is_pytorchs(function):
    x, y = numbers()
    wanted = TABLE[function](x, y)
    result = torch.empty_like(wanted)
    apply[(1,)](x, y, result, function)
    assert_close(result, wanted, rtol=0, atol=0, equal_nan=True)


@triton.jit
def reduce_rows(x_ptr, sum_ptr, max_ptr, all_ptr, COLUMNS: tl.constexpr):
    rows = tl.arange(0, 4)
    columns = tl.arange(0, COLUMNS)
    x = tl.load(x_ptr + rows[:, None] * COLUMNS + columns[None, :])
    kept = tl.sum(x, 1, keep_dims=True)
    tl.store(sum_ptr + rows, tl.reshape(kept, (4,)))
    tl.store(max_ptr + rows, tl.max(x, 1))
    tl.store(all_ptr, tl.sum(x))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_reductions_are_of_numbers(dtype):
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(4, 64, generator=generator).to(DEVICE, dtype)
    of_rows = x.new_empty(4)
    largest = x.new_empty(4)
    of_all = x.new_empty(1)
    reduce_rows[(1,)](x, of_rows, largest, of_all, 64)
    # Every partial sum may be rounded: six halvings of numbers of about eight.
    error = 6 * 8 * torch.finfo(dtype).eps
    assert_close(of_rows, x.sum(1), rtol=0, atol=error)
    assert_close(of_all, x.sum().reshape(1), rtol=0, atol=4 * error)
    assert_close(largest, x.amax(1), rtol=0, atol=0)


@triton.jit
def add_atomically(x_ptr, total_ptr):
    place = tl.arange(0, 16)
    tl.atomic_add(total_ptr + place % 2, tl.load(x_ptr + place))


@pytest.mark.skipif(DEVICE == "cuda", reason="a GPU adds them")
def test_an_atomic_sum_is_refused():
    x = torch.ones(N, device="cpu").bfloat16()
    with pytest.raises(Exception, match="add float32"):
        add_atomically[(1,)](x, x.new_zeros(2))
