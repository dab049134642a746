"""Both passes of the Triton attention, and what float32 promises of large scores, whichever kernels run."""

import torch

from cs336_systems.attention.flash_triton import flash_backward, flash_forward


def both_passes(q, k, v, do, is_causal=True):
    """O, L and its residual, dQ, dK, dV."""
    o, *sums = flash_forward(q, k, v, is_causal)
    return o, *sums, *flash_backward(do, q, k, v, o, sums[0], is_causal, *sums[1:])


def check_l_and_residual(device: str) -> None:
    """L has the bits of a float32, L and its residual together more."""
    # Of small integers, 16 dimensions and so a scale of 1/4, scores are exact; of some hundred, float32's
    # steps are of 3e-5 and more.
    q, k, v = (torch.randint(-30, 30, (2, 90, 16), device=device).float() for _ in range(3))
    _, logsumexp, residual = flash_forward(q, k, v, False)
    exact = (q.double() @ k.double().mT / 4).logsumexp(-1)
    assert exact.max() > 500
    assert (logsumexp - exact).abs().max() > 1e-5
    assert (logsumexp.double() + residual.squeeze(-1) - exact).abs().max() < 1e-6


def check_that_backward_reads_the_residual(device: str) -> None:
    """What L lacks may be in its residual: gradients are the same."""
    q, k, v, do = torch.randn(4, 2, 90, 16, device=device).unbind()
    o, logsumexp, residual = flash_forward(q, k, v, True)
    wanted = flash_backward(do, q, k, v, o, logsumexp, True, residual)
    moved = flash_backward(do, q, k, v, o, logsumexp - 0.5, True, residual + 0.5)
    for x, right in zip(moved, wanted, strict=True):
        torch.testing.assert_close(x, right, rtol=1e-4, atol=1e-5)
