"""Interpreted kernels cannot reach beyond their tensors, in whichever form they address them."""

import pytest
import torch

pytest.importorskip("triton", reason="there is no triton for this platform")

import triton
import triton.language as tl
from triton.runtime import interpreter

from cs336_systems.checks import step


@triton.jit
def by_pointers(x_ptr, y_ptr, n, seen, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(pointer=x_ptr + at, mask=at < seen, other=0.0)
    tl.store(y_ptr + at, value=x, mask=at < n)


@triton.jit
def by_block_pointers(x_ptr, y_ptr, n, seen, BLOCK: tl.constexpr):
    x = tl.make_block_ptr(x_ptr, (seen,), (1,), (0,), (BLOCK,), (0,))
    y = tl.make_block_ptr(y_ptr, (n,), (1,), (0,), (BLOCK,), (0,))
    loaded = tl.load(x, boundary_check=(0,), padding_option="zero")
    tl.store(y, loaded, boundary_check=(0,))


@triton.jit
def by_descriptors(x_ptr, y_ptr, n, seen, BLOCK: tl.constexpr):
    x = tl.make_tensor_descriptor(x_ptr, shape=[1, seen], strides=[seen, 1], block_shape=[1, BLOCK])
    y = tl.make_tensor_descriptor(y_ptr, [1, n], [n, 1], [1, BLOCK])
    y.store([0, 0], x.load([0, 0]))


FORMS = [by_pointers, by_descriptors]
if tuple(map(int, triton.__version__.split(".")[:2])) < (3, 9):  # which removed tl.make_block_ptr
    FORMS.append(by_block_pointers)


@pytest.mark.parametrize("kernel", FORMS)
def test_a_kernel_is_named_only_if_it_reaches_beyond(kernel, capsys):
    x = torch.randn(20)
    y = torch.zeros(20)
    with step("copy") as check:
        kernel[1,](x, y, 20, 20, BLOCK=32)
        check.close("a copy", y, x)
    assert capsys.readouterr().out == "✓ a copy\ncopy: right\n"
    with step("copy") as check:
        kernel[1,](x, y, 20, 24, BLOCK=32)
    assert check.passed is False
    assert f"{kernel.__name__} loads 4 numbers outside its tensors" in capsys.readouterr().out


def test_another_interpreter_is_not_watched(monkeypatch):
    monkeypatch.delattr(interpreter.GridExecutor, "_init_args_hst")
    with step("copy") as check:
        check("it goes on", True)
    assert check.passed


@triton.jit
def without_end(x_ptr):
    while True:
        tl.store(x_ptr, tl.load(x_ptr) + 1)


@triton.jit
def to_come(x_ptr):
    raise NotImplementedError()


@pytest.mark.parametrize(
    ("kernel", "passed", "mistake"),
    [
        (without_end, False, "✗ not done within 0.5 s; does a loop never end?"),
        (to_come, None, "kernel: not yet"),
    ],
)
def test_a_kernel_that_does_not_return_is_a_sentence(kernel, passed, mistake, capsys):
    with step("kernel", timeout_s=0.5) as check:
        kernel[1,](torch.zeros(1))
    assert check.passed is passed
    assert capsys.readouterr().out.startswith(mistake)
