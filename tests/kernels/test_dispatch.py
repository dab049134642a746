"""What PyTorch does for its own operators it does for ours: tracing, fake tensors, second derivatives."""

from functools import partial

import pytest
import torch
from tests.kernels.fused import FUSED
from tests.layouts import DEVICE
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.autograd import grad
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from cs336_systems.checks import check_attention
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

randn = partial(torch.randn, device=DEVICE)


def loss(hidden, weight):
    targets = torch.arange(len(hidden), device=hidden.device)
    return linear_cross_entropy(hidden, weight, targets, chunk_tokens=4)


def flash(function):
    return lambda q, k, is_causal=True: function.apply(q, k, 2 * k, is_causal)


def turned(x, other):
    """x by angles that come from x, too, without a gradient."""
    cos, sin = x.detach().chunk(2, -1)
    return rotary(x, cos, sin) + other


# Functions of two tensors with a gradient, and the shapes of these.
KERNELS = {
    "rms_norm": (rms_norm, (6, 8), (8,)),
    "swiglu": (swiglu, (6, 8), (6, 8)),
    "rotary": (turned, (6, 8), (6, 8)),
    "weighted_sum": (weighted_sum, (6, 8), (8,)),
    "linear_cross_entropy": (loss, (6, 8), (12, 8)),
    "flash_triton": (flash(FlashAttentionTriton), (2, 3, 40, 16), (2, 3, 40, 16)),
    "flash_pytorch": (flash(FlashAttentionPyTorch), (2, 40, 16), (2, 40, 16)),
}
over_kernels = pytest.mark.parametrize("name", KERNELS)


def kernel(name):
    """The function and two tensors for it."""
    function, *shapes = KERNELS[name]
    return function, [randn(shape) for shape in shapes]


def with_gradients(function, tensors):
    """Result and gradients of the sum of its squares."""
    own = [x.detach().requires_grad_() for x in tensors]
    result = function(*own)
    gradients = grad(result.square().sum(), own)
    return (result.detach(),) + gradients


@over_kernels
def test_fake_tensors_have_the_layouts_of_real_ones(name):
    function, tensors = kernel(name)
    real = with_gradients(function, tensors)
    with FakeTensorMode() as mode:
        fakes = [mode.from_tensor(x) for x in tensors]
        fake = with_gradients(function, fakes)
    for x, wanted in zip(fake, real, strict=True):
        assert x.dtype == wanted.dtype
        assert x.shape == wanted.shape
        assert x.stride() == wanted.stride()
    if name.startswith("flash"):
        assert isinstance(function(*fakes, False), FakeTensor), "outside its mode, too"
        with mode, pytest.raises(TypeError, match="dtypes"):
            function(fakes[0], fakes[1].half())
    else:
        on_meta = [x.to("meta") for x in tensors]
        assert function(*on_meta).shape == real[0].shape


@over_kernels
def test_traced_and_compiled(name):
    function, tensors = kernel(name)
    _, others = kernel(name)
    wanted = with_gradients(function, others)
    traced = make_fx(lambda *inputs: with_gradients(function, inputs))(*tensors)
    assert_close(traced(*others), wanted)
    torch._dynamo.reset()
    # On a CPU without a C++ compiler's ten seconds.
    backend = "inductor" if DEVICE == "cuda" else "aot_eager"
    compiled = torch.compile(function, backend=backend, fullgraph=True)
    assert_close(with_gradients(compiled, others), wanted)
    assert_close(compiled(*others), wanted[0])  # nobody wants a gradient


@pytest.mark.parametrize("constant", [True, False])
@pytest.mark.parametrize("cast", [True, False])
@over_kernels
def test_a_gradient_of_a_gradient_is_right_or_refused(name, constant, cast):
    """Whether what comes from above is a constant or not, in autocast or not."""
    function, inputs = kernel(name)
    for x in inputs:
        x.requires_grad_()
    with torch.autocast(DEVICE, torch.bfloat16, enabled=cast):
        result = function(*inputs).float()
    above = torch.ones_like(result, requires_grad=not constant)
    gradients = grad(result, inputs, above, create_graph=True)
    assert_close(gradients, grad(result, inputs, above, retain_graph=True))
    if name == "rotary":  # a linear function: nothing of its gradient depends on x
        assert all(gradient.requires_grad != constant for gradient in gradients)
        return
    total = result.sum()
    for gradient in gradients:
        with pytest.raises(RuntimeError, match="no second derivative"):
            gradient.sum().backward(retain_graph=True)
        # Where only these are looked for.
        with pytest.raises(RuntimeError, match="no second derivative"):
            grad(total + gradient.sum(), inputs, retain_graph=True)


def test_a_rotation_can_be_differentiated_twice():
    x = randn(6, 8, requires_grad=True)
    tables = torch.linspace(-1, 1, 48, device=DEVICE).view(2, 6, 4)
    second = []
    for function in (rotary, FUSED["rotary"].plain):
        cubes = function(x, *tables).pow(3)
        (gradient,) = grad(cubes.sum(), x, create_graph=True)
        second += grad(gradient.sum(), x)
    assert_close(*second)


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64], ids=str)
def test_the_default_dtype_changes_nothing(default):
    model = build_model(model_size("tiny"), 8, dtype=torch.float32, device=DEVICE)
    model = use_fused_blocks(model)
    tokens = torch.arange(16, device=DEVICE).view(2, 8)
    wanted = model(tokens, tokens)
    torch.set_default_dtype(default)
    try:
        assert torch.equal(model(tokens, tokens), wanted)
        functions = (rms_norm, rotary, swiglu, linear_cross_entropy)
        for function, kernel in zip(functions, FUSED.values(), strict=True):
            shape = (30, 20, 64) if function is linear_cross_entropy else (30, 64)
            kernel.check("fused", function, shapes=[shape])
        check_attention(FlashAttentionTriton.apply)
    finally:
        torch.set_default_dtype(torch.float32)


def test_overwritten_logits_are_noticed():
    x = randn(4, 8, requires_grad=True)
    probabilities = x.softmax(-1)
    targets = torch.zeros(4, dtype=torch.long, device=DEVICE)
    with pytest.raises(RuntimeError, match="require grad"):
        cross_entropy_(probabilities, targets)
    with torch.no_grad():
        cross_entropy_(probabilities, targets)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        probabilities.sum().backward()

    def overwrite(z):
        return cross_entropy_(z, targets), z.clone()

    traced = make_fx(overwrite)(randn(4, 8))
    logits = randn(4, 8)
    gradient = logits.clone()
    losses = cross_entropy_(gradient, targets)
    assert_close(traced(logits), (losses, gradient))


def test_what_depends_on_a_weight_through_the_gradient_alone_is_refused():
    x = randn(4, 8, requires_grad=True)
    w = randn(4, 8, requires_grad=True)
    weighted = w * swiglu(x, x)
    (gradient,) = grad(weighted.sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="no second derivative"):
        grad(gradient.square().sum(), w)
