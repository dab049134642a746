"""One SwiGLU layer on many devices: what torch keeps of it, and numbers that are refused."""

import math

import pytest
import sympy as sp
import torch
from torch.nn import functional as F

from cs336_systems.accounting import scaling
from cs336_systems.accounting.scaling import SYMBOLS, evaluate, memory_bytes
from labbook.memory.saved import saved_bytes


@pytest.mark.parametrize(("one_axis", "along", "other"), [("fsdp", "X", "Y"), ("tp", "Y", "X")])
def test_a_mesh_with_one_device_along_an_axis_is_the_scheme_of_the_other(one_axis, along, other):
    line = {SYMBOLS[other]: 1, SYMBOLS[along]: scaling.N}
    for part, expression in memory_bytes("fsdp_tp").items():
        if part != "gathered":
            assert sp.simplify(expression.subs(line) - memory_bytes(one_axis)[part]) == 0, part


def swiglu(x, w1, w2, w3):
    return (F.silu(x @ w1.T) * (x @ w3.T)) @ w2.T


def test_activations_are_those_that_torch_saves():
    values = {"B": 6, "D": 16, "F": 40, "N": 1}
    x = torch.randn(6, 16, dtype=torch.bfloat16, requires_grad=True)
    w1, w2, w3 = (
        torch.randn(*shape, dtype=torch.bfloat16, requires_grad=True)
        for shape in ((40, 16), (16, 40), (40, 16))
    )
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
        evaluate(3 * scaling.D * scaling.F / scaling.N / scaling.W, values)
