"""Numbers of formulas: those that are refused."""

import pytest

from cs336_systems.accounting import scaling
from cs336_systems.accounting.scaling import evaluate


@pytest.mark.parametrize(
    ("values", "words"),
    [
        *(({"N": n}, f"N is {n}; allowed: a whole number, 1 or more") for n in (0, 2.5, float("inf"))),
        ({"N": 8, "W": -1e9}, "W is -1000000000.0; allowed: a number above 0"),
        ({"N": 8, "X": 2, "Y": 3}, "mesh is 2 x 3; allowed: one that 8 devices fill"),
        ({"N": 8, "bandwidth": 1e9}, "symbol 'bandwidth' is unknown; allowed: B, D"),
        ({"N": 8, "W": 1e9}, "D, F has no value; allowed: numbers for D, F, N, W"),
    ],
)
def test_bad_numbers_are_refused(values, words):
    with pytest.raises(ValueError, match=words):
        evaluate(3 * scaling.D * scaling.F / scaling.N / scaling.W, values)
