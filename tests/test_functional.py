"""Softmax, SiLU and cross-entropy against torch's own, and by their properties."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from layouts import DTYPES
from torch.autograd import gradcheck
from torch.nn import functional as F
from torch.testing import assert_close

from cs336_systems.functional import cross_entropy, rms_norm, rotary, silu, softmax

sizes = st.integers(1, 6)
shapes = st.lists(sizes, min_size=1, max_size=4)
scales = st.sampled_from([1e-3, 1.0, 30.0, 1e4])
seeds = st.integers(0, 2**32 - 1)


def normal(shape, seed, scale=1.0):
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randn(shape, generator=generator, dtype=torch.float64)
    return scale * numbers


@given(shape=shapes, seed=seeds, scale=scales, data=st.data())
def test_softmax_is_torchs(shape, seed, scale, data):
    dims = range(-len(shape), len(shape))
    dim = data.draw(st.sampled_from(dims))
    x = normal(shape, seed, scale)
    expected = torch.softmax(x, dim)
    assert_close(softmax(x, dim), expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_softmax_of_16_bits_is_rounded_once(dtype):
    x = normal((50, 4000), seed=0, scale=4)
    x = x.to(dtype)
    exact = torch.softmax(x.float(), -1)
    rounded_once = exact.to(dtype)
    assert_close(softmax(x), rounded_once)


def test_rms_norm_survives_squares_that_float16_cannot_hold():
    x = normal((4, 64), seed=3, scale=1000).float()
    weight = torch.ones(64)
    halves = x.half()
    result = rms_norm(halves, weight, 1e-5)
    expected = F.rms_norm(x, (64,))
    assert_close(result.float(), expected, rtol=2e-3, atol=2e-3)


def test_rotary_turns_pairs_as_complex_numbers_turn():
    x = normal((3, 8), seed=1)
    angles = normal((3, 4), seed=2)
    turns = torch.exp(1j * angles)
    pairs = x.unflatten(-1, (4, 2))
    turned = turns * torch.view_as_complex(pairs)
    expected = torch.view_as_real(turned)
    cos = angles.cos()
    sin = angles.sin()
    assert_close(rotary(x, cos, sin), expected.flatten(-2))


def test_softmax_of_masked_and_of_huge_scores_but_not_of_integers():
    masked = torch.tensor([0.0, -torch.inf, 0.0])
    huge = torch.tensor([3e38, 0.0, -3e38])
    assert softmax(masked).tolist() == [0.5, 0.0, 0.5]
    assert softmax(huge).tolist() == [1.0, 0.0, 0.0]
    integers = torch.arange(3)
    with pytest.raises(TypeError, match=r"torch\.int64; allowed: a floating-point dtype"):
        softmax(integers)  # what is between 0 and 1 would be rounded to 0


def test_gradients_are_those_of_the_functions():
    x = normal((3, 5), seed=1).requires_grad_()
    targets = torch.tensor([0, 4, 2])
    for dim in (-1, 0):
        assert gradcheck(softmax, (x, dim))
    assert gradcheck(silu, x)
    assert gradcheck(cross_entropy, (x, targets))


@given(
    shape=st.lists(sizes, max_size=3),
    seed=seeds,
    scale=st.sampled_from([0.0, 1.0, 1e30]),
)
def test_cross_entropy_is_torchs_whatever_the_logits(shape, seed, scale):
    logits = normal(shape + [40], seed, scale)
    logits = logits.float()
    generator = torch.Generator().manual_seed(seed)
    targets = torch.randint(40, shape, generator=generator)
    rows = logits.view(-1, 40)
    expected = F.cross_entropy(rows, targets.flatten())
    # Two numbers of the size of the logits are subtracted: their last places are the error of the difference.
    largest = logits.abs().max().item()
    last_place = torch.finfo(torch.float32).eps * largest
    loss = cross_entropy(logits, targets)
    assert_close(loss, expected, rtol=1e-5, atol=1e-5 + 2 * last_place)
    assert expected.isfinite()
