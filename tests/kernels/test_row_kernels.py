"""weighted_sum, rms_norm, rotary, swiglu: right for every shape, layout and dtype; GPU or interpreter."""

from functools import partial

import pytest
import torch
from tests.kernels.fused import FUSED
from tests.layouts import DEVICE, LAYOUTS, over_dtypes
from torch.autograd import grad
from torch.testing import assert_close

from cs336_systems.checks import check_weighted_sum

pytest.importorskip("triton")
from cs336_systems.kernels import rms_norm as rms_norm_kernels
from cs336_systems.kernels import rotary as rotary_kernels
from cs336_systems.kernels import weighted_sum as weighted_sum_kernels
from cs336_systems.kernels.cross_entropy import cross_entropy_
from cs336_systems.kernels.rms_norm import WIDEST, rms_norm
from cs336_systems.kernels.rotary import rotary
from cs336_systems.kernels.swiglu import swiglu
from cs336_systems.kernels.weighted_sum import weighted_sum

close = partial(assert_close, rtol=1e-5, atol=1e-5)
randn = partial(torch.randn, device=DEVICE)
FUNCTIONS = {
    "rms_norm": rms_norm,
    "rotary": rotary,
    "swiglu": swiglu,
    "weighted_sum": weighted_sum,
}
CHECKS = {"weighted_sum": partial(check_weighted_sum, weighted_sum)}
for each in ("rms_norm", "rotary", "swiglu"):
    CHECKS[each] = partial(FUSED[each].check, each, FUNCTIONS[each])
over_kernels = pytest.mark.parametrize("name", FUNCTIONS)


@pytest.mark.usefixtures("nan_memory")
@over_dtypes
@over_kernels
def test_error_at_most_twice_pytorchs(name, dtype):
    CHECKS[name](dtype=dtype)


def zeros(*shape):
    return torch.zeros(shape, device=DEVICE)


def inputs(kernel, *shape):
    generator = torch.Generator().manual_seed(torch.seed())
    tensors = kernel.make(shape, generator)
    return [tensor.to(DEVICE) for tensor in tensors]


FORMS = LAYOUTS | {
    "the same rows everywhere": lambda x: x[:1].expand(x.shape),
    "lazily negated": lambda x: torch.complex(x, -x).conj().imag,
    "no rows": lambda x: x[:0],
    "one row": lambda x: x[:1, :1, :1],
}


@pytest.mark.parametrize("layout", FORMS.values(), ids=FORMS)
@over_kernels
def test_any_layout(name, layout):
    """Of the first input and of the gradient that comes in."""
    sums = name == "weighted_sum"
    kernel = FUSED["rms_norm" if sums else name]
    plain = torch.matmul if sums else kernel.plain
    x, *others = inputs(kernel, 2, 3, 9, 12)
    x = layout(x).detach().requires_grad_()
    if sums and not x.numel():
        return  # refused
    if name == "swiglu":
        rows = tuple(slice(n) for n in x.shape)
        others = [others[0][rows]]
    y = FUNCTIONS[name](x, *others)
    wanted = plain(x, *others)
    close(y, wanted)
    dy = layout(randn(2, 3, 9, 12))
    if sums:
        dy = dy[..., 0]
    dx = grad(y, x, dy)
    close(dx, grad(wanted, x, dy))


def test_heads_in_the_models_layout_are_not_copied(monkeypatch):
    """q as the model has it, a view of (b, s, h * d); what comes out, of dq too, lies in memory like it."""
    x, *tables = inputs(FUSED["rotary"], 2, 3, 40, 64)
    by_position = x.transpose(1, 2).contiguous()
    x = by_position.transpose(1, 2).requires_grad_()

    def contiguous(tensor):
        assert tensor.is_contiguous(), "copied"
        return tensor

    monkeypatch.setattr(torch.Tensor, "contiguous", contiguous)
    y = rotary(x, *tables)
    assert y.stride() == x.stride()
    (dx,) = grad(y, x, y.detach())
    assert dx.stride() == x.stride()
    assert_close(dx, x.detach())  # turned there and back


SMALL = [
    (rotary_kernels, "TILE", 64, (2, 3, 9, 20)),
    (rms_norm_kernels, "TILE", 256, (43, 20)),
    (rms_norm_kernels, "TILE", 256, (5, 5000)),
    (weighted_sum_kernels, "MOST_PARTIALS", 7, (43, 512)),
    (weighted_sum_kernels, "MOST_PARTIALS", 2, (43, 512)),
]


@pytest.mark.parametrize(("module", "constant", "value", "shape"), SMALL)
def test_programs_walk_down_several_tiles(module, constant, value, shape, monkeypatch):
    """The last one is short, and a program may have nothing left to do; 5000 columns are one tile."""
    monkeypatch.setattr(module, constant, value)
    check = CHECKS[module.__name__.rpartition(".")[2]]
    check(shapes=[shape])
    if module is rms_norm_kernels:
        # More programs than tiles.
        monkeypatch.setattr(module.runtime, "sm_count", lambda device: 100)
        check(shapes=[shape])


@pytest.mark.parametrize("name", ["rms_norm", "weighted_sum"])
def test_same_bits_every_time(name):
    x = randn(90, 64, requires_grad=True)
    weight = randn(64, requires_grad=True)
    squares = FUNCTIONS[name](x, weight).square().sum()
    first = grad(squares, (x, weight), retain_graph=True)
    assert all(map(torch.equal, first, grad(squares, (x, weight))))


