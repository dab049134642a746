"""One SwiGLU layer in 16 bits on many devices, in sympy: what each computes, sends and keeps, and who waits.

The devices form a mesh of X by Y. Along X the tokens are split (data parallelism, FSDP), along Y the columns
of w1 and w3 and the rows of w2 (tensor parallelism; Shoeybi et al. 2019, section 3). Schemes with one axis
have N devices on it, and the bandwidth W. A pass is bound by compute while its communication, which can run
beside its matmuls, takes no longer than they do ("How to scale your model", chapter 5).
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
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
FLOPS = {"forward": 2 * B * WEIGHTS, "backward": 4 * B * WEIGHTS}  # a multiply and an add for each weight

SCHEMES = ("dp", "fsdp", "tp", "fsdp_tp")
_ON_ONE_AXIS = {
    "dp": {X: N, Y: 1, W_X: W},
    "fsdp": {X: N, Y: 1, W_X: W},
    "tp": {X: 1, Y: N, W_Y: W},
}


@dataclass(frozen=True)
class Message:
    """A collective of the layer: all_reduce, all_gather or reduce_scatter, along the axis "x" or "y".

    devices: that take part. size: of its largest buffer on a device, in bytes.
    """

    collective: str
    axis: str
    devices: sp.Expr
    size: sp.Expr

    @property
    def sent_bytes(self) -> sp.Expr:
        """By each device, around a ring: size / n in each of n - 1 hops; an all-reduce has 2(n - 1)."""
        hops = (self.devices - 1) * (2 if self.collective == "all_reduce" else 1)
        return hops * self.size / self.devices


@dataclass(frozen=True)
class Costs:
    """A pass of the layer on one device.

    messages: its collectives, in their order. compute_s: its share of the FLOPs over its rate: every scheme
    shares them evenly. x_s, y_s: what its messages along each axis take, without latency.
    """

    messages: tuple[Message, ...]
    compute_s: sp.Expr
    x_s: sp.Expr
    y_s: sp.Expr

    @property
    def flops(self) -> sp.Expr:
        return self.compute_s * C

    @property
    def sent_bytes(self) -> sp.Expr:
        return sum((message.sent_bytes for message in self.messages), sp.S.Zero)

    @property
    def communication_s(self) -> sp.Expr:
        """One axis after the other."""
        return self.x_s + self.y_s


def costs(scheme: str, pass_: str) -> Costs:
    """What a pass costs a device.

    FSDP gathers the weights for each pass and scatters the sums of their gradients. TP adds up the parts of
    the output in forward, and those of the input's gradient in backward.
    """
    check_choice("scheme", scheme, SCHEMES)
    check_choice("pass", pass_, FLOPS)
    weights, activations = BYTES * WEIGHTS / Y, BYTES * B * D / X
    reduce = Message("all_reduce", "x", X, weights)
    gather, scatter = Message("all_gather", "x", X, weights), Message("reduce_scatter", "x", X, weights)
    add = Message("all_reduce", "y", Y, activations)
    forward, backward = {
        "dp": ([], [reduce]),
        "fsdp": ([gather], [gather, scatter]),
        "tp": ([add], [add]),
        "fsdp_tp": ([gather, add], [gather, add, scatter]),
    }[scheme]
    sent = forward if pass_ == "forward" else backward
    seconds = {
        axis: sum((each.sent_bytes for each in sent if each.axis == axis), sp.S.Zero) / rate
        for axis, rate in (("x", W_X), ("y", W_Y))
    }
    mesh = _ON_ONE_AXIS.get(scheme, {})
    messages = (replace(each, devices=each.devices.subs(mesh), size=each.size.subs(mesh)) for each in sent)
    times = (FLOPS[pass_] / (X * Y * C), seconds["x"], seconds["y"])
    return Costs(tuple(messages), *(each.subs(mesh) for each in times))


@cache
def largest_devices(scheme: str, pass_: str) -> sp.Expr:
    """The most devices of a scheme with one axis on which a pass is bound by compute, no whole number."""
    cost = costs(scheme, pass_)
    return _solve(cost.communication_s - cost.compute_s, N)


def _solve(difference: sp.Expr, unknown: sp.Symbol) -> sp.Expr:
    """The positive root of `difference`; infinite where nothing is sent."""
    if not difference.has(W, W_X, W_Y):
        return sp.oo
    roots = sp.solve(difference, unknown)
    somewhere = dict.fromkeys(SYMBOLS.values(), 2)  # the sign of a root is the same everywhere, if it has one
    (root,) = [root for root in roots if len(roots) == 1 or root.subs(somewhere) > 0]
    return sp.expand(root)


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
