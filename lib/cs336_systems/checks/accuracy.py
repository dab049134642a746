"""Errors against float64 of at most twice PyTorch's own: of attention, kernels, sums; ours or yours.

PyTorch's operations get the same tensors in the same dtype, so there is no tolerance to choose.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial

import pandas as pd
import torch
from torch import Tensor

from cs336_systems.checks.exercise import assert_tensor

ALLOWED_RATIO = 2.0
EPS = torch.finfo(torch.float32).eps
Device = str | torch.device


def random_on(device: Device | None, seed: int) -> torch.Generator:
    """A generator on a device, by default the GPU when there is one."""
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    return torch.Generator(device).manual_seed(seed)


@dataclass(frozen=True)
class Trial:
    """What a function and its gradients are tried with: inputs by name, and the gradient of the output.

    where, output: of messages, "{output} of {where} is off by ...".
    """

    inputs: dict[str, Tensor]
    d_output: Tensor
    where: str
    output: str = "output"

    def converted(self, convert: Callable) -> "Trial":
        """The same with other floating-point tensors; those that require a gradient still do."""
        inputs = dict(self.inputs)
        for name, x in self.inputs.items():
            if x.is_floating_point():
                inputs[name] = convert(x).detach().requires_grad_(x.requires_grad)
        return replace(self, inputs=inputs, d_output=convert(self.d_output))

    def results(self, function: Callable) -> dict[str, Tensor]:
        """The output by its name, and as "dx" the gradient of each input x that requires one."""
        copies = {
            name: x.detach().clone().requires_grad_(x.requires_grad)
            for name, x in self.inputs.items()
        }
        label = f"{self.output} of {self.where}"
        output = function(*copies.values())
        assert_tensor(label, output, self.d_output)
        for name, x in copies.items():
            assert torch.equal(x, self.inputs[name]), (
                f"{label}: {name} was overwritten; clone it first"
            )
        if any(x.requires_grad for x in copies.values()):
            output.backward(self.d_output)
        gradients = {f"d{name}": x.grad for name, x in copies.items() if x.requires_grad}
        return {self.output: output.detach()} | gradients


@dataclass(frozen=True)
class Reference:
    """What is exact, and how far off PyTorch's own results are.

    formula: exact in float64. torchs_own: the reference for errors; None is the formula in the dtype of the
    inputs. by_magnitude: errors are relative to the formula of the magnitudes, for sums whose terms cancel.
    rounding: the rounding floor (relative), by default what rounding the inputs to float32 may change.
    """

    formula: Callable
    torchs_own: Callable | None = None
    by_magnitude: bool = False
    rounding: float = 8 * EPS

    def errors(self, trial: Trial) -> Callable[[str, Tensor], float]:
        """A function of the name of a result, and of the result: its relative error against float64."""
        exact = trial.converted(Tensor.double).results(self.formula)
        terms = exact
        if self.by_magnitude:
            terms = trial.converted(lambda x: x.double().abs()).results(self.formula)
        smallest = torch.finfo(torch.float32).tiny

        def error_of(name, result):
            norm = terms[name].norm().clamp_min(smallest)
            return ((result.double() - exact[name]).norm() / norm).item()

        return error_of


def compare(
    function: Callable, trial: Trial, reference: Reference, *,
    allowed_error: float | None = None,
    diagnose: Callable = lambda *_: "",
) -> Iterator[dict]:  # fmt: skip
    """Compare a function of the inputs, and the gradients of those that require one, with the reference.

    Args:
        allowed_error: relative, instead of twice PyTorch's own or the rounding floor.
        diagnose: of a result and its error, the usual reason.

    Yields:
        Of the output, and of "dx" for each such input x, the relative error, PyTorch's or the rounding floor,
        whichever is larger, and their ratio.

    Raises:
        AssertionError: a result is missing, of the wrong shape or dtype, not finite, or too far off, or an
            input was overwritten.
    """
    # The same numbers, every second one in memory: autograd promises nothing contiguous.
    trial = replace(trial, d_output=torch.stack([trial.d_output] * 2, -1)[..., 0])
    results = trial.results(function)
    torchs = trial.results(reference.torchs_own or reference.formula)
    error_of = reference.errors(trial)
    standard = "as given" if allowed_error else f"{ALLOWED_RATIO:g} times PyTorch's or rounding's"
    for name, result in results.items():
        label = f"{name} of {trial.where}"
        assert result is not None, f"{label} is missing"
        error = error_of(name, result)
        torch_error = max(error_of(name, torchs[name]), reference.rounding)
        allowed = allowed_error or ALLOWED_RATIO * torch_error
        if not error <= allowed:
            reason = diagnose(result, error)
            contiguous = trial.converted(Tensor.contiguous).results(function)
            if not reason and error_of(name, contiguous[name]) <= allowed:
                reason = ". Contiguous tensors give what is right: read others by their strides"
            raise AssertionError(
                f"{label} is off by {error:.2g} (relative); allowed: {allowed:.2g}, {standard}{reason}"
            )
        ratio = error / torch_error
        yield {"tensor": name, "error": error, "torch_error": torch_error, "ratio": ratio}


_NOT_FINITE = ". It is not finite: is what a mask leaves out 0 in the sums?"
# Odd sizes, a row, a column, and several leading dimensions.
_SHAPES = ((64, 128), (37, 100), (1, 1500), (300, 1), (2, 3, 5, 33), (7,))


def check_weighted_sum(
    weighted_sum: Callable,
    *,
    shapes=_SHAPES,
    dtype: torch.dtype = torch.float32,
    device: Device | None = None,
) -> pd.DataFrame:
    """Compare weighted_sum(x, w) of x (..., d) and w (d,), which returns (...), with float64.

    Args:
        shapes: of x.
        device: None for the GPU when there is one.

    Returns:
        One line a shape and tensor: its relative error, PyTorch's or the rounding floor, and their ratio.

    Raises:
        AssertionError: see `compare`.
    """
    generator = random_on(device, 0)
    random = partial(torch.randn, generator=generator, device=generator.device, dtype=dtype)
    reference = Reference(lambda x, w: (x * w).sum(-1), by_magnitude=True)
    lines = []
    for shape in shapes:
        inputs = {
            "x": random(shape, requires_grad=True),
            "w": random(shape[-1:], requires_grad=True),
        }
        trial = Trial(inputs, random(shape[:-1]), where=f"x {shape}")
        compared = compare(
            weighted_sum,
            trial,
            reference,
            diagnose=lambda _, error: "" if error < torch.inf else _NOT_FINITE,
        )
        lines += [{"shape": str(shape)} | line for line in compared]
    return pd.DataFrame(lines)
