"""What "correct" means for the fused kernels of a training step: ours, or the one you wrote.

    from cs336_systems.checks import check_fused
    check_fused("rms_norm", my_rms_norm)

The yardstick is PyTorch's own: in the same dtype on the same tensors, nobody may be more than twice as far
from the float64 result, neither in the output nor in a gradient.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from cs336_systems.checks.steps import assert_tensor
from cs336_systems.names import check_choice, load

ALLOWED_RATIO = 2.0
IGNORED = -100
EPS = torch.finfo(torch.float32).eps


@dataclass(frozen=True)
class Fused:
    """A fused kernel. function: ours, "package.module:name"; plain: the same of PyTorch's operations.

    tensors: names of its inputs; those that begin with a capital have no gradient.
    make: shape and generator -> the inputs.
    shapes: to check; see `make` of each.
    """

    function: str
    plain: Callable[..., Tensor]
    tensors: tuple[str, ...]
    make: Callable[[tuple[int, ...], torch.Generator], list[Tensor]]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        """Random inputs on the generator's device, those with a gradient in the dtype."""
        with generator.device:
            made = zip(self.tensors, self.make(shape, generator), strict=True)
            return [x.to(dtype) if own.islower() else x for own, x in made]


def plain_rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps=1e-5)


def plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computed in float32 at least, as in the model."""
    cos, sin = cos[: x.shape[-2]], sin[: x.shape[-2]]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def plain_swiglu(a: Tensor, b: Tensor) -> Tensor:
    return F.silu(a) * b


def plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """From logits in the dtype of the hidden states, in float32 from there on, as in the model."""
    logits = (hidden @ weight.T).flatten(0, -2)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets.flatten())


def _rotary_inputs(shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    angles = torch.rand(shape[-2] + 3, shape[-1] // 2, generator=generator) * 1000
    return [torch.randn(shape, generator=generator), angles.cos(), angles.sin()]


def _loss_inputs(shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    """shape: of the hidden states, and the size of the vocabulary."""
    *leading, d, vocabulary = shape
    hidden, weight = (torch.randn(*n, d, generator=generator) for n in (leading, (vocabulary,)))
    targets = torch.randint(vocabulary, leading, generator=generator)
    ignored = torch.rand(leading, generator=generator) < 0.2
    ignored.view(-1)[:1] = False  # one at least counts
    return [hidden, weight * 2 / d**0.5, targets.masked_fill(ignored, IGNORED)]


FUSED: dict[str, Fused] = {
    "rms_norm": Fused(
        "cs336_systems.kernels.rms_norm:rms_norm",
        plain_rms_norm,
        ("x", "weight"),
        lambda shape, generator: [torch.randn(size, generator=generator) for size in (shape, shape[-1:])],
        ((64, 128), (37, 100), (2, 3, 5, 33), (1, 1500), (300, 40), (7,)),
    ),
    "rotary": Fused(
        "cs336_systems.kernels.rotary:rotary",
        plain_rotary,
        ("x", "Cos", "Sin"),
        _rotary_inputs,
        ((2, 3, 40, 64), (2, 37, 20), (1, 2), (70, 128), (2, 1, 2, 9, 6)),
    ),
    "swiglu": Fused(
        "cs336_systems.kernels.swiglu:swiglu",
        plain_swiglu,
        ("a", "b"),
        lambda shape, generator: [2 * torch.randn(shape, generator=generator) for _ in range(2)],
        ((64, 128), (37, 101), (2, 3, 5, 33), (1, 4999), (7,)),
    ),
    "linear_cross_entropy": Fused(
        "cs336_systems.training.linear_cross_entropy:linear_cross_entropy",
        plain_linear_cross_entropy,
        ("hidden", "weight", "Targets"),
        _loss_inputs,
        # Of a single token a few probabilities decide, and so chance, who is how far off.
        ((2, 33, 64, 300), (30, 20, 1000), (50, 17, 37)),
    ),
}


def check_fused(
    name: str,
    function: Callable[..., Tensor] | None = None,
    *,
    shapes: Iterable[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    seed: int | None = None,
) -> pd.DataFrame:
    """Compare a fused kernel and its gradients with float64, on fresh random inputs.

    Args:
        name: one of FUSED.
        function: yours, called as ours is; None is ours.
        shapes: None are those of FUSED.
        device: None is the GPU when there is one.
        seed: of the inputs; None draws new ones at every call.

    Returns:
        One line a shape and tensor: its relative error, PyTorch's, and their ratio.

    Raises:
        AssertionError: a result is missing, of the wrong shape or dtype, not finite, or more than twice
            as far from float64 as PyTorch's own, or an input was overwritten.
        ValueError: the name is unknown.
    """
    check_choice("kernel", name, FUSED)
    kernel = FUSED[name]
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    generator = torch.Generator(device).manual_seed(torch.seed() if seed is None else seed)
    lines = []
    for shape in shapes or kernel.shapes:
        inputs = kernel.inputs(shape, dtype, generator)
        wide = [x.double() if x.dtype == dtype else x for x in inputs]
        nudged = [_nudged(x, generator) for x in wide]
        output = kernel.plain(*inputs)
        d_output = torch.randn(output.shape, generator=generator, device=device).to(output.dtype)
        ours = _results(kernel, function or load(kernel.function), inputs, d_output)
        torchs = _results(kernel, kernel.plain, inputs, d_output)
        exact = _results(kernel, kernel.plain, wide, d_output.double())
        moved = _results(kernel, kernel.plain, nudged, _nudged(d_output.double(), generator))
        for tensor, wanted in exact.items():
            where = f"{tensor} of {name} {shape}"
            lines.append({"shape": str(shape), "tensor": tensor})
            lines[-1] |= _judge(where, ours[tensor], torchs[tensor], wanted, moved[tensor])
    return pd.DataFrame(lines)


def _results(
    kernel: Fused, function: Callable[..., Tensor], inputs: list[Tensor], d_output: Tensor
) -> dict[str, Tensor | None]:
    given, inputs = inputs, [x.detach().clone() for x in inputs]
    differentiable = {f"d_{own}": x for own, x in zip(kernel.tensors, inputs, strict=True) if own.islower()}
    for x in differentiable.values():
        x.requires_grad_()
    output = function(*inputs)
    assert_tensor("the output", output, d_output)
    for name, tensor, before in zip(kernel.tensors, inputs, given, strict=True):
        assert torch.equal(tensor, before), f"{name.lower()} was overwritten; clone it first"
    if output.shape == d_output.shape:
        output.backward(d_output.to(output.dtype))
    return {"output": output.detach()} | {name: x.grad for name, x in differentiable.items()}


def _nudged(x: Tensor, generator: torch.Generator) -> Tensor:
    """A float64 tensor as far from x as float32 would have rounded it; other tensors as they are."""
    if x.dtype != torch.float64:
        return x
    return x * (1 + EPS * torch.randn(x.shape, generator=generator, device=x.device))


def _judge(where: str, ours: Tensor | None, torchs: Tensor, exact: Tensor, moved: Tensor) -> dict[str, Any]:
    assert ours is not None, f"{where} is missing"
    given, wanted = (f"{tuple(x.shape)}, {x.dtype}" for x in (ours, torchs))
    assert given == wanted, f"{where} is {given}; wanted: {wanted}"
    size = exact.norm().clamp_min(torch.finfo(torch.float32).tiny)
    error, torch_error, rounding = (
        ((x.double() - exact).norm() / size).item() for x in (ours, torchs, moved)
    )
    # What rounding the inputs to float32 changes is fair, even where PyTorch happens to be luckier.
    torch_error = max(torch_error, 2 * rounding, 2 * EPS)
    allowed = ALLOWED_RATIO * torch_error
    assert error <= allowed, (
        f"{where} is off by {error:.2g} (relative); allowed: {allowed:.2g}, "
        f"{ALLOWED_RATIO:g} times what PyTorch's own operations are off"
    )
    return {"error": error, "torch_error": torch_error, "ratio": error / torch_error}
