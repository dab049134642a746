"""attention() and the registry: all compute the same, and one more line is one more implementation."""

from types import SimpleNamespace

import pytest
import torch
from tests.layouts import DEVICE, DTYPES

from cs336_systems import attention as attention_room
from cs336_systems.attention import attention
from cs336_systems.attention.implementations import (
    ATTENTION,
    COMPILER,
    SIXTEEN_BITS,
    TRITON,
    Implementation,
    sdpa_backend,
    why_not,
)
from cs336_systems.attention.plain import plain_attention
from cs336_systems.checks import check_attention


def random_inputs(*shape, n_keys=None):
    keys = shape[:-2] + (n_keys or shape[-2], shape[-1])
    return [torch.randn(x, device=DEVICE) for x in (shape, keys, keys)]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_plain_attention_rounds_as_the_formula_in_torch(dtype):
    check_attention(plain_attention, dtype=dtype, device="cpu")


@pytest.mark.parametrize("implementation", attention_room.MODEL_ATTENTION)
def test_all_compute_the_same(implementation):
    if implementation in ATTENTION and TRITON in ATTENTION[implementation].needs:
        pytest.importorskip("triton")
    q, k, v = random_inputs(2, 2, 20, 16, n_keys=30)
    output = attention(q, k, v, is_causal=True, implementation=implementation)
    torch.testing.assert_close(output, plain_attention(q, k, v, True), rtol=1e-3, atol=1e-4)
    with pytest.raises(TypeError, match="Tensor, Parameter, NoneType"):
        attention(q, torch.nn.Parameter(k), None, implementation=implementation)


@pytest.mark.parametrize(("n", "n_keys"), [(0, 0), (0, 8), (8, 0)])
def test_automatic_takes_empty_tensors_too(n, n_keys, monkeypatch):
    monkeypatch.setattr(attention_room, "HAS_TRITON", True)
    q, k = (
        SimpleNamespace(is_cuda=True, dtype=torch.float16, shape=(2, x, 32)) for x in (n, n_keys)
    )
    assert attention_room._fastest(q, k) == "sdpa"


def negated(q, k, v, is_causal=False):
    return -plain_attention(q, k, v, is_causal)


def test_a_new_implementation_is_one_line(monkeypatch):
    """As if its author had written a file, this one, and a line in ATTENTION."""
    line = Implementation(negated, in_model=True)
    monkeypatch.setitem(ATTENTION, "negated", line)
    monkeypatch.setattr(
        attention_room, "MODEL_ATTENTION", attention_room.MODEL_ATTENTION + ("negated",)
    )
    q, k, v = random_inputs(2, 9, 4)
    torch.testing.assert_close(
        attention(q, k, v, implementation="negated"), -plain_attention(q, k, v)
    )
    with pytest.raises(AssertionError, match="O of case"):
        check_attention(ATTENTION["negated"].function)
    with pytest.raises(ValueError, match=r"unknown.*auto.*negated"):
        attention(q, k, v, implementation="unknown")


@pytest.mark.parametrize(
    "shape", [(40, 16), (2, 1, 3, 40, 16)], ids=lambda shape: f"{len(shape)} dimensions"
)
def test_sdpa_takes_any_leading_dimensions_and_keeps_no_scores(shape):
    inputs = [torch.randn(shape, requires_grad=True) for _ in range(3)]
    sizes = []
    with torch.autograd.graph.saved_tensors_hooks(
        lambda t: sizes.append(t.numel()) or t, lambda t: t
    ):
        output = attention(*inputs, True, implementation="sdpa")
    torch.testing.assert_close(output, plain_attention(*inputs, True))
    assert max(sizes) <= inputs[0].numel()


@pytest.mark.parametrize("shapes", [((6, 8), (6, 8), (7, 8)), ((8,), (8,), (8,))], ids=str)
def test_sdpa_refuses_what_pytorch_lets_through(shapes):
    with pytest.raises(ValueError, match=r"q, k, v have shapes .*; allowed: .*n_keys"):
        attention(*map(torch.randn, shapes), implementation="sdpa")


@pytest.mark.parametrize(
    ("implementation", "dtype", "reason"),
    [
        ("sdpa_flash", "float32", "takes 16-bit tensors only"),
        ("sdpa_flash", "bfloat16", (frozenset({SIXTEEN_BITS}), False)),
        ("compiled", "tf32", (frozenset({COMPILER}), True)),
    ],
)
def test_a_case_that_cannot_run_says_why_or_asks_the_machine(implementation, dtype, reason):
    """compiled holds scores, of which the machine is told the bytes."""
    sizes = {"batch_size": 2, "context_length": 64, "d_head": 16, "is_causal": True}
    case = SimpleNamespace(
        implementation=implementation, dtype=dtype, device=DEVICE, pass_="forward", **sizes
    )
    assert why_not(case, lambda device, dtype, needs, size: (needs, size > 2 * 64 * 64)) == reason


def test_a_backend_is_switched_on_inside_alone():
    before = torch.backends.cuda.math_sdp_enabled()
    with sdpa_backend("none of these"):
        assert torch.backends.cuda.math_sdp_enabled() == before
    with sdpa_backend("sdpa_efficient"):
        assert not torch.backends.cuda.math_sdp_enabled()
    assert torch.backends.cuda.math_sdp_enabled() == before
