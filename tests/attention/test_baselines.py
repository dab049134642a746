"""torch's scaled_dot_product_attention behind the front door: the same function, and its fused kernel."""

import pytest
import torch

from cs336_systems.attention import attention

SHAPES = [(40, 16), (3, 40, 16), (2, 3, 40, 16), (2, 1, 3, 40, 16)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: f"{len(shape)} dimensions")
def test_sdpa_is_attention_for_any_leading_dimensions(shape, is_causal):
    q, k, v = (torch.randn(shape, dtype=torch.float64) for _ in range(3))
    expected = attention(q, k, v, is_causal, implementation="reference")
    torch.testing.assert_close(attention(q, k, v, is_causal, implementation="sdpa"), expected)


@pytest.mark.parametrize("shape", SHAPES[1:], ids=lambda shape: f"{len(shape)} dimensions")
def test_sdpa_keeps_no_scores(shape):
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: sizes.append(t.numel()) or t, lambda t: t):
        attention(*inputs, implementation="sdpa")
    assert sizes
    assert max(sizes) <= inputs[0].numel()
