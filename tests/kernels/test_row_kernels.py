"""weighted_sum, rms_norm, rotary, swiglu: right for every shape, layout and dtype; GPU or interpreter."""

from functools import partial

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.layouts import DEVICE, DTYPES, LAYOUTS

from cs336_systems.checks import FUSED, check_fused, check_weighted_sum

pytest.importorskip("triton")
from cs336_systems.kernels import rms_norm as rms_norm_kernels
from cs336_systems.kernels import rotary as rotary_kernels
from cs336_systems.kernels import swiglu as swiglu_kernels
from cs336_systems.kernels import weighted_sum as weighted_sum_kernels
from cs336_systems.kernels.cross_entropy import cross_entropy_
from cs336_systems.kernels.rms_norm import WIDEST, rms_norm
from cs336_systems.kernels.rotary import rotary
from cs336_systems.kernels.swiglu import swiglu
from cs336_systems.kernels.weighted_sum import weighted_sum

FUNCTIONS = {"rms_norm": rms_norm, "rotary": rotary, "swiglu": swiglu, "weighted_sum": weighted_sum}
CHECKS = {name: partial(check_fused, name) for name in FUNCTIONS if name != "weighted_sum"}
CHECKS["weighted_sum"] = partial(check_weighted_sum, weighted_sum)
over_kernels = pytest.mark.parametrize("name", FUNCTIONS)
over_dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


@pytest.mark.usefixtures("nan_memory")
@over_dtypes
@over_kernels
def test_error_at_most_twice_pytorchs(name, dtype):
    CHECKS[name](dtype=dtype)


@settings(max_examples=15)
@given(
    st.sampled_from([*FUNCTIONS]),
    st.lists(st.integers(1, 5), min_size=1, max_size=3),
    st.integers(6, 40),
)
def test_any_shape(name, leading, d):
    """From six columns on: of fewer, and of sums that cancel, chance decides who is how far off."""
    CHECKS[name](shapes=[(*leading, 2 * d if name == "rotary" else d)])


FORMS = LAYOUTS | {
    "the same rows everywhere": lambda x: x[:1].expand(x.shape),
    "lazily negated": lambda x: torch.imag(torch.complex(x, -x).conj()),
    "no rows": lambda x: x[:0],
    "one row": lambda x: x[:1, :1, :1],
}


@pytest.mark.parametrize("layout", FORMS.values(), ids=FORMS)
@over_kernels
def test_any_layout(name, layout):
    """Of the first input and of the gradient that comes in."""
    kernel, narrow = FUSED["rms_norm" if name == "weighted_sum" else name], name == "weighted_sum"
    plain = torch.matmul if narrow else kernel.plain
    made = kernel.make((2, 3, 9, 12), torch.Generator().manual_seed(torch.seed()))
    x, *others = (y.to(DEVICE) for y in made)
    x, dy = layout(x), layout(torch.randn(2, 3, 9, 12, device=DEVICE))
    if narrow and not x.numel():
        return  # refused
    if name == "swiglu":
        others = [others[0][: x.shape[0], : x.shape[1], : x.shape[2]]]
    given_x = x.detach().requires_grad_()
    y, wanted = FUNCTIONS[name](given_x, *others), plain(given_x, *others)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-5)
    dy = dy[..., 0] if narrow else dy
    (dx,), (wanted_dx,) = (torch.autograd.grad(result, given_x, dy) for result in (y, wanted))
    torch.testing.assert_close(dx, wanted_dx, rtol=1e-5, atol=1e-5)


def test_heads_in_the_models_layout_are_not_copied(monkeypatch):
    """q as the model has it, a view of (b, s, h * d); what comes out, of dq too, lies in memory like it."""
    x, *tables = FUSED["rotary"].make((2, 3, 40, 64), torch.Generator())
    x = x.transpose(1, 2).contiguous().transpose(1, 2).to(DEVICE).requires_grad_()
    monkeypatch.setattr(
        torch.Tensor, "contiguous", lambda x: x if x.is_contiguous() else pytest.fail("copy")
    )
    y = rotary(x, *(table.to(DEVICE) for table in tables))
    assert y.stride() == x.stride()
    (dx,) = torch.autograd.grad(y, x, y.detach())
    assert dx.stride() == x.stride()
    torch.testing.assert_close(dx, x.detach())  # turned there and back


