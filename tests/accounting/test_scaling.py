"""One SwiGLU layer on many devices: limits, identities, borders, and what torch counts of the layer."""

import itertools
import math

import pytest
import sympy as sp
import torch
from torch.nn import functional as F
from torch.utils.flop_counter import FlopCounterMode

from cs336_systems.accounting import bus_factor, scaling
from cs336_systems.accounting.scaling import (
    SCHEMES,
    SYMBOLS,
    costs,
    evaluate,
    largest_devices,
    memory_bytes,
)
from cs336_systems.measure.saved_tensors import saved_bytes

PASSES = ("forward", "backward")
TPU = {"B": 2**22, "D": 16384, "F": 53248, "C": 4.6e14, "W": 1.8e11, "W_X": 1.8e11, "W_Y": 1.8e11}


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize(("one_axis", "along", "other"), [("fsdp", "X", "Y"), ("tp", "Y", "X")])
def test_a_mesh_with_one_device_along_an_axis_is_the_scheme_of_the_other(one_axis, along, other, pass_):
    line = {SYMBOLS[other]: 1, SYMBOLS[along]: scaling.N, SYMBOLS[f"W_{along}"]: scaling.W}
    mesh, alone = costs("fsdp_tp", pass_), costs(one_axis, pass_)
    for quantity in ("sent_bytes", "communication_s", "compute_s", "flops"):
        assert sp.simplify(getattr(mesh, quantity).subs(line) - getattr(alone, quantity)) == 0, quantity
    for part, expression in memory_bytes("fsdp_tp").items():
        if part != "gathered":
            assert sp.simplify(expression.subs(line) - memory_bytes(one_axis)[part]) == 0, part


def test_fsdp_sends_in_both_passes_what_dp_sends_and_a_gather_more():
    dp, fsdp = (sum(costs(scheme, pass_).sent_bytes for pass_ in PASSES) for scheme in ("dp", "fsdp"))
    assert sp.simplify(fsdp - sp.Rational(3, 2) * dp) == 0


@pytest.mark.parametrize("n", [1, 2, 7, 64])
def test_messages_send_what_their_bus_factor_says(n):
    for scheme, pass_ in itertools.product(SCHEMES, PASSES):
        for message in costs(scheme, pass_).messages:
            share = (message.sent_bytes / message.size).subs(message.devices, n)
            assert float(share) == pytest.approx(bus_factor(message.collective, n))


@pytest.mark.parametrize("pass_", PASSES)
@pytest.mark.parametrize("scheme", ["dp", "fsdp", "tp"])
def test_at_the_border_communication_takes_as_long_as_the_matmuls(scheme, pass_):
    cost, most = costs(scheme, pass_), largest_devices(scheme, pass_)
    if most != sp.oo:
        assert sp.simplify((cost.communication_s - cost.compute_s).subs(scaling.N, most)) == 0
        later = (cost.communication_s / cost.compute_s).subs(scaling.N, most + 1)
        assert float(later.subs({SYMBOLS[name]: value for name, value in TPU.items()})) > 1


def test_the_handouts_machine():
    """By hand: C / W = 2556 FLOPs a byte; 2**22 tokens are 1641.2 of those, 3 * 53248 / 2 are 31.25."""
    assert evaluate(largest_devices("fsdp", "forward"), TPU) == pytest.approx(1642.24, abs=0.01)
    assert evaluate(largest_devices("tp", "forward"), TPU) == pytest.approx(32.25, abs=0.01)
    assert evaluate(largest_devices("tp", "backward"), TPU) == pytest.approx(63.51, abs=0.01)


def swiglu(x, w1, w2, w3):
    return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def test_flops_and_activations_are_those_that_torch_counts():
    values = {"B": 6, "D": 16, "F": 40, "N": 1}
    x = torch.randn(6, 16, dtype=torch.bfloat16, requires_grad=True)
    w1, w2, w3 = (
        torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((40, 16), (16, 40), (40, 16))
    )
    with FlopCounterMode(display=False) as counter:
        output = swiglu(x, w1, w2, w3)
        forward = counter.get_total_flops()
        output.sum().backward()
    assert forward == evaluate(scaling.FLOPS["forward"], values)
    assert counter.get_total_flops() - forward == evaluate(scaling.FLOPS["backward"], values)
    saved, _ = saved_bytes(lambda: swiglu(x, w1, w2, w3), [x])
    kept = memory_bytes("dp")
    assert saved == evaluate(kept["activations"] + kept["parameters"], values)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        *(({"N": n}, f"N is {n}; allowed: a whole number, 1 or more") for n in (0, 2.5, math.inf)),
        ({"N": 8, "W": -1e9}, "W is -1000000000.0; allowed: a number above 0"),
        ({"N": 8, "X": 2, "Y": 3}, "mesh is 2 x 3; allowed: one that 8 devices fill"),
        ({"N": 8, "bandwidth": 1e9}, "symbol 'bandwidth' is unknown; allowed: B, D"),
        ({"N": 8, "W": 1e9}, "D, F has no value; allowed: numbers for D, F, N, W"),
    ],
)
def test_bad_numbers_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        evaluate(costs("fsdp", "forward").communication_s, values)
