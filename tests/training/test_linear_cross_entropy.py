"""Linear and cross-entropy together: PyTorch's loss and gradients, and one chunk of logits in memory."""

import math

import pytest
import torch
from tests.kernels.fused import FUSED
from tests.layouts import DEVICE, over_dtypes
from torch.autograd import grad
from torch.nn import functional as F
from torch.testing import assert_close

from cs336_systems.kernels import HAS_TRITON
from cs336_systems.training.linear_cross_entropy import linear_cross_entropy, scaled

FUSED_LOSS = FUSED["linear_cross_entropy"]


def inputs(*shape):
    generator = torch.Generator().manual_seed(torch.seed())
    tensors = FUSED_LOSS.make(shape, generator)
    hidden, weight, targets = (x.to(DEVICE) for x in tensors)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.fixture
def _without_triton(monkeypatch):
    monkeypatch.setattr("cs336_systems.kernels.HAS_TRITON", False)


@over_dtypes
@pytest.mark.parametrize("with_triton", [True, False])
def test_error_at_most_twice_pytorchs(dtype, with_triton, monkeypatch):
    monkeypatch.setattr("cs336_systems.kernels.HAS_TRITON", with_triton and HAS_TRITON)
    FUSED_LOSS.check("loss", linear_cross_entropy, dtype=dtype)


@pytest.mark.usefixtures("_without_triton")
@pytest.mark.parametrize("shape", [(2, 7), ()], ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 4])
def test_chunks_and_leading_dimensions_change_nothing(shape, chunk_tokens):
    hidden, weight, _ = inputs(math.prod(shape), 12, 50)
    hidden = hidden.detach().view(*shape, 12).requires_grad_()
    targets = torch.randint(50, shape, device=DEVICE)
    logits = hidden @ weight.T
    wanted = F.cross_entropy(logits.view(-1, 50), targets.flatten())
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
    assert_close(loss, wanted)
    wanted_gradients = grad(wanted, (hidden, weight))
    assert_close(grad(loss, (hidden, weight)), wanted_gradients)


@pytest.mark.usefixtures("_without_triton")
def test_no_logits_are_kept_and_only_the_gradients_asked_for():
    hidden, weight, targets = inputs(64, 8, 1000)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=16)
    shapes = {tuple(x.shape) for x in loss.grad_fn.saved_tensors}
    assert shapes == {(), (0,), (64, 8), (1000, 8)}
    loss = linear_cross_entropy(hidden, weight.detach(), targets)
    d_hidden, d_weight, *_ = loss.grad_fn.saved_tensors
    assert d_hidden.shape == hidden.shape
    assert d_weight is None
    loss.backward()
    assert weight.grad is None
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets).grad_fn is None
    with torch.inference_mode():
        assert_close(linear_cross_entropy(hidden, weight, targets), loss.detach())


@pytest.mark.usefixtures("_without_triton")
def test_a_loss_scaled_up_for_float16():
    """Gradients of a float16 loss are scaled in float32: by 2^16 / count, and not first by 1 / count."""
    hidden, weight, targets = inputs(2000, 8, 30)
    halves = hidden.detach().half().requires_grad_()
    half_weight = weight.detach().half()
    loss = linear_cross_entropy(halves, half_weight, targets) * 2.0**16
    (gradient,) = grad(loss, halves)
    logits = halves.double() @ half_weight.double().T
    wanted = F.cross_entropy(logits, targets) * 2.0**16
    (exact,) = grad(wanted, halves)
    error = (gradient.double() - exact).norm()
    assert error < 2e-3 * exact.double().norm()


@over_dtypes
def test_the_factor_is_not_rounded(dtype):
    """A third in 16 bits would make every gradient too large, or too small, by up to one part in 512."""
    x = torch.randn(300, 100, device=DEVICE).to(dtype)
    factor = torch.tensor(1 / 3, device=DEVICE)
    third = scaled(x, factor, dtype).double()
    x = x.double()
    ratio = (third * x).sum() / (x * x).sum()
    assert ratio == pytest.approx(1 / 3, rel=1e-4)


@pytest.mark.usefixtures("_without_triton")
@pytest.mark.parametrize("count", [3, 0])
def test_no_target_counts(count):
    """As in PyTorch: no mean, and no gradient that spoils a step."""
    hidden, weight, targets = inputs(count, 8, 20)
    loss = linear_cross_entropy(hidden, weight, torch.full_like(targets, -100))
    loss.backward()
    assert loss.isnan()
    assert (weight.grad == 0).all()
    assert torch.equal(hidden.grad, torch.zeros_like(hidden))


def test_inside_autocast_in_its_dtype():
    hidden, weight, targets = inputs(30, 16, 50)
    wanted = linear_cross_entropy(hidden.bfloat16(), weight.bfloat16(), targets)
    with torch.autocast(DEVICE, dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, targets)
    assert_close(loss, wanted, rtol=1e-6, atol=0)


GOOD = {
    "hidden": torch.zeros(5, 8),
    "weight": torch.zeros(20, 8),
    "targets": torch.arange(5),
}
BAD = [
    (ValueError, "hidden", torch.zeros(5, 9), r"\(5, 9\), \(20, 8\); allowed: \(..., d\)"),
    (TypeError, "weight", torch.zeros(20, 8).half(), "float32, torch.float16; allowed"),
    (ValueError, "targets", torch.arange(4), r"targets are \(4,\)"),
]


@pytest.mark.parametrize(("error", "name", "tensor", "sentence"), BAD)
def test_bad_input_is_named(error, name, tensor, sentence):
    with pytest.raises(error, match=sentence):
        linear_cross_entropy(**GOOD | {name: tensor})


@pytest.mark.gpu
@over_dtypes
def test_the_8b_models_sizes(dtype):
    """Two chunks, the second one short; PyTorch's float64 logits alone are 3.7 GB."""
    FUSED_LOSS.check("loss", linear_cross_entropy, shapes=[(3001, 4096, 151_936)], dtype=dtype)
