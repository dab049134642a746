"""The checks of fused kernels and of a weighted sum let what is right pass and name what is wrong."""

from functools import partial

import pytest
import torch
from solutions import as_contiguous, with_backward

from cs336_systems.checks import FUSED, check_fused, check_weighted_sum

PLAIN = {name: kernel.plain for name, kernel in FUSED.items()}
PLAIN["sum"] = lambda x, w: (x * w).sum(-1)
CHECKS = {name: partial(check_fused, name) for name in FUSED}
CHECKS["sum"] = check_weighted_sum


def half_a_gradient(x, weight):
    """RMSNorm whose gradient has forgotten that r depends on x."""
    mean_square = x.detach().pow(2).mean(-1, keepdim=True)
    return x * (mean_square + 1e-5).rsqrt() * weight


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", CHECKS)
def test_pytorchs_own_passes(name, dtype):
    lines = CHECKS[name](PLAIN[name], dtype=dtype)
    assert (lines["ratio"] <= 1).all()
    tensors = FUSED[name].tensors if name in FUSED else "xw"
    gradients = {f"d{x}" for x in tensors if x.islower()}
    assert set(lines["tensor"]) == gradients | {"output"}


def with_a_scaled_gradient(x, w):
    return PLAIN["sum"](x, w.detach() + 0.999 * (w - w.detach()))


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("rms_norm", half_a_gradient, r"dx of rms_norm \(64, 128\) is off by"),
        (
            "rms_norm",
            lambda x, w: PLAIN["rms_norm"](x, w.detach()),
            "dweight of rms_norm .* is missing",
        ),
        ("swiglu", lambda a, b: PLAIN["swiglu"](b, a), "output of swiglu"),
        ("swiglu", lambda a, b: PLAIN["swiglu"](a, b).bfloat16(), "bfloat16; wanted: .*float32"),
        ("sum", with_a_scaled_gradient, "^dw of x .* is off by"),
        (
            "sum",
            lambda x, w: PLAIN["sum"](x, w)[..., None],
            r"output of x \(64, 128\) is \(64, 1\)",
        ),
        (
            "sum",
            with_backward(PLAIN["sum"], reads=as_contiguous),
            "dx of x .* read others by their strides",
        ),
        ("swiglu", with_backward(PLAIN["swiglu"], lambda own, last: last), "da .* in ctx alone"),
    ],
)
def test_what_is_wrong_is_named(name, wrong, sentence):
    with pytest.raises(AssertionError, match=sentence):
        CHECKS[name](wrong, seed=0)
