"""Linear and cross-entropy together: PyTorch's loss and gradients, and one chunk of logits in memory."""

import math

import pytest
import torch
from tests.layouts import DEVICE, DTYPES
from torch.nn import functional as F

from cs336_systems.checks import FUSED, check_fused
from cs336_systems.kernels import HAS_TRITON
from cs336_systems.training.linear_cross_entropy import linear_cross_entropy, scaled

NAME = "linear_cross_entropy"


def inputs(*shape):
    made = FUSED[NAME].make(shape, torch.Generator().manual_seed(torch.seed()))
    hidden, weight, targets = (x.to(DEVICE) for x in made)
    return hidden.requires_grad_(), weight.requires_grad_(), targets


@pytest.fixture
def _without_triton(monkeypatch):
    monkeypatch.setattr("cs336_systems.kernels.HAS_TRITON", False)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_triton", [True, False])
def test_error_at_most_twice_pytorchs(dtype, with_triton, monkeypatch):
    monkeypatch.setattr("cs336_systems.kernels.HAS_TRITON", with_triton and HAS_TRITON)
    check_fused(NAME, dtype=dtype)


@pytest.mark.usefixtures("_without_triton")
@pytest.mark.parametrize("shape", [(2, 7), (1,), ()], ids=str)
@pytest.mark.parametrize("chunk_tokens", [1, 4, 100])
def test_chunks_and_leading_dimensions_change_nothing(shape, chunk_tokens):
    hidden, weight, _ = inputs(math.prod(shape), 12, 50)
    hidden = hidden.detach().view(*shape, 12).requires_grad_()
    targets = torch.randint(50, shape, device=DEVICE)
    wanted = F.cross_entropy((hidden @ weight.T).view(-1, 50), targets.flatten())
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=chunk_tokens)
    torch.testing.assert_close(loss, wanted)
    ours, others = (torch.autograd.grad(x, (hidden, weight)) for x in (loss, wanted))
    torch.testing.assert_close(ours, others)


@pytest.mark.usefixtures("_without_triton")
def test_no_logits_are_kept_and_only_the_gradients_asked_for():
    hidden, weight, targets = inputs(64, 8, 1000)
    loss = linear_cross_entropy(hidden, weight, targets, chunk_tokens=16)
    assert sorted(tuple(x.shape) for x in loss.grad_fn.saved_tensors) == [
        (),
        (0,),
        (0,),
        (64, 8),
        (1000, 8),
    ]
    loss = linear_cross_entropy(hidden, weight.detach(), targets)
    assert [x is None for x in loss.grad_fn.saved_tensors] == [False, True, False, False, False]
    loss.backward()
    assert weight.grad is None
    with torch.no_grad():
        assert linear_cross_entropy(hidden, weight, targets).grad_fn is None
    with torch.inference_mode():
        torch.testing.assert_close(linear_cross_entropy(hidden, weight, targets), loss.detach())


@pytest.mark.usefixtures("_without_triton")
def test_a_loss_scaled_up_for_float16():
    """Gradients of a float16 loss are scaled in float32: by 2^16 / count, and not first by 1 / count."""
    hidden, weight, targets = inputs(2000, 8, 30)
    halves = hidden.detach().half().requires_grad_()
    half_weight = weight.detach().half()
    loss = linear_cross_entropy(halves, half_weight, targets) * 2.0**16
    (gradient,) = torch.autograd.grad(loss, halves)
    wanted = F.cross_entropy(halves.double() @ half_weight.double().T, targets) * 2.0**16
    (exact,) = torch.autograd.grad(wanted, halves)
    assert (gradient.double() - exact.double()).norm() < 2e-3 * exact.double().norm()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_factor_is_not_rounded(dtype):
    """A third in 16 bits would make every gradient too large, or too small, by up to one part in 512."""
    x = torch.randn(300, 100, device=DEVICE).to(dtype)
    third = scaled(x, torch.tensor(1 / 3, device=DEVICE), dtype).double()
    assert (third * x).sum() / (x.double() ** 2).sum() == pytest.approx(1 / 3, rel=1e-4)


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
    torch.testing.assert_close(loss, wanted, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("change", "error", "sentence"),
    [
        ({"hidden": torch.zeros(5, 9)}, ValueError, r"\(5, 9\), \(20, 8\); allowed: \(..., d\)"),
        ({"weight": torch.zeros(20, 8).half()}, TypeError, "float32, torch.float16; allowed"),
        ({"targets": torch.zeros(5)}, TypeError, "allowed.*torch.int64"),
        (
            {"weight": torch.zeros(20, 8, device="meta")},
            ValueError,
            "cpu, meta; allowed: the same one",
        ),
        (
            {"targets": torch.tensor([0, 1, 20, 2, 3])},
            ValueError,
            "a target is 20; allowed: -100, or 0 to",
        ),
    ],
)
def test_bad_input_is_named(change, error, sentence):
    given = {
        "hidden": torch.zeros(5, 8),
        "weight": torch.zeros(20, 8),
        "targets": torch.zeros(5).long(),
    }
    with pytest.raises(error, match=sentence):
        linear_cross_entropy(**given | change)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_the_8b_models_sizes(dtype):
    """Two chunks, the second one short; PyTorch's float64 logits alone are 3.7 GB."""
    check_fused(NAME, shapes=[(3001, 4096, 151_936)], dtype=dtype)


@pytest.mark.gpu
def test_memory_of_a_chunk_and_of_the_weights_gradient():
    hidden, weight = (
        torch.randn(n, 1024, device="cuda").bfloat16().requires_grad_() for n in (16_384, 50_000)
    )
    targets = torch.randint(50_000, (16_384,), device="cuda")
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    linear_cross_entropy(hidden, weight, targets, chunk_tokens=2048)
    needed = torch.cuda.max_memory_allocated() - before
    chunk, gradients = 2048 * 50_000 * 2, 50_000 * 1024 * 4 + hidden.numel() * 2
    assert needed < 1.1 * (chunk + gradients) + 64 * 2**20
