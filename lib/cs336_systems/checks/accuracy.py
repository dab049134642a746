"""Errors against float64 of at most twice PyTorch's own: of attention, fused kernels, sums; ours or yours.

PyTorch's operations get the same tensors in the same dtype, so there is no tolerance to choose.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from cs336_systems.arguments import check_choice
from cs336_systems.checks.exercise import assert_tensor
from cs336_systems.functional import at_least_float32, rotary
from cs336_systems.training.linear_cross_entropy import IGNORED

ALLOWED_RATIO = 2.0
EPS = torch.finfo(torch.float32).eps


def random_on(device: str | torch.device | None, seed: int | None) -> torch.Generator:
    """A generator on a device, by default the GPU when there is one; by default of a new seed."""
    generator = torch.Generator(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    generator.seed() if seed is None else generator.manual_seed(seed)
    return generator


def compare(
    function: Callable[..., Tensor],
    formula: Callable[..., Tensor],
    inputs: dict[str, Tensor],
    d_output: Tensor,
    *,
    where: str,
    output: str = "output",
    torchs_own: Callable[..., Tensor] | None = None,
    by_magnitude: bool = False,
    rounding: float | None = None,
    allowed_error: float | None = None,
    again: Callable[..., Tensor] | None = None,
    diagnose: Callable[[str, Tensor, Tensor, float], str] = lambda *_: "",
) -> Iterator[dict[str, str | float]]:
    """Compare function(*inputs), and the gradients of what requires one, with the formula in float64.

    Args:
        where, output: of messages, "{output} of {where} is off by ...".
        torchs_own: the reference for errors; None is the formula in the dtype of the inputs.
        by_magnitude: errors are relative to the formula of the magnitudes, for sums whose terms cancel.
        rounding: the rounding floor (relative); None is twice what rounding the inputs to float32 changes.
        allowed_error: relative, instead of twice PyTorch's own.
        again: called with other inputs between forward and backward; None is the function.
        diagnose: of a result by its name, the exact one and its error, the usual reason.

    Yields:
        Of the output, and of "dx" for each such input x, the relative error, PyTorch's, and their ratio.

    Raises:
        AssertionError: a result is missing, of the wrong shape or dtype, not finite, or too far off, or an
            input was overwritten.
    """

    def results(
        of: Callable, change: Callable, again: Callable = lambda *_: None
    ) -> list[Tensor | None]:
        given = {
            name: change(x.detach()) if x.is_floating_point() else x for name, x in inputs.items()
        }
        own = {
            name: x.clone().requires_grad_(inputs[name].requires_grad) for name, x in given.items()
        }
        found, d_found = of(*own.values()), change(d_output)
        assert_tensor(f"{output} of {where}", found, d_found)
        for name, x in own.items():
            assert torch.equal(x, given[name]), (
                f"{output} of {where}: {name} was overwritten; clone it first"
            )
        if differentiable := [x for x in own.values() if x.requires_grad]:
            again(
                *(
                    x.detach().flip(*range(x.dim())).requires_grad_(x.requires_grad)
                    for x in own.values()
                )
            )
            strided = torch.stack((d_found, d_found), -1)[
                ..., 0
            ]  # autograd promises nothing contiguous
            found.backward(d_found if change is Tensor.contiguous else strided)
        return [found.detach(), *(x.grad for x in differentiable)]

    again = again or function
    ours, torchs = (
        results(function, Tensor.clone, again),
        results(torchs_own or formula, Tensor.clone),
    )
    exact = results(formula, Tensor.double)
    rounded = results(formula, _rounded) if rounding is None else exact
    sizes = results(formula, lambda x: x.double().abs()) if by_magnitude else exact
    easier = {  # what is said of a function that is right where less is asked
        ". One call at a time is right: keep in ctx alone what backward needs": [Tensor.clone],
        ". Contiguous tensors give what is right: read others by their strides": [
            Tensor.contiguous,
            again,
        ],
    }
    names = [output, *(f"d{name}" for name, x in inputs.items() if x.requires_grad)]
    for name, *found, size in zip(names, ours, torchs, rounded, exact, sizes, strict=True):
        label, wanted = f"{name} of {where}", found[-1]
        assert found[0] is not None, f"{label} is missing"
        size = size.norm().clamp_min(torch.finfo(torch.float32).tiny)
        error, torch_error, changed, _ = (
            ((x.double() - wanted).norm() / size).item() for x in found
        )
        torch_error = max(torch_error, rounding or 2 * changed, 2 * EPS)
        reference = (
            "as given" if allowed_error else f"{ALLOWED_RATIO:g} times what PyTorch's own is off"
        )
        allowed = allowed_error or ALLOWED_RATIO * torch_error
        if not error <= allowed:
            reason = diagnose(name, found[0], wanted, error)
            for told, how in () if reason else easier.items():
                x = results(function, *how)[names.index(name)]
                reason = told if (x.double() - wanted).norm() <= allowed * size else reason
            off = f"off by {error:.2g} (relative); allowed: {allowed:.2g}, {reference}{reason}"
            raise AssertionError(f"{label} is {off}")
        yield {
            "tensor": name,
            "error": error,
            "torch_error": torch_error,
            "ratio": error / torch_error,
        }


def _rounded(x: Tensor) -> Tensor:
    """In float64, as far from x as float32 would have rounded it."""
    generator = torch.Generator(x.device).manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float64)
    return x.double() * (1 + EPS * noise)


@dataclass(frozen=True)
class Fused:
    """What a fused kernel is tried with.

    plain: the same of PyTorch's operations. tensors: names of its inputs; of a capital ones without gradient.
    make: shape and generator -> the inputs. shapes: to check.
    """

    plain: Callable[..., Tensor]
    tensors: tuple[str, ...]
    make: Callable[[tuple[int, ...], torch.Generator], list[Tensor]]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(
        self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
    ) -> list[Tensor]:
        """Random inputs on the generator's device, those with a gradient in the dtype."""
        with generator.device:
            made = zip(self.tensors, self.make(shape, generator), strict=True)
            return [x.to(dtype) if own.islower() else x for own, x in made]

    def check(
        self,
        label: str,
        function: Callable,
        shapes=None,
        dtype=torch.float32,
        device=None,
        seed=None,
        **how,
    ) -> pd.DataFrame:
        """As `check_fused`; `label` is for messages, and `compare` takes more."""
        generator, lines = random_on(device, seed), []
        for shape in shapes or self.shapes:
            inputs = dict(zip(self.tensors, self.inputs(shape, dtype, generator), strict=True))
            output = self.plain(*inputs.values())
            d_output = torch.randn(output.shape, generator=generator, device=output.device).to(
                output.dtype
            )
            for tensor, x in inputs.items():
                x.requires_grad_(tensor.islower())
            compared = compare(
                function, self.plain, inputs, d_output, where=f"{label} {shape}", **how
            )
            lines += [{"shape": str(shape)} | line for line in compared]
        return pd.DataFrame(lines)


