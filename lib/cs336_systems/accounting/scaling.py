"""The numbers that formulas of one layer on many devices have.

The devices form a mesh of X by Y. Along X the tokens are split (data parallelism, FSDP), along Y the columns
of w1 and w3 and the rows of w2 (tensor parallelism; Shoeybi et al. 2019, section 3). Schemes with one axis
have N devices on it. What they compute, send and keep is derived in notebooks 53 to 56.
"""

from collections.abc import Mapping

import numpy as np


def evaluate(expression, values: Mapping | None = None, **more):
    """The number that an expression has, or an array of numbers where a value is an array.

    Args:
        values, more: by the names of the symbols; those that it does not contain do not matter.
    """
    import sympy as sp  # it takes most of a second, and every rank imports this file

    values = dict(values or {}) | more
    expression = sp.sympify(expression)
    symbols = sorted(expression.free_symbols, key=str)
    function = sp.lambdify(symbols, expression, "numpy")
    numbers = (np.asarray(values[str(symbol)], float) for symbol in symbols)
    number = function(*numbers)
    return number if np.ndim(number) else float(number)
