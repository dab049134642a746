"""Closed forms of fused attention, against counting."""

import pytest

from cs336_systems import accounting


@pytest.mark.parametrize("is_causal", [False, True])
def test_scores_are_counted(is_causal):
    counted = sum(1 for i in range(13) for j in range(13) if j <= i or not is_causal)
    assert accounting.flash_scores(3, 13, is_causal) == 3 * counted


def test_the_leaderboards_operations():
    """Half of 4 B H T^2 d forward, and with the backward 3.5 times that (Dao 2023, section 4.1)."""
    forward = accounting.flash_flops(16, 16_384, 64)
    assert forward == pytest.approx(0.55e12, rel=0.01)
    assert accounting.flash_flops(16, 16_384, 64, "forward_backward") == pytest.approx(3.5 * forward)
    full = accounting.flash_flops(16, 16_384, 64, is_causal=False)
    assert full == accounting.attention_flops(16, 16_384, 64)


def test_bytes_are_those_of_the_tensors():
    q = 2 * 100 * 64 * 2  # two sequences of 100 tokens, bfloat16
    rows = 2 * 100 * 4
    assert accounting.flash_bytes(2, 100, 64) == 4 * q + rows
    assert accounting.flash_bytes(2, 100, 64, "backward") == 8 * q + rows
    assert accounting.flash_bytes(2, 100, 64, "forward_backward") == 12 * q + 2 * rows
    assert accounting.flash_bytes(2, 100, 64, dtype="float32") == 8 * q + rows
