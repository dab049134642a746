"""Both FlashAttentions: right everywhere, and well-behaved under what PyTorch does to a function.

Runs on the GPU where there is one; elsewhere the Triton kernels go through the interpreter. Fake tensors,
tracing, compiling and second derivatives: tests/kernels/test_dispatch.py.
"""

import ast
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import nbformat
import pytest
import torch

from cs336_systems.attention import FlashAttentionPyTorch, attention, flash_pytorch
from cs336_systems.attention.plain import plain_attention
from cs336_systems.checks import BASIC, AttentionCase, check_attention, check_logsumexp
from labbook import matmul_precision
from labbook.project import project

pytest.importorskip("triton")
from tests.attention.races import rows_of
from tests.layouts import DEVICE, DTYPES

from cs336_systems.attention import FlashAttentionTriton, flash_triton, simple_triton
from cs336_systems.attention.flash_triton import FlashAttentionCompiled
from cs336_systems.kernels import runtime

both = pytest.mark.parametrize("flash", [FlashAttentionPyTorch, FlashAttentionTriton])


def random_inputs(*leading, n=64, n_keys=None, d=32, dtype=torch.float32):
    keys = tuple(leading) + (n_keys or n, d)
    shapes = [tuple(leading) + (n, d), keys, keys]
    make = partial(torch.randn, device=DEVICE, dtype=dtype, requires_grad=True)
    return list(map(make, shapes))


EVERYTHING = list(BASIC) + [AttentionCase(**row) for row in rows_of("everything.csv")]


def gradients(flash, inputs, do, is_causal=True):
    output = flash.apply(*inputs, is_causal)
    return (output.detach(),) + torch.autograd.grad(output, inputs, do)


def agree(ours, wanted):
    for mine, other in zip(ours, wanted, strict=True):
        torch.testing.assert_close(mine, other, rtol=1e-3, atol=1e-4)


@both
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_error_at_most_twice_pytorchs(flash, dtype):
    # The interpreter computes 16 bits in float32, and slowly: there a few cases tell of the rounding.
    everything = DEVICE == "cuda" or dtype == torch.float32
    cases = EVERYTHING if everything else EVERYTHING[::3]
    check_attention(flash.apply, cases=cases, dtype=dtype, device=DEVICE)


@both
def test_a_single_key_has_weight_one(flash):
    q, k, v = random_inputs(2, n=5, n_keys=1)
    do = torch.ones_like(q)
    output, dq, dk, dv = gradients(flash, (q, k, v), do)
    agree([output], [v.expand_as(output)])
    agree([dv], [torch.full_like(v, 5)])
    assert dq.abs().max() < 1e-5
    assert dk.abs().max() < 1e-5


def negated_view(x):
    """Contiguous, and at an address that kernels take."""
    return torch._neg_view(-x)


def imaginary_part(x):
    return torch.complex(x, -x).conj().imag


@both
@pytest.mark.parametrize("lazy", [negated_view, imaginary_part])
def test_lazily_negated_inputs_and_two_backwards_through_one_graph(flash, lazy):
    """Strides are a matter of `check_attention`, test_kernels.py and test_flash_gpu.py."""
    inputs = random_inputs(2, 2, n=40, d=16)
    do = torch.randn_like(inputs[0])
    wanted = gradients(flash, inputs, do)
    negated = map(lazy, inputs)
    output = flash.apply(*negated, True)
    for _ in range(2):
        found = torch.autograd.grad(output, inputs, lazy(do), retain_graph=True)
        agree((output,) + found, wanted)


@both
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast(flash, dtype):
    q, k, v = random_inputs(2)
    with torch.autocast(DEVICE, dtype=dtype):
        output = flash.apply(q, k, v.to(dtype), True)
    assert output.dtype == dtype
    found = torch.autograd.grad(output.float().sum(), (q, k, v))
    assert {x.dtype for x in found} == {torch.float32}
    rounded = [x.to(dtype).float() for x in (q, k, v)]
    wanted = plain_attention(*rounded, True)
    torch.testing.assert_close(output, wanted.to(dtype), rtol=1e-2, atol=1e-2)


def test_with_less_python_before_it_the_function_is_the_same():
    q, k, v = inputs = random_inputs(2)
    do = torch.randn_like(q)
    compiled = torch.compile(flash_triton.flash_attention, fullgraph=True, backend="aot_eager")
    wanted = gradients(FlashAttentionTriton, inputs, do)
    for function in (flash_triton.flash_attention, compiled):
        output = function(*inputs, True)
        found = torch.autograd.grad(output, inputs, do)
        agree((output,) + found, wanted)
    for function in (flash_triton.flash_attention, FlashAttentionTriton.apply):
        with pytest.raises(RuntimeError, match="setup_context"):
            torch.func.grad(lambda x, function=function: function(x, k, v).sum())(q)


