"""One SwiGLU layer in 16 bits on many devices: what each keeps, and the numbers that formulas of it have.

The devices form a mesh of X by Y. Along X the tokens are split (data parallelism, FSDP), along Y the columns
of w1 and w3 and the rows of w2 (tensor parallelism; Shoeybi et al. 2019, section 3). Schemes with one axis
have N devices on it. What they compute and send is derived in notebooks 53 to 56.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import sympy as sp

from cs336_systems.arguments import check_choice

B, D, F = sp.symbols("B D F", positive=True)  # tokens of the whole batch, d_model, d_ff
N, X, Y = sp.symbols("N X Y", positive=True)  # devices: all, along the axis of data, along that of tensors
C = sp.Symbol("C", positive=True)  # FLOP/s of a device
W, W_X, W_Y = sp.symbols("W W_X W_Y", positive=True)  # bytes/s that a device sends along an axis
SYMBOLS = {str(symbol): symbol for symbol in (B, D, F, N, X, Y, C, W, W_X, W_Y)}
_COUNTS = {"N", "X", "Y"}

BYTES = 2  # of a weight, a gradient and an activation
OPTIMIZER_BYTES = 12  # of a parameter: its float32 value and AdamW's two moments
WEIGHTS = 3 * D * F

SCHEMES = ("dp", "fsdp", "tp", "fsdp_tp")
_ON_ONE_AXIS = {"dp": {X: N, Y: 1}, "fsdp": {X: N, Y: 1}, "tp": {X: 1, Y: N}}


def memory_bytes(scheme: str) -> dict[str, sp.Expr]:
    """Bytes that a device keeps of the layer between its forward and its backward, by part.

    Training with AdamW on float32 copies of the weights; activations as autograd saves them around torch's
    silu: x, w1 x, silu(w1 x), w3 x and silu(w1 x) * w3 x. FSDP holds besides, while the layer is at work, its
    gathered weights and its whole gradients: "gathered".
    """
    check_choice("scheme", scheme, SCHEMES)
    sharded = X * Y if "fsdp" in scheme else Y
    parts = {
        "parameters": BYTES * WEIGHTS / sharded,
        "gradients": BYTES * WEIGHTS / sharded,
        "optimizer state": OPTIMIZER_BYTES * WEIGHTS / sharded,
        "activations": BYTES * (D + 4 * F / Y) * B / X,
        "gathered": 2 * BYTES * WEIGHTS / Y if "fsdp" in scheme else sp.S.Zero,
    }
    return {name: part.subs(_ON_ONE_AXIS.get(scheme, {})) for name, part in parts.items()}


def evaluate(expression: sp.Expr | float, values: Mapping[str, Any] | None = None, **more: Any) -> Any:
    """The number that an expression has, or an array of numbers where a value is an array.

    Args:
        values, more: by the names of the symbols; those that it does not contain are only checked.
    """
    values = {**(values or {}), **more}
    for name, value in values.items():
        _check_value(name, value)
    if {"N", "X", "Y"} <= values.keys() and np.any(np.asarray(values["X"]) * values["Y"] != values["N"]):
        mesh = f"the mesh is {values['X']} x {values['Y']}"
        raise ValueError(f"{mesh}; allowed: one that {values['N']} devices fill, X * Y = N")
    expression = sp.sympify(expression)
    used = sorted(map(str, expression.free_symbols))
    missing = [name for name in used if name not in values]
    if missing:
        raise ValueError(f"{', '.join(missing)} has no value; allowed: numbers for {', '.join(used)}")
    arguments = [np.asarray(values[name], float) for name in used]
    found = sp.lambdify([SYMBOLS[name] for name in used], expression, "numpy")(*arguments)
    return found if np.ndim(found) else float(found)


def _check_value(name: str, value: Any) -> None:
    check_choice("symbol", name, SYMBOLS)
    number = np.asarray(value)
    fits = number.dtype.kind in "iuf" and np.isfinite(number).all() and (number > 0).all()
    if name in _COUNTS and not (fits and (number == np.floor(number)).all()):
        raise ValueError(f"{name} is {value}; allowed: a whole number, 1 or more")
    if not fits:
        raise ValueError(f"{name} is {value}; allowed: a number above 0")
