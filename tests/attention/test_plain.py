"""Plain attention, the measure of all the others, against torch's own."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional as F

from cs336_systems.attention.plain import causal_mask, plain_attention
from cs336_systems.checks import check_attention


def qkv(leading, n_queries: int, n_keys: int, d: int, dtype=torch.float64, seed: int = 0):
    generator = torch.Generator().manual_seed(seed)
    shapes = ((*leading, n_queries, d), (*leading, n_keys, d), (*leading, n_keys, d))
    return tuple(torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype) for shape in shapes)


@given(
    leading=st.lists(st.integers(1, 3), max_size=3),
    n_queries=st.integers(1, 9),
    n_keys=st.integers(1, 9),
    d=st.integers(1, 8),
    is_causal=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_it_is_torchs_attention(leading, n_queries, n_keys, d, is_causal, seed):
    q, k, v = qkv(leading, n_queries, n_keys, d, seed=seed)
    output = plain_attention(q, k, v, is_causal)
    expected = F.scaled_dot_product_attention(q, k, v, is_causal=is_causal)
    assert output.shape == (*leading, n_queries, d)
    torch.testing.assert_close(output, expected)


def test_the_mask_is_aligned_at_the_top_left():
    assert causal_mask(2, 4).tolist() == [[True, False, False, False], [True, True, False, False]]
    assert causal_mask(3, 2).tolist() == [[True, False], [True, True], [True, True]]


def test_values_may_have_a_width_of_their_own_and_scores_any_size():
    q, k, _ = qkv((2,), 4, 5, 3)
    v = torch.randn(2, 5, 7, dtype=q.dtype)
    torch.testing.assert_close(plain_attention(q, k, v), F.scaled_dot_product_attention(q, k, v))
    large = plain_attention(*(1e4 * x.float() for x in (q, k)), v.float(), is_causal=True)
    assert large.isfinite().all(), "scores of 1e8 overflow"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_error_and_gradients_are_those_of_the_formula_in_torch(dtype):
    check_attention(plain_attention, dtype=dtype, device="cpu")
