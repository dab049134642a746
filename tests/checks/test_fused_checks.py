"""The check of a fused kernel lets what is right pass and names what is wrong."""

import pytest
import torch

from cs336_systems.checks import FUSED, check_fused

PLAIN = {name: kernel.plain for name, kernel in FUSED.items()}


class NoWeightGradient(torch.autograd.Function):
    """RMSNorm whose backward has forgotten the second half of dx, and the weight."""

    @staticmethod
    def forward(ctx, x, weight):
        r = (x.pow(2).mean(-1, keepdim=True) + 1e-5).rsqrt()
        ctx.save_for_backward(weight, r)
        return x * r * weight

    @staticmethod
    def backward(ctx, dy):
        weight, r = ctx.saved_tensors
        return dy * weight * r, None


@pytest.mark.parametrize("name", FUSED)
def test_pytorchs_own_passes(name):
    lines = check_fused(name, PLAIN[name], dtype=torch.bfloat16)
    assert (lines["ratio"] <= 1).all()
    assert set(lines["tensor"]) == {"output"} | {f"d_{x}" for x in FUSED[name].tensors if x.islower()}


@pytest.mark.parametrize(
    ("name", "wrong", "sentence"),
    [
        ("rms_norm", NoWeightGradient.apply, r"d_x of rms_norm \(64, 128\) is off by"),
        ("rms_norm", lambda x, w: PLAIN["rms_norm"](x, w.detach()), "d_weight of rms_norm .* is missing"),
        ("rms_norm", lambda x, w: PLAIN["rms_norm"](x, w) * torch.nan, "output .* is off by nan"),
        ("rotary", lambda x, cos, sin: PLAIN["rotary"](x, cos, -sin), "output of rotary"),
        ("swiglu", lambda a, b: PLAIN["swiglu"](b, a), "output of swiglu"),
        ("swiglu", lambda a, b: PLAIN["swiglu"](a, b).bfloat16(), "bfloat16; wanted: .*float32"),
        ("swiglu", lambda a, b: PLAIN["swiglu"](a, b).flatten(), "wanted"),
        (
            "linear_cross_entropy",
            lambda h, w, t: torch.nn.functional.cross_entropy((h @ w.T).flatten(0, -2), t.flatten() % 37),
            "output of linear_cross_entropy",
        ),
    ],
)
def test_what_is_wrong_is_named(name, wrong, sentence):
    with pytest.raises(AssertionError, match=sentence):
        check_fused(name, wrong)


def test_unknown_name():
    with pytest.raises(ValueError, match=r"layer_norm.*allowed: rms_norm"):
        check_fused("layer_norm")
