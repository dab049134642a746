"""What PyTorch does for its own operators it does for ours: tracing, fake tensors, second derivatives."""

import pytest
import torch
from tests.layouts import DEVICE
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from cs336_systems import kernels
from cs336_systems.checks import FUSED, check_attention, check_fused
from cs336_systems.configs import model_size
from cs336_systems.model import build_model

pytest.importorskip("triton")
from cs336_systems.attention import FlashAttentionPyTorch, FlashAttentionTriton
from cs336_systems.kernels.cross_entropy import cross_entropy_
from cs336_systems.kernels.rms_norm import rms_norm
from cs336_systems.kernels.rotary import rotary
from cs336_systems.kernels.swiglu import swiglu
from cs336_systems.kernels.weighted_sum import weighted_sum
from cs336_systems.training.fused_block import use_fused_blocks
from cs336_systems.training.linear_cross_entropy import linear_cross_entropy


def loss(hidden, weight):
    targets = torch.arange(len(hidden), device=hidden.device) % len(weight)
    return linear_cross_entropy(hidden, weight, targets, chunk_tokens=4)


def flash(function):
    return lambda q, k, is_causal=True: function.apply(q, k, 2 * k, is_causal)


# Functions of two tensors with a gradient, and the shapes of these.
KERNELS = {
    "rms_norm": (lambda x, w: rms_norm(x, w, 1e-5), (6, 8), (8,)),
    "swiglu": (swiglu, (6, 8), (6, 8)),
    "rotary": (
        lambda x, other: rotary(x, x[:, :4].detach(), x[:, 4:].detach()) + other,
        (6, 8),
        (6, 8),
    ),
    "weighted_sum": (weighted_sum, (6, 8), (8,)),
    "linear_cross_entropy": (loss, (6, 8), (12, 8)),
    "flash_triton": (flash(FlashAttentionTriton), (2, 3, 40, 16), (2, 3, 40, 16)),
    "flash_pytorch": (flash(FlashAttentionPyTorch), (2, 40, 16), (2, 40, 16)),
}
over_kernels = pytest.mark.parametrize("name", KERNELS)


def inputs(name):
    return [torch.randn(shape, device=DEVICE) for shape in KERNELS[name][1:]]


def with_gradients(function, tensors):
    """Result and gradients of the sum of its squares."""
    own = [x.detach().requires_grad_() for x in tensors]
    result = function(*own)
    return [result.detach(), *torch.autograd.grad(result.square().sum(), own)]


@over_kernels
def test_fake_tensors_have_the_layouts_of_real_ones(name):
    tensors = inputs(name)
    real = with_gradients(KERNELS[name][0], tensors)
    with FakeTensorMode() as mode:
        given = [mode.from_tensor(x) for x in tensors]
        fake = with_gradients(KERNELS[name][0], given)
    for found, wanted in zip(fake, real, strict=True):
        assert (found.shape, found.stride(), found.dtype) == (
            wanted.shape,
            wanted.stride(),
            wanted.dtype,
        )
    if name.startswith("flash"):
        assert isinstance(KERNELS[name][0](*given, False), FakeTensor), "outside its mode, too"
        with mode, pytest.raises(TypeError, match="dtypes"):
            KERNELS[name][0](given[0], given[1].half())
    else:
        assert KERNELS[name][0](*(x.to("meta") for x in tensors)).shape == real[0].shape


