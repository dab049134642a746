"""What "correct" means for a weighted sum and for the fused kernels of a training step: ours, or yours.

    from cs336_systems.checks import check_fused, check_weighted_sum
    check_fused("rms_norm", my_rms_norm)
    check_weighted_sum(my_weighted_sum)

The reference is the same of PyTorch's own operations, see `accuracy`.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import pandas as pd
import torch
from torch import Tensor
from torch.nn import functional as F

from cs336_systems.arguments import check_choice
from cs336_systems.checks.accuracy import compare, random_on
from cs336_systems.functional import at_least_float32
from cs336_systems.training.linear_cross_entropy import linear_cross_entropy

IGNORED = -100


@dataclass(frozen=True)
class Fused:
    """A fused kernel.

    Attributes:
        load: imports ours and returns it.
        plain: the same of PyTorch's operations.
        tensors: names of its inputs; those that begin with a capital have no gradient.
        make: shape and generator -> the inputs.
        shapes: to check, of which `make` makes inputs.
    """

    load: Callable[[], Callable[..., Tensor]]
    plain: Callable[..., Tensor]
    tensors: tuple[str, ...]
    make: Callable[[tuple[int, ...], torch.Generator], list[Tensor]]
    shapes: tuple[tuple[int, ...], ...]

    def inputs(self, shape: tuple[int, ...], dtype: torch.dtype, generator: torch.Generator) -> list[Tensor]:
        """Random inputs on the generator's device, those with a gradient in the dtype."""
        with generator.device:
            made = zip(self.tensors, self.make(shape, generator), strict=True)
            return [x.to(dtype) if own.islower() else x for own, x in made]


def _plain_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Computed in float32 at least, as in the model."""
    cos, sin = cos[: x.shape[-2]], sin[: x.shape[-2]]
    even, odd = x.unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2).to(x.dtype)


def _plain_linear_cross_entropy(hidden: Tensor, weight: Tensor, targets: Tensor) -> Tensor:
    """From logits in the dtype of the hidden states, in float32 from there on, as in the model."""
    return F.cross_entropy(at_least_float32(hidden @ weight.T).flatten(0, -2), targets.flatten())


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


# Importing kernels needs Triton.
def _rms_norm() -> Callable[..., Tensor]:
    from cs336_systems.kernels.rms_norm import rms_norm

    return rms_norm


def _rotary() -> Callable[..., Tensor]:
    from cs336_systems.kernels.rotary import rotary

    return rotary


def _swiglu() -> Callable[..., Tensor]:
    from cs336_systems.kernels.swiglu import swiglu

    return swiglu


def _weighted_sum() -> Callable[..., Tensor]:
    from cs336_systems.kernels.weighted_sum import weighted_sum

    return weighted_sum


FUSED: dict[str, Fused] = {
    "rms_norm": Fused(
        _rms_norm,
        lambda x, weight: F.rms_norm(x, weight.shape, weight, eps=1e-5),
        ("x", "weight"),
        lambda shape, generator: [torch.randn(size, generator=generator) for size in (shape, shape[-1:])],
        ((64, 128), (37, 100), (2, 3, 5, 33), (1, 1500), (300, 40), (7,)),
    ),
    "rotary": Fused(
        _rotary,
        _plain_rotary,
        ("x", "Cos", "Sin"),
        _rotary_inputs,
        ((2, 3, 40, 64), (2, 37, 20), (1, 2), (70, 128), (2, 1, 2, 9, 6)),
    ),
    "swiglu": Fused(
        _swiglu,
        lambda a, b: F.silu(a) * b,
        ("a", "b"),
        lambda shape, generator: [2 * torch.randn(shape, generator=generator) for _ in range(2)],
        ((64, 128), (37, 101), (2, 3, 5, 33), (1, 4999), (7,)),
    ),
    "linear_cross_entropy": Fused(
        lambda: linear_cross_entropy,
        _plain_linear_cross_entropy,
        ("hidden", "weight", "Targets"),
        _loss_inputs,
        # Of a single token a few probabilities decide, and so chance, who is how far off.
        ((2, 33, 64, 300), (30, 20, 1000), (50, 17, 37)),
    ),
}
# Odd sizes, a row, a column, and several leading dimensions.
_WEIGHTED_SUM = Fused(
    _weighted_sum,
    lambda x, w: (x * w).sum(-1),
    ("x", "w"),
    FUSED["rms_norm"].make,
    ((64, 128), (37, 100), (1, 1500), (300, 1), (2, 3, 5, 33), (7,)),
)


def check_fused(
    name: str,
    function: Callable[..., Tensor] | None = None,
    *,
    shapes: Iterable[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
) -> pd.DataFrame:
    """Compare a fused kernel and its gradients with float64, on fresh random inputs.

    Args:
        name: one of FUSED.
        function: yours, called as ours is; None is ours.
        shapes: None are those of FUSED.
        device: None is the GPU when there is one.

    Returns:
        One line a shape and tensor: its relative error, PyTorch's, and their ratio.

    Raises:
        AssertionError: a result is missing, of the wrong shape or dtype, not finite, or more than twice
            as far from float64 as PyTorch's own, or an input was overwritten.
        ValueError: the name is unknown.
    """
    check_choice("kernel", name, FUSED)
    kernel, generator = FUSED[name], random_on(device, None)
    return _check(name, kernel, function or kernel.load(), shapes, dtype, generator)


def check_weighted_sum(
    weighted_sum: Callable[[Tensor, Tensor], Tensor],
    *,
    shapes: Iterable[tuple[int, ...]] | None = None,
    dtype: torch.dtype = torch.float32,
    device: str | torch.device | None = None,
    seed: int | None = None,
) -> pd.DataFrame:
    """As `check_fused`, for a weighted sum of rows.

    Args:
        weighted_sum: called as weighted_sum(x, w) with x (..., d) and w (d,), returns (...).
        shapes: of x.
        seed: of the inputs; None draws new ones at every call.
    """
    return _check("x", _WEIGHTED_SUM, weighted_sum, shapes, dtype, random_on(device, seed), by_magnitude=True)


def _check(
    name: str,
    kernel: Fused,
    function: Callable[..., Tensor],
    shapes: Iterable[tuple[int, ...]] | None,
    dtype: torch.dtype,
    generator: torch.Generator,
    **options: bool,
) -> pd.DataFrame:
    lines = []
    for shape in shapes or kernel.shapes:
        inputs = dict(zip(kernel.tensors, kernel.inputs(shape, dtype, generator), strict=True))
        output = kernel.plain(*inputs.values())
        d_output = torch.randn(output.shape, generator=generator, device=output.device).to(output.dtype)
        for tensor, x in inputs.items():
            x.requires_grad_(tensor.islower())
        compared = compare(function, kernel.plain, inputs, d_output, where=f"{name} {shape}", **options)
        lines += [{"shape": str(shape)} | line for line in compared]
    return pd.DataFrame(lines)
