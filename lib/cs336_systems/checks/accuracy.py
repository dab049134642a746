"""Errors against float64 of at most twice PyTorch's own: for attention, fused kernels and sums.

PyTorch's operations get the same tensors in the same dtype, so there is no tolerance to choose.
"""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from cs336_systems.checks.exercise import assert_tensor

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
    diagnose: Callable[[str, Tensor, Tensor, float], str] = lambda *_: "",
) -> Iterator[dict[str, str | float]]:
    """Compare function(*inputs), and the gradients of what requires one, with the formula in float64.

    Args:
        where, output: of messages, "{output} of {where} is off by ...".
        torchs_own: the reference for errors; None is the formula in the dtype of the inputs.
        by_magnitude: errors are relative to the formula of the magnitudes, for sums whose terms cancel.
        rounding: the rounding floor (relative); None is twice what rounding the inputs to float32 changes.
        allowed_error: relative, instead of twice PyTorch's own.
        diagnose: of a result by its name, the exact one and its error, the usual reason.

    Yields:
        Of the output, and of "dx" for each such input x, the relative error, PyTorch's, and their ratio.

    Raises:
        AssertionError: a result is missing, of the wrong shape or dtype, not finite, or too far off, or an
            input was overwritten.
    """

    def results(of: Callable[..., Tensor], change: Callable[[Tensor], Tensor]) -> list[Tensor | None]:
        given = {name: change(x.detach()) if x.is_floating_point() else x for name, x in inputs.items()}
        own = {name: x.clone().requires_grad_(inputs[name].requires_grad) for name, x in given.items()}
        found, d_found = of(*own.values()), change(d_output)
        assert_tensor(f"{output} of {where}", found, d_found)
        for name, x in own.items():
            assert torch.equal(x, given[name]), f"{output} of {where}: {name} was overwritten; clone it first"
        if differentiable := [x for x in own.values() if x.requires_grad]:
            found.backward(d_found)
        return [found.detach(), *(x.grad for x in differentiable)]

    ours, torchs = (results(of, Tensor.clone) for of in (function, torchs_own or formula))
    exact = results(formula, Tensor.double)
    rounded = results(formula, _rounded) if rounding is None else exact
    sizes = results(formula, lambda x: x.double().abs()) if by_magnitude else exact
    names = [output, *(f"d{name}" for name, x in inputs.items() if x.requires_grad)]
    for name, *found, size in zip(names, ours, torchs, rounded, exact, sizes, strict=True):
        label, wanted = f"{name} of {where}", found[-1]
        assert found[0] is not None, f"{label} is missing"
        size = size.norm().clamp_min(torch.finfo(torch.float32).tiny)
        error, torch_error, changed, _ = (((x.double() - wanted).norm() / size).item() for x in found)
        torch_error = max(torch_error, rounding or 2 * changed, 2 * EPS)
        reference = "as given" if allowed_error else f"{ALLOWED_RATIO:g} times what PyTorch's own is off"
        allowed = allowed_error or ALLOWED_RATIO * torch_error
        assert error <= allowed, (
            f"{label} is off by {error:.2g} (relative); allowed: {allowed:.2g}, {reference}"
            f"{diagnose(name, found[0], wanted, error)}"
        )
        yield {"tensor": name, "error": error, "torch_error": torch_error, "ratio": error / torch_error}


def _rounded(x: Tensor) -> Tensor:
    """In float64, as far from x as float32 would have rounded it."""
    generator = torch.Generator(x.device).manual_seed(0)
    noise = torch.randn(x.shape, generator=generator, device=x.device, dtype=torch.float64)
    return x.double() * (1 + EPS * noise)