SMALL = [  # what makes several tiles, or several partial sums, of few rows; 5000 columns are a tile
    ("rotary", rotary_kernels, "TILE", 64, (2, 3, 9, 20)),
    ("rms_norm", rms_norm_kernels, "TILE", 256, (43, 20)),
    ("rms_norm", rms_norm_kernels, "TILE", 256, (5, 5000)),
    *(
        ("weighted_sum", weighted_sum_kernels, "MOST_PARTIALS", most, (43, 512))
        for most in (7, 4, 2)
    ),
]


@pytest.mark.parametrize(("name", "module", "constant", "value", "shape"), SMALL)
def test_programs_walk_down_several_tiles(name, module, constant, value, shape, monkeypatch):
    """The last one is short, and a program may have nothing left to do."""
    monkeypatch.setattr(module, constant, value)
    CHECKS[name](shapes=[shape])
    if name == "rms_norm":
        monkeypatch.setattr(
            module.runtime, "sm_count", lambda device: 100
        )  # more programs than tiles
        CHECKS[name](shapes=[shape])


@over_dtypes
def test_backward_makes_what_the_block_needs_beside_it(dtype):
    a, b, dc = torch.randn(3, 7, 50, device=DEVICE).to(dtype)
    found = swiglu_kernels.backward(dc, a, b, True)
    wanted = [*swiglu_kernels.backward(dc, a, b), swiglu_kernels.forward(a, b)]
    assert all(torch.equal(*pair) for pair in zip(found, wanted, strict=True))

    dy, x, residual = torch.randn(3, 7, 50, device=DEVICE).to(dtype)
    weight = torch.randn(50, device=DEVICE).to(dtype)
    y, r = rms_norm_kernels.forward(x, weight, 1e-5)
    dx, *_ = rms_norm_kernels.backward(dy.float(), x.float(), weight.float(), r)
    found, _, again = rms_norm_kernels.backward(dy, x, weight, r, residual.T.contiguous().T, True)
    torch.testing.assert_close((found, again), ((dx + residual.float()).to(dtype), y))


@pytest.mark.parametrize("name", ["rms_norm", "weighted_sum"])
def test_same_bits_every_time(name):
    x, weight = (torch.randn(size, device=DEVICE, requires_grad=True) for size in ((90, 64), 64))
    y = FUNCTIONS[name](x, weight)
    dy = torch.randn_like(y)
    first, second = (torch.autograd.grad(y, (x, weight), dy, retain_graph=True) for _ in range(2))
    assert all(map(torch.equal, first, second))