@both
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (lambda q, k, v: (None, k, v), TypeError, "NoneType, Tensor, Tensor"),
        (lambda q, k, v: (q, k.half(), v), TypeError, "torch.float16"),
        (lambda q, k, v: (q, k.to("meta"), v), ValueError, "meta"),
        (lambda q, k, v: (q, k, v[:, :3]), ValueError, r"\(2, 3, 32\)"),
        (lambda q, k, v: (q, k[:, :0], v[:, :0]), ValueError, "size 0"),
        (lambda q, k, v: (x.repeat(1, 1, 9) for x in (q, k, v)), ValueError, "256"),
    ],
)
def test_a_mistake_is_named(flash, change, error, message):
    inputs = [x.detach() for x in random_inputs(2, n=16)]
    flash.apply(*inputs)  # what is prepared for these must not run for others
    with pytest.raises(error, match=message):
        flash.apply(*change(*inputs))


@matmul_precision("float32")  # restores the switches
def test_float32_follows_pytorchs_switches():
    """The newer one comes last: after it, the older one refuses to answer."""
    for precision, tf32 in (("highest", False), ("high", True), ("medium", True)):
        torch.set_float32_matmul_precision(precision)
        assert flash_triton.allows_tf32(torch.float32) == tf32
        assert not flash_triton.allows_tf32(torch.bfloat16)
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert flash_triton.allows_tf32(torch.float32)
    output = attention(*random_inputs(1), implementation="flash_triton")
    assert output.isfinite().all()


@pytest.mark.parametrize("precisions", [("highest", "high"), ("high", "highest")])
@matmul_precision("float32")
def test_the_switch_may_move_between_the_passes(precisions):
    """Backward multiplies as forward did."""
    inputs = random_inputs(2)
    do = torch.randn_like(inputs[0])
    torch.set_float32_matmul_precision(precisions[0])
    wanted = gradients(FlashAttentionTriton, inputs, do)
    output = FlashAttentionTriton.apply(*inputs, True)
    torch.set_float32_matmul_precision(precisions[1])
    found = torch.autograd.grad(output, inputs, do)
    assert all(map(torch.equal, (output,) + found, wanted))


@pytest.mark.skipif(DEVICE == "cuda", reason="with a GPU there is nothing to choose")
def test_triton_imported_too_early_is_named():
    code = "import triton, torch; from cs336_systems.attention import attention; q = torch.ones(1, 4, 16)\n"
    code += "attention(q, q, q, implementation='flash_triton')"
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    run = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True
    )
    assert "RuntimeError: triton was imported before cs336_systems" in run.stderr


def test_without_gpu_and_interpreter_it_says_where_it_can_run(monkeypatch):
    monkeypatch.setattr(runtime, "INTERPRETED", False)
    x = torch.zeros(1, 4, 8)
    with pytest.raises(ValueError, match="are on cpu"):
        FlashAttentionTriton.apply(x, x, x)


HANDOUT = [
    AttentionCase("causal", is_causal=True),
    AttentionCase("odd lengths, heads", leading=(2, 3), n_queries=70, n_keys=51, d=24),
]


def test_the_handouts_pair(monkeypatch):
    """Triton forward, PyTorch backward; compiling it is for a GPU to test, a CPU takes too long over it."""
    monkeypatch.setattr(flash_triton, "_compiled_backward", lambda: flash_pytorch.flash_backward)
    check_attention(FlashAttentionCompiled.apply, cases=HANDOUT)
    check_logsumexp(FlashAttentionCompiled.apply)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_handouts_pair_compiled(dtype):
    check_attention(FlashAttentionCompiled.apply, cases=HANDOUT, dtype=dtype)


def definitions(source):
    """What a text defines, by name, without its comments and the way that it is laid out."""
    nodes = [node for node in ast.parse(source).body if hasattr(node, "name")]
    names = [node.name for node in nodes]
    for node in nodes:
        node.name = ""
    return dict(zip(names, map(ast.dump, nodes), strict=True))


def test_the_simple_form_is_what_24_and_25_have_as_solutions():
    taught = {}
    for path in sorted(project().notebooks.glob("2[45]_*.ipynb")):
        for cell in nbformat.read(path, as_version=4).cells:
            taught |= definitions(cell.source if cell.cell_type == "code" else "")
    simple = definitions(Path(simple_triton.__file__).read_text())
    assert {name: taught[name] for name in simple} == simple
