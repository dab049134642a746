"""What no closed form, fit or simulation can be asked is told in a sentence."""

import numpy as np
import pytest

from cs336_systems import accounting
from cs336_systems.accounting import scaling
from cs336_systems.accounting.collective_costs import bus_factor, fit_alpha_beta
from cs336_systems.accounting.network import Links, collective_finish
from cs336_systems.configs import model_size

TINY = model_size("tiny")
LINKS = Links(4.0, 0.5)
ONE_DEAD = np.array([1.0, 0.0])


def evaluate(**values):
    flops = scaling.D * scaling.F / scaling.N
    return scaling.evaluate(flops / scaling.W, values)


def all_reduce_on(*mesh, links=LINKS, **options):
    return collective_finish("all_reduce", 1.0, mesh, links, **options)


@pytest.mark.parametrize(
    ("call", "words"),
    [
        (lambda: accounting.forward_flops(TINY, 0, 16), "batch_size.*0"),
        (lambda: accounting.activation_bytes(TINY, 1, 8, "fp8"), "fp8.*tf32"),
        (lambda: accounting.peak_bytes(TINY, 1, 8, "sideways"), "sideways.*train_step"),
        (
            lambda: accounting.peak_bytes(TINY, 1, 8, "backward", schedule=((0, 1, 2),)),
            "3 blocks.*2",
        ),
        (lambda: accounting.attention_flops(1, 8, 4, "train_step"), "train_step.*forward_backward"),
        (lambda: bus_factor("reduce", 2), "all_reduce"),
        (lambda: fit_alpha_beta([1, 1], [1, 2]), "two or more different sizes"),
        (lambda: fit_alpha_beta([0, 2], [1, float("nan")]), "finite and above 0"),
        (lambda: Links(ONE_DEAD), "bytes_per_s is 0"),
        (lambda: all_reduce_on(2.5), "is 2.5; allowed: a whole number"),
        (lambda: all_reduce_on(2, 2), "links of 1 axes for a mesh of 2"),
        (lambda: all_reduce_on(2, ready=np.zeros(5)), r"\(2,\)"),
        (lambda: evaluate(N=0), "N is 0; allowed: a whole number, 1 or more"),
        (lambda: evaluate(N=2.5), "N is 2.5; allowed: a whole number, 1 or more"),
        (lambda: evaluate(N=float("inf")), "N is inf; allowed: a whole number, 1 or more"),
        (lambda: evaluate(N=8, W=-1e9), "W is -1000000000.0; allowed: a number above 0"),
        (lambda: evaluate(N=8, X=2, Y=3), "mesh is 2 x 3; allowed: one that 8 devices fill"),
        (lambda: evaluate(N=8, bandwidth=1e9), "symbol 'bandwidth' is unknown; allowed: B, D"),
        (lambda: evaluate(N=8, W=1e9), "D, F has no value; allowed: numbers for D, F, N, W"),
    ],
)
def test_bad_input_is_told_in_a_sentence(call, words):
    with pytest.raises(ValueError, match=words):
        call()
