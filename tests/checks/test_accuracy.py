"""The checks of fused kernels and of a weighted sum let what is right pass and name what is wrong."""

import pytest
import torch
from torch.nn.functional import cross_entropy

from cs336_systems.checks import FUSED, check_fused, check_weighted_sum

PLAIN = {name: kernel.plain for name, kernel in FUSED.items()}


def half_a_gradient(x, weight):
    """RMSNorm whose gradient has forgotten that r depends on x."""
    return x * (x.detach().pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt() * weight


def formula(x, weight):
    return (x * weight).sum(-1)


def scaled_gradient(x, weight):
    return formula(x, weight.detach() + 0.999 * (weight - weight.detach()))


@pytest.mark.parametrize("name", FUSED)
def test_pytorchs_own_passes(name):
    lines = check_fused(name, PLAIN[name], dtype=torch.bfloat16)
    assert (lines["ratio"] <= 1).all()
    assert set(lines["tensor"]) == {"output"} | {f"d{x}" for x in FUSED[name].tensors if x.islower()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_a_right_sum_passes(dtype):
    table = check_weighted_sum(formula, dtype=dtype)
    assert set(table.tensor) == {"output", "dx", "dw"}
    assert (table.ratio <= 1).all()


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("rms_norm", half_a_gradient, r"dx of rms_norm \(64, 128\) is off by"),
        ("rms_norm", lambda x, w: PLAIN["rms_norm"](x, w.detach()), "dweight of rms_norm .* is missing"),
        ("rms_norm", lambda x, w: PLAIN["rms_norm"](x, w) * torch.nan, "output .* is off by nan"),
        ("rotary", lambda x, cos, sin: PLAIN["rotary"](x, cos, -sin), "output of rotary"),
        ("swiglu", lambda a, b: PLAIN["swiglu"](b, a), "output of swiglu"),
        ("swiglu", lambda a, b: PLAIN["swiglu"](a, b).bfloat16(), "bfloat16; wanted: .*float32"),
        ("swiglu", lambda a, b: PLAIN["swiglu"](a, b).flatten(), "wanted"),
        (
            "linear_cross_entropy",
            lambda h, w, t: cross_entropy((h @ w.T).flatten(0, -2), t.flatten() % 37),
            "output of linear_cross_entropy",
        ),
        ("sum", scaled_gradient, "^dw of x .* is off by"),
        ("sum", lambda x, w: formula(x, w)[..., None], r"output of x \(64, 128\) is \(64, 1\)"),
        ("sum", lambda x, w: formula(x[..., :-1], w[:-1]), "output of x .* is off by"),
    ],
)
def test_what_is_wrong_is_named(name, wrong, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_weighted_sum(wrong, seed=0) if name == "sum" else check_fused(name, wrong)
