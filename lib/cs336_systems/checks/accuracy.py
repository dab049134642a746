"""Errors against float64 of at most twice PyTorch's own: of attention, fused kernels, sums; ours or yours.

PyTorch's operations get the same tensors in the same dtype, so there is no tolerance to choose.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any, NamedTuple

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
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    generator = torch.Generator(device)
    if seed is None:
        generator.seed()
    else:
        generator.manual_seed(seed)
    return generator


@dataclass(frozen=True)
class Trial:
    """What a function and its gradients are tried with: inputs by name, and the gradient of the output.

    where, output: of messages, "{output} of {where} is off by ...".
    """

    inputs: dict[str, Tensor]
    d_output: Tensor
    where: str
    output: str = "output"

    def converted(self, convert: Callable[[Tensor], Tensor]) -> "Trial":
        """The same with other floating-point tensors; those that require a gradient still do."""
        inputs = dict(self.inputs)
        for name, x in self.inputs.items():
            if x.is_floating_point():
                inputs[name] = convert(x).detach().requires_grad_(x.requires_grad)
        return replace(self, inputs=inputs, d_output=convert(self.d_output))

    def results(
        self, function: Callable[..., Tensor], again: Callable[..., Tensor] | None = None
    ) -> dict[str, Tensor | None]:
        """The output by its name, and as "dx" the gradient of each input x that requires one.

        again: called with other inputs between forward and backward.
        """
        copies = {
            name: x.detach().clone().requires_grad_(x.requires_grad)
            for name, x in self.inputs.items()
        }
        label = f"{self.output} of {self.where}"
        output = function(*copies.values())
        assert_tensor(label, output, self.d_output)
        for name, x in copies.items():
            unchanged = torch.equal(x, self.inputs[name])
            assert unchanged, f"{label}: {name} was overwritten; clone it first"
        if any(x.requires_grad for x in copies.values()):
            if again:
                again(*map(_flipped, copies.values()))
            output.backward(self.d_output)
        gradients = {f"d{name}": x.grad for name, x in copies.items() if x.requires_grad}
        return {self.output: output.detach()} | gradients


class Exact(NamedTuple):
    """A result in float64, and the norm that its errors are relative to."""

    tensor: Tensor
    norm: Tensor

    def error_of(self, result: Tensor) -> float:
        return ((result.double() - self.tensor).norm() / self.norm).item()


@dataclass(frozen=True)
class Reference:
    """What is exact, and how far off PyTorch's own results are.

    formula: exact in float64. torchs_own: the reference for errors; None is the formula in the dtype of the
    inputs. by_magnitude: errors are relative to the formula of the magnitudes, for sums whose terms cancel.
    rounding: the rounding floor (relative); None is twice what rounding the inputs to float32 changes.
    """

    formula: Callable[..., Tensor]
    torchs_own: Callable[..., Tensor] | None = None
    by_magnitude: bool = False
    rounding: float | None = None

    def exact(self, trial: Trial) -> dict[str, Exact]:
        results = trial.converted(Tensor.double).results(self.formula)
        terms = results
        if self.by_magnitude:
            terms = trial.converted(lambda x: x.double().abs()).results(self.formula)
        smallest = torch.finfo(torch.float32).tiny
        norms = {name: x.norm().clamp_min(smallest) for name, x in terms.items()}
        return {name: Exact(x, norms[name]) for name, x in results.items()}

    def errors(self, trial: Trial, exact: dict[str, Exact]) -> dict[str, float]:
        """The relative error of each of PyTorch's results, or the rounding floor."""
        results = trial.results(self.torchs_own or self.formula)
        floors = dict.fromkeys(exact, self.rounding)
        if self.rounding is None:
            nearby = trial.converted(_rounded).results(self.formula)
            floors = {name: 2 * exact[name].error_of(x) for name, x in nearby.items()}
        return {
            name: max(exact[name].error_of(x), floors[name], 2 * EPS) for name, x in results.items()
        }


def compare(
    function: Callable[..., Tensor], trial: Trial, reference: Reference, *,
    allowed_error: float | None = None, again: Callable[..., Tensor] | None = None,
    diagnose: Callable[[str, Tensor, Tensor, float], str] = lambda *_: "",
) -> Iterator[dict[str, str | float]]:  # fmt: skip
    """Compare a function of the inputs, and the gradients of those that require one, with the reference.

    Args:
        allowed_error: relative, instead of twice PyTorch's own.
        again: called with other inputs between forward and backward; None is the function.
        diagnose: of a result by its name, the exact one and its error, the usual reason.

    Yields:
        Of the output, and of "dx" for each such input x, the relative error, PyTorch's, and their ratio.

    Raises:
        AssertionError: a result is missing, of the wrong shape or dtype, not finite, or too far off, or an
            input was overwritten.
    """
    again = again or function
    trial = replace(trial, d_output=_strided(trial.d_output))
    results = trial.results(function, again)
    exact = reference.exact(trial)
    torch_errors = reference.errors(trial, exact)
    standard = "as given" if allowed_error else f"{ALLOWED_RATIO:g} times what PyTorch's own is off"
    for name, result in results.items():
        label = f"{name} of {trial.where}"
        assert result is not None, f"{label} is missing"
        error = exact[name].error_of(result)
        torch_error = torch_errors[name]
        allowed = allowed_error or ALLOWED_RATIO * torch_error
        if not error <= allowed:
            reason = diagnose(name, result, exact[name].tensor, error)
            excuses = {
                ". Contiguous tensors give what is right: read others by their strides": (
                    trial.converted(Tensor.contiguous).results(function, again)
                ),
                ". One call at a time is right: keep in ctx alone what backward needs": (
                    trial.results(function)
                ),
            }
            for excuse, others in excuses.items():
                if not reason and exact[name].error_of(others[name]) <= allowed:
                    reason = excuse
            numbers = f"{error:.2g} (relative); allowed: {allowed:.2g}, {standard}"
            raise AssertionError(f"{label} is off by {numbers}{reason}")
        line = {"tensor": name, "error": error, "torch_error": torch_error}
        yield line | {"ratio": error / torch_error}


