"""The cross-entropy kernel: losses, and the gradient in place of the logits."""

import pytest
import torch
from tests.layouts import DEVICE, DTYPES
from torch.nn import functional as F

pytest.importorskip("triton")
from cs336_systems.kernels import cross_entropy as kernels
from cs336_systems.kernels.cross_entropy import cross_entropy_
from cs336_systems.training.linear_cross_entropy import plain_cross_entropy_

both = pytest.mark.parametrize(
    "function", [cross_entropy_, plain_cross_entropy_], ids=["kernel", "plain"]
)


def inputs(n, vocabulary, dtype=torch.float32):
    logits = (5 * torch.randn(n, vocabulary, device=DEVICE)).to(dtype)
    targets = torch.randint(vocabulary, (n,), device=DEVICE)
    targets[::4] = -100
    return logits, targets


def exact(logits, targets):
    """Losses, and the gradient of their sum."""
    logits = logits.clone().requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")
    return losses.detach(), *torch.autograd.grad(losses.sum(), logits)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("n", "vocabulary"), [(9, 1000), (1, 1), (40, 37), (3, 64)])
def test_losses_and_gradients_of_float64(n, vocabulary, dtype, function, monkeypatch):
    """Several tiles of the vocabulary, the last one short; several rows a tile."""
    monkeypatch.setattr(kernels, "TILE", 256)
    logits, targets = inputs(n, vocabulary, dtype)
    wanted, gradient = exact(logits.double(), targets)
    torch.testing.assert_close(function(logits, targets).double(), wanted, rtol=1e-5, atol=1e-5)
    assert logits.dtype == dtype
    rounding = torch.finfo(dtype).eps / 2 + 1e-6
    # A likely target's gradient, p - 1, is known as well as p: PyTorch's own, too, is off by up to 1.9 eps.
    rounding_of_p = 3 * torch.finfo(torch.float32).eps
    assert ((logits.double() - gradient).abs() <= rounding * gradient.abs() + rounding_of_p).all()
    assert (logits[targets == -100] == 0).all()


@both
def test_infinite_logits_and_hundreds_are_pytorchs(function):
    """-inf in a whole tile; in a row: NaN; of the target alone: an infinite loss, and a finite gradient."""
    logits = torch.randn(4, 20_000, device=DEVICE) * 100
    logits[0, :9000] = logits[1] = logits[2, 7] = -torch.inf
    targets = torch.tensor([9000, 7, 7, 12_345], device=DEVICE)
    wanted, gradient = (x.float() for x in exact(logits.double(), targets))
    torch.testing.assert_close(
        function(logits, targets), wanted, rtol=1e-5, atol=1e-5, equal_nan=True
    )
    torch.testing.assert_close(logits, gradient, rtol=1e-5, atol=1e-6, equal_nan=True)


def test_rows_apart_and_no_rows():
    logits, targets = inputs(10, 50)
    wanted = cross_entropy_(logits.clone(), targets)
    wide = torch.cat((logits, logits), 1)
    torch.testing.assert_close(cross_entropy_(wide[:, :50], targets), wanted)
    torch.testing.assert_close(wide[:, 50:], logits)  # the neighbours stay
    assert cross_entropy_(logits[:0], targets[:0]).shape == (0,)


def test_a_target_outside_the_vocabulary_has_no_loss():
    logits, _ = inputs(3, 50)
    losses = cross_entropy_(logits, torch.tensor([0, 50, -1], device=DEVICE))
    assert losses.isnan().tolist() == [False, True, True]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_8b_models_vocabulary(dtype):
    logits, targets = inputs(1024, 151_936, dtype)
    before = logits.clone()
    losses = cross_entropy_(logits, targets)
    for rows in (slice(0, 64), slice(-64, None)):
        wanted, gradient = exact(before[rows].double(), targets[rows])
        torch.testing.assert_close(losses[rows].double(), wanted, rtol=1e-5, atol=1e-5)
        rounding = torch.finfo(dtype).eps / 2 + 2e-6
        floor = (
            torch.finfo(torch.float16).smallest_normal * 2**-10
        )  # float16 rounds the smallest to this
        assert ((logits[rows].double() - gradient).abs() <= rounding * gradient.abs() + floor).all()