def test_16_bit_rows_under_a_float32_weight():
    """As under FSDP, which keeps norms in float32."""
    x, weight = torch.randn(9, 64, device=DEVICE).bfloat16(), torch.randn(64, device=DEVICE)
    x.requires_grad_(), weight.requires_grad_()
    y = rms_norm(x, weight)
    dx, dw = torch.autograd.grad(y, (x, weight), torch.ones_like(y))
    assert (y.dtype, dx.dtype, dw.dtype) == (torch.bfloat16, torch.bfloat16, torch.float32)
    normalised = torch.nn.functional.rms_norm(x.detach().float(), (64,), eps=1e-5)
    torch.testing.assert_close(dw, normalised.sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(y.detach(), (normalised * weight).bfloat16().detach())


def test_large_and_small_numbers():
    """Squares that overflow float16; a gate far out, where exp overflows; rows of zeros."""
    x = torch.tensor([[3e4, -3e4, 1.0], [0, 0, 0]], device=DEVICE, dtype=torch.float16)
    assert rms_norm(x, torch.ones(3, device=DEVICE).half()).isfinite().all()
    a = torch.tensor([-1e4, -100, 0, 100, 1e4], device=DEVICE, requires_grad=True)
    c = swiglu(a, torch.ones_like(a))
    torch.testing.assert_close(c.detach(), torch.nn.functional.silu(a.detach()))
    (da,) = torch.autograd.grad(c.sum(), a)
    torch.testing.assert_close(da, torch.tensor([0, 0, 0.5, 1, 1], device=DEVICE))
    halves = torch.full((1, 4096), 30.0, device=DEVICE, dtype=torch.float16)
    assert weighted_sum(halves, halves[0] / 900) == 4096, "products of 1, added up in float32"


@pytest.mark.parametrize(
    ("call", "error", "sentence"),
    [
        (
            lambda z: rms_norm(z(2, 3), z(4)),
            ValueError,
            r"\(2, 3\), \(4,\); allowed: \(..., d\) and \(d,\)",
        ),
        (lambda z: rms_norm(z(()), z(1)), ValueError, "allowed"),
        (lambda z: rms_norm(z(2, 0), z(0)), ValueError, "d from 1 to"),
        (lambda z: rms_norm(z(1, WIDEST + 1), z(WIDEST + 1)), ValueError, f"d from 1 to {WIDEST}"),
        (lambda z: rms_norm(z(2, 3).double(), z(3)), TypeError, "float64, torch.float32; allowed"),
        (
            lambda z: rms_norm(z(2, 3).to_sparse(), z(3)),
            ValueError,
            "sparse_coo, .*; allowed: torch.strided",
        ),
        (lambda z: rotary(z(4, 5), z(4, 2), z(4, 2)), ValueError, "allowed.* an even d"),
        (lambda z: rotary(z(4, 6), z(3, 3), z(3, 3)), ValueError, r"\(s or more, d / 2\)"),
        (lambda z: rotary(z(4, 6), z(4, 2), z(4, 2)), ValueError, r"\(s or more, d / 2\)"),
        (lambda z: rotary(z(6), z(4, 3), z(4, 3)), ValueError, "allowed"),
        (lambda z: swiglu(z(2, 3), z(3)), ValueError, r"\(2, 3\), \(3,\); allowed: the same one"),
        (
            lambda z: swiglu(z(3), z(3).half()),
            TypeError,
            "float32, torch.float16; allowed: all the same",
        ),
        (
            lambda z: weighted_sum(z(2, 3), z(4)),
            ValueError,
            r"\(2, 3\), \(4,\); allowed: \(..., d\) and",
        ),
        (lambda z: weighted_sum(z(0, 3), z(3)), ValueError, "no dimension of size 0"),
        (lambda z: weighted_sum(z(2, 3).half(), z(3)), TypeError, "float16, torch.float32"),
        (
            lambda z: cross_entropy_(z(2, 3), z(3).long()),
            ValueError,
            r"\(2, 3\); allowed: \(n, vocabulary\)",
        ),
        (lambda z: cross_entropy_(z(2, 0), z(2).long()), ValueError, "allowed"),
        (
            lambda z: cross_entropy_(z(3, 2).T, z(2).long()),
            ValueError,
            "strides.*allowed: 1 in a row",
        ),
        (lambda z: cross_entropy_(z(1, 3).expand(2, 3), z(2).long()), ValueError, "rows apart"),
        (
            lambda z: cross_entropy_(z(2, 3).cfloat().conj().imag, z(2).long()),
            ValueError,
            "strides",
        ),
        (lambda z: cross_entropy_(z(2, 3), z(2)), TypeError, "allowed: int64 on"),
        (lambda z: cross_entropy_(z(2, 3).double(), z(2).long()), TypeError, "float64"),
    ],
)
def test_bad_input_is_named(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call(lambda *shape: torch.zeros(*shape, device=DEVICE))


@pytest.mark.parametrize("function", [swiglu, weighted_sum])
def test_beside_a_gpu_tensors_of_the_cpu_are_refused(function, monkeypatch):
    monkeypatch.setattr("cs336_systems.kernels.runtime.INTERPRETED", False)
    with pytest.raises(ValueError, match="on cpu; allowed: a CUDA GPU"):
        function(
            torch.zeros(3, 3), torch.zeros(3, 3)[0 if function is weighted_sum else slice(None)]
        )


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
    x = torch.ones(2**19 + 1, 4096, device="cuda", dtype=torch.float16)
    assert (rms_norm(x, x[0])[-1] == 1).all()
    assert (swiglu(x, x)[-1] == swiglu(x[:1], x[:1])[0]).all()
    tables = torch.ones(2**19 + 1, 64, device="cuda"), torch.zeros(2**19 + 1, 64, device="cuda")
    heads = x.view(-1, 32, 128).transpose(0, 1)
    assert (rotary(heads, *tables)[-1, -1] == 1).all()
    weight = torch.full((4096,), 2.0**-12, device="cuda", dtype=torch.float16)
    assert (weighted_sum(x, weight) == 1).all()
    dx, _ = weighted_sum_kernels.backward(
        torch.ones(len(x), device="cuda", dtype=x.dtype), x, weight
    )
    assert (dx[-1] == weight).all()