def test_16_bit_rows_under_a_float32_weight():
    """As under FSDP, which keeps norms in float32."""
    x = randn(9, 64).bfloat16().requires_grad_()
    weight = randn(64, requires_grad=True)
    y = rms_norm(x, weight)
    dx, dw = grad(y.sum(), (x, weight))
    assert y.dtype == dx.dtype == torch.bfloat16
    assert dw.dtype == torch.float32
    normalised = torch.nn.functional.rms_norm(x.float(), (64,), eps=1e-5)
    assert_close(dw, normalised.sum(0), rtol=1e-4, atol=1e-4)
    assert_close(y, (normalised * weight).bfloat16())


def test_large_and_small_numbers():
    """Squares that overflow float16; a gate far out, where exp overflows; rows of zeros."""
    x = zeros(2, 3).half()
    x[0] = 3e4
    assert rms_norm(x, x[0] / x[0]).isfinite().all()
    a = torch.linspace(-1e4, 1e4, 201, device=DEVICE, requires_grad=True)
    c = swiglu(a, torch.ones_like(a))
    assert_close(c, torch.nn.functional.silu(a))
    (da,) = grad(c.sum(), a)
    assert_close(da, (a > 0) + (a == 0) / 2)
    halves = zeros(1, 4096).half() + 30
    assert weighted_sum(halves, halves[0] / 900) == 4096, "products of 1, added up in float32"


# Shapes of the tensors, and what is said to be allowed.
MISFITS = [
    (rms_norm, "2x3 4", r"\(2, 3\), \(4,\); allowed: \(..., d\) and \(d,\)"),
    (rms_norm, f"1x{WIDEST + 1} {WIDEST + 1}", f"d from 1 to {WIDEST}"),
    (rotary, "4x5 4x2 4x2", "allowed.* an even d"),
    (rotary, "4x6 4x2 4x2", r"\(s or more, d / 2\)"),
    (swiglu, "2x3 3", r"\(2, 3\), \(3,\); allowed: the same one"),
    (weighted_sum, "0x3 3", "no dimension of size 0"),
]


@pytest.mark.parametrize("logits", [zeros(2, 0), zeros(3, 2).T, zeros(3)])
def test_logits_that_cannot_be_overwritten_are_named(logits):
    with pytest.raises(ValueError, match="each row contiguous"):
        cross_entropy_(logits, zeros(2).long())


@pytest.mark.parametrize(("function", "shapes", "allowed"), MISFITS)
def test_shapes_that_do_not_fit_are_named(function, shapes, allowed):
    tensors = []
    for shape in shapes.split():
        sizes = map(int, shape.split("x"))
        tensors.append(zeros(*sizes))
    with pytest.raises(ValueError, match=allowed):
        function(*tensors)


BAD_DTYPES = [
    (rms_norm, zeros(2, 3).double(), zeros(3), "float64, torch.float32; allowed"),
    (swiglu, zeros(3), zeros(3).half(), "float32, torch.float16; allowed: all the same"),
    (cross_entropy_, zeros(2, 3), zeros(2), "allowed: int64 on"),
]


@pytest.mark.parametrize(("function", "x", "other", "sentence"), BAD_DTYPES)
def test_dtypes_that_do_not_fit_are_named(function, x, other, sentence):
    with pytest.raises(TypeError, match=sentence):
        function(x, other)


def test_beside_a_gpu_tensors_of_the_cpu_are_refused(monkeypatch):
    monkeypatch.setattr("cs336_systems.kernels.runtime.INTERPRETED", False)
    with pytest.raises(ValueError, match="on cpu; allowed: a CUDA GPU"):
        swiglu(torch.zeros(3), torch.zeros(3))


@pytest.mark.gpu
@over_dtypes
@pytest.mark.parametrize(
    ("name", "shapes"),
    [
        ("rms_norm", [(4096, 4096), (70, WIDEST)]),
        ("rotary", [(1, 32, 4096, 128)]),
        ("swiglu", [(4096, 11008)]),
        ("weighted_sum", [(100_003, 1000), (2, 8191, 1024), (3, 100_001)]),
    ],
)
def test_large_on_a_gpu(name, shapes, dtype):
    """The 8B model's sizes, and more rows than programs."""
    CHECKS[name](shapes=shapes, dtype=dtype)


@pytest.mark.gpu
def test_offsets_past_the_largest_int32():
    n = 2**19 + 1
    x = torch.ones(n, 4096, device="cuda", dtype=torch.float16)
    assert rms_norm(x, x[0])[-1].eq(1).all()
    last = swiglu(x, x)[-1]
    assert torch.equal(last, swiglu(x[0], x[0]))
    cos = torch.ones(n, 64, device="cuda")
    heads = x.view(-1, 32, 128).transpose(0, 1)
    turned = rotary(heads, cos, 0 * cos)
    assert turned[-1, -1].eq(1).all()
    weight = x[0] / 4096
    assert (weighted_sum(x, weight) == 1).all()
    dx, _ = weighted_sum_kernels.backward(x[:, 0], x, weight)
    assert torch.equal(dx[-1], weight)
