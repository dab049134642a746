"""check_weighted_sum accepts what is right, and names the result that is wrong."""

import pytest
import torch

from cs336_systems.checks import check_weighted_sum


def formula(x, weight):
    return (x * weight).sum(-1)


class ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return formula(x, weight)

    @staticmethod
    def backward(ctx, dy):
        x, weight = ctx.saved_tensors
        dw = (dy[..., None] * x).reshape(-1, x.shape[-1]).sum(0)
        return dy[..., None] * weight, dw * 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_accepts_what_is_right(dtype):
    table = check_weighted_sum(formula, dtype=dtype)
    assert set(table.tensor) == {"y", "dx", "dw"}
    assert (table.ratio <= 1).all()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (ScaledGradient.apply, "^dw of x .* is off by"),
        (lambda x, weight: formula(x, weight)[..., None], r"y of x \(64, 128\) is \(64, 1\)"),
        (lambda x, weight: formula(x, weight).double(), "y of x .*float64; wanted: .*float32"),
        (lambda x, weight: formula(x, weight.detach()), "dw of x .* is missing"),
        (lambda x, weight: formula(x[..., :-1], weight[:-1]), "y of x .* is off by"),
        (lambda x, weight: formula(x, weight) * float("nan"), "y of x .* is off by nan"),
    ],
)
def test_names_what_is_wrong(wrong, message):
    with pytest.raises(AssertionError, match=message):
        check_weighted_sum(wrong, seed=0)
