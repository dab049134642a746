"""The check of a weighted sum lets what is right pass and names what is wrong."""

import pytest
import torch
from solutions import as_contiguous

from cs336_systems.checks import check_weighted_sum


def plain(x, w):
    return (x * w).sum(-1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pytorchs_own_passes(dtype):
    lines = check_weighted_sum(plain, dtype=dtype)
    assert (lines["ratio"] <= 1).all()
    assert set(lines["tensor"]) == {"output", "dx", "dw"}


def with_a_scaled_gradient(x, w):
    return plain(x, w.detach() + 0.999 * (w - w.detach()))


class ReadsContiguous(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return plain(x, w)

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        dy = as_contiguous(dy)[..., None]
        return dy * w, (dy * x).flatten(0, -2).sum(0)


@pytest.mark.parametrize(
    ("wrong", "sentence"),
    [
        (with_a_scaled_gradient, r"^dw of x .* is off by 0\.000"),
        (lambda x, w: plain(x, w.detach()), "^dw of x .* is missing"),
        (lambda x, w: plain(x, w).bfloat16(), "bfloat16; wanted: .*float32"),
        (lambda x, w: plain(x, w)[..., None], r"output of x \(64, 128\) is \(64, 1\)"),
        (ReadsContiguous.apply, "dx of x .* read others by their strides"),
    ],
)
def test_what_is_wrong_is_named(wrong, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_weighted_sum(wrong)
