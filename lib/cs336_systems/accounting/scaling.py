"""The numbers that formulas of one layer on many devices have.

The devices form a mesh of X by Y. Along X the tokens are split (data parallelism, FSDP), along Y the columns
of w1 and w3 and the rows of w2 (tensor parallelism; Shoeybi et al. 2019, section 3). Schemes with one axis
have N devices on it. What they compute, send and keep is derived in notebooks 53 to 56.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy as sp

from cs336_systems.arguments import check_choice

B, D, F = sp.symbols("B D F", positive=True)  # tokens of the whole batch, d_model, d_ff
# Devices: all, along the axis of data, along that of tensors.
N, X, Y = sp.symbols("N X Y", positive=True)
C = sp.Symbol("C", positive=True)  # FLOP/s of a device
W, W_X, W_Y = sp.symbols("W W_X W_Y", positive=True)  # bytes/s that a device sends along an axis
SYMBOLS = {str(symbol): symbol for symbol in (B, D, F, N, X, Y, C, W, W_X, W_Y)}
_COUNTS = ("N", "X", "Y")


def evaluate(
    expression: sp.Expr | float, values: Mapping[str, Any] | None = None, **more: Any
) -> Any:
    """The number that an expression has, or an array of numbers where a value is an array.

    Args:
        values, more: by the names of the symbols; those that it does not contain are only checked.
    """
    values = dict(values or {}) | more
    for name, value in values.items():
        _check_value(name, value)
    if all(name in values for name in _COUNTS):
        n, x, y = (np.asarray(values[name]) for name in _COUNTS)
        if np.any(x * y != n):
            mesh = f"the mesh is {values['X']} x {values['Y']}"
            raise ValueError(f"{mesh}; allowed: one that {values['N']} devices fill, X * Y = N")
    expression = sp.sympify(expression)
    names = sorted(map(str, expression.free_symbols))
    missing = ", ".join(name for name in names if name not in values)
    if missing:
        raise ValueError(f"{missing} has no value; allowed: numbers for {', '.join(names)}")
    function = sp.lambdify([SYMBOLS[name] for name in names], expression, "numpy")
    number = function(*(np.asarray(values[name], float) for name in names))
    return number if np.ndim(number) else float(number)


def _check_value(name: str, value: Any) -> None:
    check_choice("symbol", name, SYMBOLS)
    number = np.asarray(value)
    fits = number.dtype.kind in "iuf" and np.isfinite(number).all() and (number > 0).all()
    if name in _COUNTS and not (fits and (number == np.floor(number)).all()):
        raise ValueError(f"{name} is {value}; allowed: a whole number, 1 or more")
    if not fits:
        raise ValueError(f"{name} is {value}; allowed: a number above 0")
