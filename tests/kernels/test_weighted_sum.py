"""The weighted sum in Triton: right for every shape, layout and dtype; on a GPU or in the interpreter."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cs336_systems.checks import check_weighted_sum

pytest.importorskip("triton")
from cs336_systems.kernels import weighted_sum as kernels
from cs336_systems.kernels.weighted_sum import forward_from_descriptor, partial_sums, tile_sizes, weighted_sum

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_at_most_twice_pytorchs(dtype):
    check_weighted_sum(weighted_sum, dtype=dtype)


@settings(max_examples=15)
@given(st.lists(st.integers(1, 9), max_size=3), st.integers(1, 70))
def test_any_shape(leading, d):
    check_weighted_sum(weighted_sum, shapes=[(*leading, d)])


LAYOUTS = {
    "columns first": lambda x: x.mT.contiguous().mT,
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "every second column": lambda x: x.repeat_interleave(2, 1)[:, ::2],
    "one element off alignment": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "the same row everywhere": lambda x: x[:1].expand(x.shape),
}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_any_layout(layout):
    x = layout(torch.randn(33, 50, device=DEVICE)).detach().requires_grad_()
    weight = torch.randn(100, device=DEVICE)[::2].detach().requires_grad_()
    y = weighted_sum(x, weight)
    torch.testing.assert_close(y, x @ weight, rtol=1e-4, atol=1e-4)
    for dy in (torch.ones((), device=DEVICE).expand(33), torch.randn(66, device=DEVICE)[::2]):
        ours = torch.autograd.grad(y, (x, weight), dy, retain_graph=True)
        wanted = torch.autograd.grad(x @ weight, (x, weight), dy)
        for mine, other in zip(ours, wanted, strict=True):
            torch.testing.assert_close(mine, other, rtol=1e-4, atol=1e-4)


def test_many_rows_a_partial_sum(monkeypatch):
    """Programs that walk down several tiles, the last one short and one of them with nothing left to do."""
    monkeypatch.setattr(kernels, "MOST_PARTIALS", 7)
    x = torch.randn(8 * 5 + 3, 512, device=DEVICE)
    assert tile_sizes(*x.shape) == (8, 512)
    assert partial_sums(*x.shape) == 6
    monkeypatch.setattr(kernels, "MOST_PARTIALS", 2)
    assert partial_sums(*x.shape) == 2
    dy, weight = torch.randn(len(x), device=DEVICE), torch.randn(512, device=DEVICE)
    dx, dw = kernels.backward(dy, x, weight)
    torch.testing.assert_close(dw, dy @ x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx, dy[:, None] * weight)


@pytest.mark.parametrize("shape", [(37, 100), (5, 2048)])
def test_from_a_descriptor(shape):
    x, weight = torch.randn(shape, device=DEVICE), torch.randn(shape[1], device=DEVICE)
    torch.testing.assert_close(forward_from_descriptor(x, weight), x @ weight, rtol=1e-4, atol=1e-4)
    every_second = torch.stack((weight, weight + 1), -1)[:, 0]
    torch.testing.assert_close(forward_from_descriptor(x, every_second), x @ weight, rtol=1e-4, atol=1e-4)


def test_same_bits_every_time():
    x, weight = torch.randn(100, 64, device=DEVICE), torch.randn(64, device=DEVICE)
    dy = torch.randn(100, device=DEVICE)
    assert torch.equal(kernels.backward(dy, x, weight)[1], kernels.backward(dy, x, weight)[1])


@pytest.mark.parametrize(
    ("x", "weight", "error", "sentence"),
    [
        (torch.zeros(2, 3), torch.zeros(4), ValueError, r"shapes \(2, 3\), \(4,\); allowed: \(..., d\) and"),
        (torch.zeros(()), torch.zeros(1), ValueError, "allowed"),
        (torch.zeros(0, 3), torch.zeros(3), ValueError, "no dimension of size 0"),
        (torch.zeros(2, 3).double(), torch.zeros(3).double(), TypeError, "float64.*allowed: both the same"),
        (torch.zeros(2, 3).half(), torch.zeros(3), TypeError, "float16, torch.float32"),
        (torch.zeros(2, 3), torch.zeros(3, device="meta"), ValueError, "devices cpu, meta"),
    ],
)
def test_bad_input_is_named(x, weight, error, sentence):
    with pytest.raises(error, match=sentence):
        weighted_sum(x, weight)


def test_beside_a_gpu_tensors_of_the_cpu_are_refused(monkeypatch):
    monkeypatch.setattr("cs336_systems.kernels.runtime.INTERPRETED", False)
    with pytest.raises(ValueError, match="on cpu; allowed: a CUDA GPU"):
        weighted_sum(torch.zeros(2, 3), torch.zeros(3))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_large_on_a_gpu(dtype):
    """More rows than programs, and offsets past 2^31."""
    check_weighted_sum(weighted_sum, shapes=[(100_003, 1000), (2, 8191, 1024), (3, 100_001)], dtype=dtype)
    x = torch.ones(2**16 + 1, 2**15, device="cuda", dtype=torch.float16)
    weight = torch.full((2**15,), 2.0**-15, device="cuda", dtype=torch.float16)
    assert (weighted_sum(x, weight) == 1).all()
    dx, _ = kernels.backward(torch.ones(len(x), device="cuda", dtype=x.dtype), x, weight)
    assert (dx[-1] == weight).all()