@over_kernels
def test_traced_and_compiled(name):
    tensors, others = inputs(name), inputs(name)
    function = KERNELS[name][0]
    wanted = with_gradients(function, others)
    traced = make_fx(lambda *given: with_gradients(function, given))(*tensors)
    torch._dynamo.reset()
    backend = (
        "inductor" if DEVICE == "cuda" else "aot_eager"
    )  # without a C++ compiler's ten seconds
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    for found in (traced(*others), with_gradients(compiled, others)):
        torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(compiled(*others), wanted[0])  # nobody wants a gradient


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("cast", [True, False])
@over_kernels
def test_a_gradient_of_a_gradient_is_right_or_refused(name, constant, cast):
    """Whether what comes from above is a constant or not, in autocast or not."""
    function = KERNELS[name][0]
    x, w = (tensor.requires_grad_() for tensor in inputs(name))
    with torch.autocast(DEVICE, torch.bfloat16, enabled=cast):
        result = function(x, w).float()
    above = torch.ones_like(result, requires_grad=not constant)
    gradients = torch.autograd.grad(result, (x, w), above, create_graph=True)
    torch.testing.assert_close(
        gradients, torch.autograd.grad(result, (x, w), above, retain_graph=True)
    )
    if name == "rotary":  # a linear function: nothing of its gradient depends on x
        assert all(gradient.requires_grad != constant for gradient in gradients)
        return
    total = result.sum()
    for gradient in gradients:
        with pytest.raises(RuntimeError, match="no second derivative"):
            gradient.sum().backward(retain_graph=True)
        with pytest.raises(
            RuntimeError, match="no second derivative"
        ):  # where only these are looked for
            torch.autograd.grad(total + gradient.sum(), (x, w), retain_graph=True)


def test_a_rotation_can_be_differentiated_twice():
    x = torch.randn(6, 8, device=DEVICE, requires_grad=True)
    found = []
    for function in (rotary, FUSED["rotary"].plain):
        result = function(x, *torch.linspace(-1, 1, 48, device=DEVICE).view(2, 6, 4))
        (gradient,) = torch.autograd.grad(result.pow(3).sum(), x, create_graph=True)
        found += torch.autograd.grad(gradient.sum(), x)
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_nothing(default):
    model = use_fused_blocks(build_model(model_size("tiny"), 8, dtype=torch.float32, device=DEVICE))
    tokens = torch.arange(16, device=DEVICE).view(2, 8)
    wanted = model(tokens, tokens)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(model(tokens, tokens), wanted)
        for name in FUSED:
            check_fused(name, shapes=[(30, 20, 64) if name == "linear_cross_entropy" else (30, 64)])
        check_attention(FlashAttentionTriton.apply)
    finally:
        torch.set_default_dtype(torch.float32)


def test_overwritten_logits_are_noticed():
    x = torch.randn(4, 8, device=DEVICE, requires_grad=True)
    probabilities, targets = x.softmax(-1), torch.zeros(4, dtype=torch.long, device=DEVICE)
    with pytest.raises(RuntimeError, match="require grad"):
        cross_entropy_(probabilities, targets)
    with torch.no_grad():
        cross_entropy_(probabilities, targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probabilities.sum().backward()
    with torch.inference_mode():
        assert cross_entropy_(torch.randn(4, 8, device=DEVICE), targets).shape == (4,)
    traced = make_fx(lambda z: (cross_entropy_(z, targets), z.clone()))(
        torch.randn(4, 8, device=DEVICE)
    )
    logits = torch.randn(4, 8, device=DEVICE)
    wanted = logits.clone()
    losses = cross_entropy_(wanted, targets)
    torch.testing.assert_close(traced(logits), (losses, wanted))


def test_where_our_kernels_cannot_run_is_said_before(monkeypatch):
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    monkeypatch.setattr("cs336_systems.kernels.runtime.INTERPRETED", True)
    assert (kernels.why_no_triton(cpu), kernels.why_no_triton(cuda)) == ("", "")
    monkeypatch.setattr("cs336_systems.kernels.runtime.INTERPRETED", False)  # as beside a GPU
    assert "TRITON_INTERPRET" in kernels.why_no_triton(cpu)
    assert kernels.why_no_triton(cuda) == ""
    monkeypatch.setattr(kernels, "HAS_TRITON", False)
    assert "not installed" in kernels.why_no_triton(cpu)


def test_what_depends_on_a_weight_through_the_gradient_alone_is_refused():
    x, w = (torch.randn(4, 8).requires_grad_() for _ in range(2))
    (gradient,) = torch.autograd.grad((w * swiglu(x, x)).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        torch.autograd.grad(gradient.square().sum(), w)
