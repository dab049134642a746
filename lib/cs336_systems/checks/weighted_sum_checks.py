"""What "correct" means for a weighted sum of rows: ours, or the one you wrote.

    from cs336_systems.checks import check_weighted_sum
    check_weighted_sum(my_weighted_sum)

Nobody may be more than twice as far from the float64 result as PyTorch's own (x * weight).sum(-1).
"""

from collections.abc import Callable, Iterable
from typing import Any

import pandas as pd
import torch
from torch import Tensor

from cs336_systems.checks.steps import assert_tensor

ALLOWED_RATIO = 2.0
# Odd sizes, a row, a column, and as many leading dimensions as one likes.
SHAPES = ((64, 128), (37, 100), (1, 1500), (300, 1), (2, 3, 5, 33), (7,))
WeightedSum = Callable[[Tensor, Tensor], Tensor]


def check_weighted_sum(
    weighted_sum: WeightedSum,
    *,
    shapes: Iterable[tuple[int, ...]] = SHAPES,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    seed: int | None = None,
) -> pd.DataFrame:
    """Compare a weighted sum of rows and its gradients with float64, on fresh random inputs.

    Args:
        weighted_sum: called as weighted_sum(x, weight) with x (..., d) and weight (d,), returns (...).
        shapes: of x.
        device: None is the GPU when there is one.
        seed: of the inputs; None draws new ones at every call.

    Returns:
        One line a shape and tensor: its error relative to the sums of magnitudes, that of PyTorch's
        (x * weight).sum(-1), and their ratio.

    Raises:
        AssertionError: a result is missing, of the wrong shape or dtype, not finite, or more than twice
            as far from float64 as PyTorch's own, or an input was overwritten.
    """
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    generator = torch.Generator().manual_seed(torch.seed() if seed is None else seed)
    lines = []
    for shape in shapes:
        inputs = [torch.randn(size, generator=generator) for size in (shape, shape[-1:], shape[:-1])]
        inputs = [tensor.to(device, dtype) for tensor in inputs]
        ours = _results(weighted_sum, inputs, f"y of x {shape}")
        torchs = _results(_formula, inputs)
        exact = _results(_formula, [tensor.double() for tensor in inputs])
        # Of sums whose terms cancel nobody can know more than a rounding of the terms.
        sizes = _results(_formula, [tensor.double().abs() for tensor in inputs])
        for name, wanted in exact.items():
            result, where = ours[name], f"{name} of x {shape}"
            assert result is not None, f"{where} is missing"
            given, kind = (f"{tuple(x.shape)}, {of}" for x, of in ((result, result.dtype), (wanted, dtype)))
            assert given == kind, f"{where} is {given}; wanted: {kind}"
            lines.append({"x": str(shape), "tensor": name})
            lines[-1] |= _judge(where, result, torchs[name], wanted, sizes[name])
    return pd.DataFrame(lines)


def _judge(where: str, ours: Tensor, torchs: Tensor, exact: Tensor, size: Tensor) -> dict[str, Any]:
    error, torch_error = (((x.double() - exact).norm() / size.norm()).item() for x in (ours, torchs))
    torch_error = max(torch_error, 2 * torch.finfo(torch.float32).eps)
    allowed = ALLOWED_RATIO * torch_error
    assert error <= allowed, (
        f"{where} is off by {error:.2g} (relative); allowed: {allowed:.2g}, "
        f"{ALLOWED_RATIO:g} times what PyTorch's own product and sum are off"
    )
    return {"error": error, "torch_error": torch_error, "ratio": error / torch_error}


def _formula(x: Tensor, weight: Tensor) -> Tensor:
    return (x * weight).sum(-1)


def _results(weighted_sum: WeightedSum, inputs: list[Tensor], where: str = "") -> dict[str, Tensor | None]:
    x, weight = (tensor.clone().requires_grad_() for tensor in inputs[:2])
    y = weighted_sum(x, weight)
    assert_tensor(where, y, x)
    for name, tensor, given in zip(("x", "weight"), (x, weight), inputs, strict=False):
        assert torch.equal(tensor, given), f"{where}: {name} was overwritten; clone it first"
    if y.shape == inputs[2].shape:
        y.backward(inputs[2])
    return {"y": y.detach(), "dx": x.grad, "dw": weight.grad}
