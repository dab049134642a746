"""The replayed sums: against the handout's own one-liners."""

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st

from cs336_systems.training import numerics
from cs336_systems.training.numerics import ACCUMULATIONS, Accumulation, binades, running_sum, spacing


def test_the_four_sums_are_those_of_the_plain_loop():
    for how in ACCUMULATIONS:
        total = torch.tensor(0, dtype=how.accumulator)
        for _ in range(1000):
            total += torch.tensor(0.01, dtype=how.addend)
        assert running_sum(how, 0.01, 1000)[-1].item() == total.item()


def test_float16_loses_and_float32_does_not():
    finals = {how.name: running_sum(how, 0.01, 1000)[-1].item() for how in ACCUMULATIONS}
    assert finals["float16 += float16"] == 9.953125
    assert finals["float32 += float32"] == pytest.approx(10, abs=2e-4)
    # All that is left of the mixed sum's error is that float16 holds 0.01 as 0.010002.
    assert finals["float32 += float16"] == pytest.approx(1000 * torch.tensor(0.01).half().item(), abs=2e-4)
    assert finals["float32 += float16"] == finals["float32 += float16 cast to float32"]


@pytest.mark.parametrize(
    ("dtype", "mantissa_bits"), [(torch.float16, 10), (torch.bfloat16, 7), (torch.float32, 23)]
)
def test_spacing_is_two_to_the_exponent_minus_the_mantissa(dtype, mantissa_bits):
    for exponent in range(-3, 8):
        assert spacing(1.5 * 2.0**exponent, dtype) == 2.0 ** (exponent - mantissa_bits)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@settings(max_examples=40, suppress_health_check=[HealthCheck.filter_too_much])  # few bits, many ties
@given(value=st.floats(1e-3, 1), count=st.integers(2, 60))
def test_binades_predict_the_sum_without_adding(dtype, value, count):
    held = torch.tensor(value, dtype=dtype).double().item()
    rows = binades(value, count, dtype)
    assume(all((held / row["spacing"]) % 1 != 0.5 for row in rows))
    assert rows[-1]["end"] == running_sum(Accumulation("", dtype, dtype), value, count)[-1].item()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_autocast_lowers_the_linear_layers_and_nothing_that_is_stored(dtype):
    seen = numerics.autocast_dtypes(dtype, "cpu")
    assert seen["output of the first linear layer"] == seen["logits"] == dtype
    assert seen["parameters"] == seen["gradients"] == seen["loss"] == torch.float32


def test_rounded_sums_overflow_float16_eight_times_earlier_than_rounded_stages():
    ramp = torch.linspace(-1, 1, 512)
    for scale, holds in {16: [1, 1], 64: [1, 0], 256: [0, 0]}.items():
        right = torch.nn.functional.layer_norm((scale * ramp).half().float(), ramp.shape)
        means = (numerics.wide_mean, numerics.running_mean)
        found = [numerics.layer_norm(scale * ramp, torch.float16, mean).float() for mean in means]
        assert [torch.allclose(each, right, atol=0.02) for each in found] == holds, scale
