"""The cross-entropy kernel: losses, and the gradient in place of the logits."""

from functools import partial

import pytest
import torch
from tests.layouts import DEVICE, over_dtypes
from torch.nn import functional as F
from torch.testing import assert_close

pytest.importorskip("triton")
from cs336_systems.kernels import cross_entropy as kernels
from cs336_systems.kernels.cross_entropy import cross_entropy_
from cs336_systems.training.linear_cross_entropy import plain_cross_entropy_

close = partial(assert_close, rtol=1e-5, atol=1e-5)
both = pytest.mark.parametrize(
    "function", [cross_entropy_, plain_cross_entropy_], ids=["kernel", "plain"]
)


def inputs(n, vocabulary, dtype=torch.float32):
    logits = 5 * torch.randn(n, vocabulary, device=DEVICE)
    logits = logits.to(dtype)
    targets = torch.randint(vocabulary, (n,), device=DEVICE)
    targets[::4] = -100
    return logits, targets


def exact(logits, targets):
    """Losses, and the gradient of their sum."""
    logits = logits.clone().requires_grad_()
    losses = F.cross_entropy(logits, targets, reduction="none")
    losses.sum().backward()
    return losses.detach(), logits.grad


def check(function, logits, targets, floor, relative=1e-6):
    """Of the losses and of the gradient that takes the place of the logits.

    floor: what rounding adds; relative: what it adds beside half a digit.
    """
    wanted, gradient = exact(logits.double(), targets)
    close(function(logits, targets).double(), wanted)
    rounding = torch.finfo(logits.dtype).eps / 2 + relative
    error = (logits.double() - gradient).abs()
    assert (error <= rounding * gradient.abs() + floor).all()


@both
@over_dtypes
@pytest.mark.parametrize("shape", [(9, 1000), (1, 1), (40, 37), (3, 64)])
def test_losses_and_gradients_of_float64(shape, dtype, function, monkeypatch):
    """Several tiles of the vocabulary, the last one short; several rows a tile."""
    monkeypatch.setattr(kernels, "TILE", 256)
    logits, targets = inputs(*shape, dtype)
    # A likely target's gradient, p - 1, is known as well as p: PyTorch's own, too, is off by up to 1.9 eps.
    check(function, logits, targets, floor=3 * torch.finfo(torch.float32).eps)
    assert logits.dtype == dtype
    assert (logits[targets == -100] == 0).all()


@both
def test_infinite_logits_and_hundreds_are_pytorchs(function):
    """-inf in a whole tile; in a row: NaN; of the target alone: an infinite loss, and a finite gradient."""
    logits = torch.randn(4, 20_000, device=DEVICE) * 100
    logits[0, :9000] = -torch.inf
    logits[1] = -torch.inf
    logits[2, 7] = -torch.inf
    targets = torch.tensor([9000, 7, 7, 12_345], device=DEVICE)
    wanted, gradient = exact(logits.double(), targets)
    losses = function(logits, targets)
    close(losses, wanted.float(), equal_nan=True)
    assert_close(logits, gradient.float(), rtol=1e-5, atol=1e-6, equal_nan=True)


def test_rows_apart_and_no_rows():
    logits, targets = inputs(10, 50)
    wanted = cross_entropy_(logits.clone(), targets)
    wide = torch.cat((logits, logits), 1)
    assert_close(cross_entropy_(wide[:, :50], targets), wanted)
    assert_close(wide[:, 50:], logits)  # the neighbours stay
    assert cross_entropy_(logits[:0], targets[:0]).shape == (0,)


def test_a_target_outside_the_vocabulary_has_no_loss():
    logits, _ = inputs(3, 50)
    targets = torch.tensor([0, 50, -1], device=DEVICE)
    losses = cross_entropy_(logits, targets)
    assert losses.isnan().tolist() == [False, True, True]


@pytest.mark.gpu
@over_dtypes
def test_the_8b_models_vocabulary(dtype):
    # float16 rounds the smallest numbers to multiples of this.
    floor = torch.finfo(torch.float16).smallest_normal * 2**-10
    check(cross_entropy_, *inputs(128, 151_936, dtype), floor, relative=2e-6)