def _plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """From logits in the dtype of the hidden states, in float32 from there on, as in the model."""
    return F.cross_entropy(at_least_float32(hidden @ weight.T).flatten(0, -2), targets.flatten())


def _rotary_inputs(shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    angles = 1000 * torch.rand(
        shape[-2] + 3, shape[-1] // 2, generator=generator, dtype=torch.float32
    )
    return [torch.randn(shape, generator=generator), angles.cos(), angles.sin()]


def _loss_inputs(shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    """shape: of the hidden states, and the size of the vocabulary."""
    *leading, d, vocabulary = shape
    hidden, weight = (torch.randn(*n, d, generator=generator) for n in (leading, (vocabulary,)))
    targets = torch.randint(vocabulary, leading, generator=generator)
    ignored = torch.rand(leading, generator=generator) < 0.2
    ignored.view(-1)[:1] = False  # one at least counts
    return [hidden, weight * 2 / d**0.5, targets.masked_fill(ignored, IGNORED)]


def fused_kernel(name: str) -> Callable[..., Tensor]:
    """Ours, of FUSED. To import kernels needs Triton."""
    from cs336_systems.kernels.rms_norm import rms_norm
    from cs336_systems.kernels.rotary import rotary
    from cs336_systems.kernels.swiglu import swiglu
    from cs336_systems.training.linear_cross_entropy import linear_cross_entropy

    return {each.__name__: each for each in (rms_norm, rotary, swiglu, linear_cross_entropy)}[name]


FUSED: dict[str, Fused] = {
    "rms_norm": Fused(
        lambda x, weight: F.rms_norm(x, weight.shape, weight, eps=1e-5),
        ("x", "weight"),
        lambda shape, generator: [
            torch.randn(size, generator=generator) for size in (shape, shape[-1:])
        ],
        ((64, 128), (37, 100), (2, 3, 5, 33), (1, 1500), (300, 40), (7,)),
    ),
    "rotary": Fused(
        lambda x, cos, sin: rotary(x, cos[: x.shape[-2]], sin[: x.shape[-2]]),
        ("x", "Cos", "Sin"),
        _rotary_inputs,
        ((2, 3, 40, 64), (2, 37, 20), (1, 2), (70, 128), (2, 1, 2, 9, 6)),
    ),
    "swiglu": Fused(
        lambda a, b: F.silu(a) * b,
        ("a", "b"),
        lambda shape, generator: [2 * torch.randn(shape, generator=generator) for _ in range(2)],
        ((64, 128), (37, 101), (2, 3, 5, 33), (1, 4999), (7,)),
    ),
    "linear_cross_entropy": Fused(
        _plain_linear_cross_entropy,
        ("hidden", "weight", "Targets"),
        _loss_inputs,
        # Of a single token a few probabilities decide, and so chance, who is how far off.
        ((2, 33, 64, 300), (30, 20, 1000), (50, 17, 37)),
    ),
}
# Odd sizes, a row, a column, and several leading dimensions.
_WEIGHTED_SUM = Fused(
    lambda x, w: (x * w).sum(-1),
    ("x", "w"),
    FUSED["rms_norm"].make,
    ((64, 128), (37, 100), (1, 1500), (300, 1), (2, 3, 5, 33), (7,)),
)


def check_fused(
    name: str, function: Callable[..., Tensor] | None = None, **how: Any
) -> pd.DataFrame:
    """Compare a fused kernel of FUSED and its gradients with float64, on fresh random inputs.

    Args:
        function: yours, called as ours is; None is ours.
        how: its shapes, as of FUSED; the dtype of what has a gradient, float32; the device, None for the GPU
            when there is one; the seed of the inputs, None for new ones.

    Returns:
        One line a shape and tensor: its relative error, PyTorch's, and their ratio.

    Raises:
        AssertionError: see `compare`.
        ValueError: the name is unknown.
    """
    check_choice("kernel", name, FUSED)
    return FUSED[name].check(name, function or fused_kernel(name), **how)


def check_weighted_sum(
    weighted_sum: Callable[[Tensor, Tensor], Tensor], **how: Any
) -> pd.DataFrame:
    """As `check_fused`: weighted_sum(x, w) of x (..., d) and w (d,) returns (...)."""
    return _WEIGHTED_SUM.check("x", weighted_sum, by_magnitude=True, **how)