def _strided(x: Tensor) -> Tensor:
    """The same numbers, every second one in memory: autograd promises nothing contiguous."""
    return torch.stack((x, x), -1)[..., 0]


def _flipped(x: Tensor) -> Tensor:
    dimensions = range(x.dim())
    return x.detach().flip(*dimensions).requires_grad_(x.requires_grad)


def _rounded(x: Tensor) -> Tensor:
    """In float64, as far from x as float32 would have rounded it."""
    generator = torch.Generator(x.device).manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float64)
    return x.double() * (1 + EPS * noise)


def _assert_finite(function: Callable, plain: Callable, trial: Trial) -> None:
    """With inputs a hundred times as large, where PyTorch's own results are finite.

    Raises AssertionError: such a result is not, as of exponentials without their maximum.
    """
    trial = trial.converted(lambda x: 100 * x if x.requires_grad else x)
    results = trial.results(function)
    for name, wanted in trial.results(plain).items():
        is_wrong = wanted.isfinite().all() and not results[name].isfinite().all()
        message = f"{name} of {trial.where}, its inputs a hundred times as large, is not finite"
        assert not is_wrong, f"{message}; PyTorch's is: subtract the maximum before exp"


@dataclass(frozen=True)
class Fused:
    """What a fused kernel is tried with.

    plain: the same of PyTorch's operations. tensors: names of its inputs; of a capital ones without gradient.
    make: shape and generator -> the inputs. shapes: to check. by_magnitude: see `Reference`.
    """

    plain: Callable[..., Tensor]
    tensors: tuple[str, ...]
    make: Callable[[tuple[int, ...], torch.Generator], list[Tensor]]
    shapes: tuple[tuple[int, ...], ...]
    by_magnitude: bool = False

    def inputs(
        self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator
    ) -> list[Tensor]:
        """Random inputs on the generator's device, those with a gradient in the dtype."""
        with generator.device:
            inputs = self.make(shape, generator)
        named = zip(self.tensors, inputs, strict=True)
        return [x.to(dtype) if name.islower() else x for name, x in named]

    def check(
        self,
        label: str,
        function: Callable,
        shapes=None,
        dtype=torch.float32,
        device=None,
        seed=None,
    ) -> pd.DataFrame:
        """As `check_fused`; `label` is for messages."""
        generator = random_on(device, seed)
        reference = Reference(self.plain, by_magnitude=self.by_magnitude)
        lines = []
        for shape in shapes or self.shapes:
            inputs = dict(zip(self.tensors, self.inputs(shape, dtype, generator), strict=True))
            output = self.plain(*inputs.values())
            noise = torch.randn(output.shape, generator=generator, device=output.device)
            for name, x in inputs.items():
                x.requires_grad_(name.islower())
            trial = Trial(inputs, noise.to(output.dtype), where=f"{label} {shape}")
            lines += [{"shape": str(shape)} | line for line in compare(function, trial, reference)]
            _assert_finite(function, self.plain, trial)
        return pd.DataFrame(lines)


def _plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """From logits in the dtype of the hidden states, in float32 from there on, as in the model."""
    logits = at_least_float32(hidden @ weight.T)
    return F.cross_entropy(logits.flatten(0, -2), targets.flatten())


def _rotary_inputs(shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    *_, positions, d = shape
    angles = 1000 * torch.rand(positions + 3, d // 2, generator=generator, dtype=torch.float32)
    return [torch.randn(shape, generator=generator), angles.cos(), angles.sin()]


def _loss_inputs(shape: tuple[int, ...], generator: torch.Generator) -> list[Tensor]:
    """shape: of the hidden states, and the size of the vocabulary."""
    *leading, d, vocabulary = shape
    hidden = torch.randn(*leading, d, generator=generator)
    weight = torch.randn(vocabulary, d, generator=generator)
    targets = torch.randint(vocabulary, leading, generator=generator)
    ignored = torch.rand(leading, generator=generator) < 0.2
    # One at least counts.
    ignored.view(-1)[:1] = False
    return [hidden, weight * 2 / d**0.5, targets.masked_fill(ignored, IGNORED)]


def fused_kernel(name: str) -> Callable[..., Tensor]:
    """Ours, of FUSED. To import kernels needs Triton."""
    room = "training" if name == "linear_cross_entropy" else "kernels"
    return getattr(import_module(f"cs336_systems.{room}.{name}"), name)


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
    by_magnitude=True,
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
    return _WEIGHTED_SUM.check("x", weighted_sum, **how)
